"""Your own model and your own questions: copy this file, change what stands here,
and leave the rest to rl_speed/config/schema.py.

Launch:  cp configs/forkme.py configs/mine.py      (and put your launch line here)
         python experiments/train.py --config=configs/mine.py --dry_run
             (memory and work; starts nothing)
         python experiments/train.py --config=configs/mine.py --workdir=runs/mine
         python experiments/train.py --config=configs/forkme.py --workdir=runs/mine
             --config.model.path=MODEL \\
             --config.data.train=questions.jsonl
                 (or without a copy, by flags)
Expect:  settings of a 1.5 B model on one 80 GB GPU, as in configs/gsm8k.py. --dry_run tells what a
         step needs, and `python experiments/data.py questions.jsonl` whether your questions are
         read as you mean them.
"""

from rl_speed.config import Config, methods
from rl_speed.sampling import Speed


def get_config() -> Config:
    config = Config()

    # The model.
    # A Hugging Face directory (families: rl_speed/policy/README.md); its config.json alone does
    # for --dry_run.
    config.model.path = "MODEL"
    # Of computing alone, faster on a GPU; master weights are always float32.
    config.model.compute_dtype = "bfloat16"
    # Layers are computed again in the backward pass: a third more work for far fewer activations.
    config.model.remat = True
    # Devices that weights and optimizer are split over: more where --dry_run says that one
    # is too small.
    config.mesh.fsdp = 1

    # The questions.
    config.data.task = "jsonl"  # questions from files; the default makes the embedded task's
    # A row a question; .json, .jsonl, .parquet, or OWNER/NAME on the hub.
    config.data.train = "questions.jsonl"
    # The field that holds the question, where it is not found by itself; answer_field likewise.
    config.data.question_field = ""
    # A file of held-out questions, where you have one; several: math500=FILE,aime24:16=FILE, where
    # a question of aime24 gets 16 responses.
    config.data.eval = ""
    # Without one: so many questions of the training file never train, and are evaluated on.
    config.data.hold_out = 200
    # Held-out questions of an evaluation: its standard error is at most 0.5 / sqrt(this).
    config.data.eval_prompts = 200
    # How a question is put to the model; others: policy/prompt_formats.py.
    config.data.prompt = "qwen_math_cot"
    # Tokens; longer prompts are left out and counted in the workdir's data.json.
    config.data.max_prompt_length = 512

    # The reward.
    # math-verify; "integer" is faster; a function of yours is "module:function".
    config.reward.verifier = "math"
    # Where the answer stands: in the last box, as the prompt asks for; "free": anywhere.
    config.reward.mode = "boxed"
    # Processes that check answers: about as many as you have cores to spare.
    config.reward.workers = 8

    # Sampling.
    # Tokens of a response: one that is cut off has no answer yet, so leave room for a
    # whole solution.
    config.sampler.max_new = 1024
    # Responses decoded at once: as many as their keys and values have room for.
    config.sampler.slots = 256
    # Prompts read at once: fewer where reading prompts is what runs out of memory.
    config.sampler.prefill_chunk = 16
    # lower: samples of a question are more alike, and fewer questions have right and wrong ones.
    config.sampler.temperature = 1.0

    # The method and its batch.
    config.driver.groups = 16  # questions of a batch, each with the rule's samples
    # Questions of a call at most: more where few pass screening, so that a call fills a batch.
    config.driver.screen_prompts = 64
    # Any name of rl_speed/config/methods.py; configs/embedded.py says what each of them is.
    methods.apply(config, "speed_rloo")
    # n_init samples screen a question: with more, fewer useful ones are missed, and hopeless ones
    # cost more. n_cont follow if some are right and some wrong: more see rarer successes, and cost
    # in proportion. Other rules: rl_speed/sampling/rules.py.
    config.rule = Speed(n_init=4, n_cont=20)

    # The update.
    # Papers use this for models of billions of weights; small models bear more.
    config.optimizer.learning_rate = 1e-6
    # Steps over which it rises to that: Adam's first steps know little of the gradient's size.
    config.optimizer.warmup_steps = 10
    config.training.steps = 300  # the length of a run; config.training.max_seconds ends it earlier
    # Tokens whose activations a device holds at a time: fewer take less memory.
    config.training.micro_tokens = 8192

    # Evaluation, checkpoints and logs.
    # Steps between evaluations, which take generation time and no training.
    config.evaluation.every = 20
    config.evaluation.samples = 1  # responses to each held-out question
    # Steps that a crash can cost at most; the same command goes on from the newest.
    config.checkpoints.every = 50
    # A project of Weights & Biases; TensorBoard files are written by default.
    config.logging.wandb = ""
    # Of samples and of the order of questions: another one is another run, the same one
    # the same run.
    config.seed = 0
    return config
