"""Settings that several files in configs/ start from: the embedded task,
and each paper's own scale.

Where a paper leaves a field open, the value is ours, and the line says so with "ours".
"""

import difflib
import os
from collections.abc import Iterator

from rl_speed.config import Config, methods
from rl_speed.policy.prompt_formats import BOX

# What a preset comes in: of each tuple one word may be named, the first is meant otherwise.
Words = tuple[tuple[str, ...], ...]

EMBEDDED: Words = (("speed_rloo", *(name for name in methods.METHODS if name != "speed_rloo")),)
SPEED: Words = (("speed_rloo", "rloo", "speed_dapo", "dapo"), ("numina", "dapo17k", "deepscaler"))
BAND: Words = (
    (
        "20-80",
        "plain",
        "0-100",
        "10-90",
        "30-70",
        "40-60",
        "20-100",
        "40-100",
        "0-80",
        "0-60",
        "curation",
        "schedule",
    ),
)
ADA: Words = (
    (
        "ada_seq_balance",
        "ada_seq_pos",
        "ada_seq_balance_paper",
        "ada_est_ema",
        "ada_est_ema_released",
        "ada_est_value",
        "grpo",
    ),
    ("released", "paper"),
)
RPO: Words = (
    ("rpo_grpo", "rpo_dapo", "rpo_grpo_released", "grpo", "dapo"),
    ("half_min", "min", "300", "500", "800"),
    ("plain", "length_aware"),
)
# How a policy is asked and judged: as the embedded task is, as any model, or as a paper does.
EVALUATION: Words = (("embedded", "chat", "speed", "band", "ada", "rpo"),)

# Files of questions, below the folder that the run is launched from.
TRAIN = {
    "numina": "numina/train.jsonl",
    "dapo17k": "dapo17k/dapo_math_17k.jsonl.gz",
    "deepscaler": "deepscaler/deepscaler_40k.jsonl.gz",
    "open_rs": "open_rs/train.jsonl",
}


def choose(variant: str, words: Words) -> list[str]:
    """One word of each tuple: those that `variant` names,
    in any order with commas between them, else the first.

    Raises ValueError: a word that is in none, or two from one.
    """
    chosen, known = [""] * len(words), [word for group in words for word in group]
    for word in filter(None, variant.split(",")):
        where = next((i for i, group in enumerate(words) if word in group), None)
        if where is None:
            close = difflib.get_close_matches(word, known, 3) or known
            raise ValueError(f"this preset has no variant {word!r}; nearest: {', '.join(close)}")
        if chosen[where]:
            raise ValueError(f"this preset is {chosen[where]!r} or {word!r}, not both")
        chosen[where] = word
    return [word or group[0] for word, group in zip(chosen, words)]


def variants(words: Words) -> Iterator[str]:
    """ "" for the preset itself, then every other word alone."""
    yield ""
    yield from (word for group in words for word in group[1:])


def embedded(method: str = "") -> Config:
    """The embedded task on two CPU cores: what every method there shares,
    and a method of `methods.METHODS` if one is named.
    """
    config = Config()
    config.data.max_prompt_length = 10
    config.sampler.max_new = 16
    config.sampler.slots = 256
    config.sampler.prefill_chunk = 32
    # About one prompt in seven passes screening: so many must be screened to fill a batch of 16
    # in one call.
    config.driver.screen_prompts = 320
    config.driver.margin = 2.5
    config.driver.buffer_groups = 192
    # A finite set, encoded once: making questions on the fly would cost as much as generating
    # answers to them.
    config.data.train_prompts = 4096
    # Activations of a piece stay in the processor's cache.
    config.training.micro_tokens = 1024
    config.model.remat = False
    config.optimizer.learning_rate = 1e-3
    # RLOO's gradients are a tenth of SPEED's: a bound that spares it its outliers is one that
    # normalises the other's.
    config.optimizer.max_grad_norm = 0.1
    config.optimizer.warmup_steps = 5
    config.training.steps = 120
    config.evaluation.every = 5
    config.evaluation.samples = 4
    return methods.apply(config, method) if method else config


def tiny(
    config: Config,
    steps: int = 4,
    *,
    groups: int = 4,
    samples: int = 8,
    screen: int = 24,
    slots: int = 0,
    prefill: int = 0,
    train_prompts: int | None = None,
    eval_prompts: int = 24,
    evaluate_every: int = 0,
    export: bool = False,
) -> Config:
    """Shrink `config` to a run of seconds, to see whether it runs: its numbers mean nothing.

    Returns `config`.

    What makes the method stays, and so do model and files. Gradients are taken in one piece, on one
    device, and every second step is saved.

    Args:
      groups, samples: of a batch, and of a group. screen: prompts of a call at most, and groups
        that may wait.
      slots: 0 has one for each row of a batch. prefill: prompts read at once (0: all).
      train_prompts: questions that train (None: as it is). eval_prompts: held-out
        questions (0: all).
      evaluate_every: steps (0: never). export: write the final policy.
    """
    config.driver.groups, config.driver.screen_prompts, config.driver.buffer_groups = (
        groups,
        screen,
        screen,
    )
    config.rule.n, config.rule.n_init = samples, min(config.rule.n_init, max(2, samples // 2))
    config.sampler.slots, config.sampler.prefill_chunk = slots or groups * samples, prefill
    config.sampler.max_new = min(config.sampler.max_new, 16)
    config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 1
    config.data.eval_prompts, config.evaluation.every = eval_prompts, evaluate_every
    if train_prompts is not None:
        config.data.train_prompts = train_prompts
    config.training.steps, config.training.micro_tokens, config.checkpoints.every = steps, 0, 2
    config.logging.progress, config.logging.export = False, export
    return config


def language_model(
    path: str, train: str, prompt: str, max_prompt: int, max_new: int, devices: int
) -> Config:
    """What the papers' scale shares; all of it is ours.

    Args:
      path: a Hugging Face directory, by the model's name, for the user to replace.
      train: key of TRAIN. prompt: of policy/prompt_formats.py, which says where it comes from.
        max_prompt, max_new: tokens.
      devices: of 80 GB, weights and moments split over them.
    """
    config = Config()
    config.model.path = path
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True
    config.mesh.fsdp = devices
    config.data.task = "jsonl"
    config.data.train = TRAIN[train]
    config.data.eval = "eval/math500.jsonl"
    config.data.eval_prompts = 0
    config.data.on_bad_row = "skip"
    config.data.prompt = prompt
    config.data.max_prompt_length = max_prompt
    config.sampler.max_new = max_new
    config.sampler.slots = max(128, 64 * devices)
    config.sampler.prefill_chunk = 16
    config.reward.verifier = "math"
    config.reward.workers = 16
    config.optimizer.learning_rate = 1e-6
    config.training.micro_tokens = 8192
    config.evaluation.samples = 1
    config.checkpoints.every = 50
    return config


def speed(path: str, variant: str = "", devices: int = 1) -> Config:
    """Zhang et al. (arXiv 2506.09016), section 5: SPEED-RLOO, SPEED-DAPO and their baselines.

    `variant`: see `choose`, SPEED.
    """
    method, data = choose(variant, SPEED)
    config = language_model(
        path, data, "qwen_math_cot", max_prompt=1024, max_new=3072, devices=devices
    )
    methods.apply(config, method)
    # As in the paper, NuminaMath's whole answers; and of DAPO-17k, 1,000 questions that never
    # train: it is evaluated on them.
    config.data.keep = "no_proof,integer" if data == "numina" else ""
    if data == "dapo17k":
        config.data.hold_out = 1000
    # Those of Table 1; runs on other data get DAPO-1k from experiments/data.py --write_held_out.
    # The samples are ours: the paper does not say them. It also has AIME 2025.
    config.data.eval = (
        f"dapo1k={'hold_out' if data == 'dapo17k' else 'eval/dapo1k.jsonl'},"
        "math500=eval/math500.jsonl,amc23:16=eval/amc23.jsonl,aime24:16=eval/aime24.jsonl"
    )
    config.rule.n, config.rule.n_init = 24, 8  # the paper's other N_init: 4 and 6
    config.driver.groups = 16
    config.driver.screening, config.driver.screen_prompts = "fixed", 64
    config.optimizer.warmup_steps, config.optimizer.weight_decay = 10, 0.1
    config.sampler.temperature = 1.0
    config.training.steps = 500  # ours
    return config


def band(path: str, variant: str = "", devices: int = 4) -> Config:
    """Bae et al. (arXiv 2504.03380): GRPO on a band of pass rates, and the baselines.

    `variant`: see `choose`, BAND.

    "LOW-HIGH" is the band in percent, both ends in, except in "0-100", which would keep everything.
    "plain" is GRPO; "curation" filters once by a proxy's pass rates, "schedule" also orders easy to
    hard by them.
    """
    (strategy,) = choose(variant, BAND)
    config = language_model(
        path, "deepscaler", "r1_zero_boxed", max_prompt=1024, max_new=4096, devices=devices
    )
    config.rule.n, config.driver.groups, config.training.steps = 16, 16, 256
    methods.apply(config, "band_grpo" if "-" in strategy else "grpo")
    if "-" in strategy:
        config.rule.low, config.rule.high = (int(end) / 100 for end in strategy.split("-"))
        config.rule.inclusive = strategy != "0-100"
    config.data.order = "visits" if strategy not in ("curation", "schedule") else "shuffle"
    if strategy in ("curation", "schedule"):
        # Of the training prompts, from experiments/pass_rates.py --split=train.
        config.data.pass_rates = "pass_rates.json"
        config.data.keep_low, config.data.keep_high = 0.2, 0.8  # ours
        config.data.order = "schedule" if strategy == "schedule" else "shuffle"
    # Accuracy alone filters; format and language are trained on beside it, a reward in [0, 3].
    config.reward.format_weight = config.reward.language_weight = 1.0
    config.reward.think_in_prompt = True
    # A new reference at each outer iteration; its length and the coefficient are ours.
    config.objective.reference_every, config.objective.kl_coef = 64, 1e-3
    # C_max, the most prompts in flight, is ours. What is left over when a batch is full is dropped,
    # as the paper cancels it.
    config.driver.screen_prompts, config.driver.max_age = 64, 0
    config.evaluation.temperature, config.evaluation.top_p = 0.6, 0.95
    return config


def ada(path: str, variant: str = "", devices: int = 1) -> Config:
    """Xiong et al., Reinforce-Ada, as released, or with the paper's entropy bonus.

    `variant`: see `choose`, ADA.
    """
    method, entropy = choose(variant, ADA)
    config = language_model(
        path, "deepscaler", "qwen_math_cot", max_prompt=512, max_new=2048, devices=devices
    )
    config.rule.n = 4
    # 4 rounds of 8, of which 4 are kept; budgets are 8 samples on average (ours).
    methods.apply(config, method)
    config.driver.groups = config.driver.buffer_groups = 512
    # Ours: a batch is gathered in several calls, so that its prompts' KV fits; budgets are shared
    # out among those of one call.
    config.driver.screen_prompts = 512 if config.rule.name == "allocated" else 128
    config.objective.clip_low, config.objective.clip_high = 0.2, 0.28
    if entropy == "paper":
        config.objective.entropy_coef = 1e-4
    config.sampler.temperature = 1.0
    config.training.steps = 600
    config.evaluation.samples = 32
    config.evaluation.every = 100  # ours
    return config


def rpo(path: str, variant: str = "", devices: int = 1) -> Config:
    """Yi et al., RPO: GRPO or DAPO from cached responses, and without.

    `variant`: see `choose`, RPO.

    A number is L in tokens. "length_aware" is the paper's shaped reward with alpha 0.01, in
    [0.5, 1], wrong answers at 0.
    """
    method, window, reward = choose(variant, RPO)
    config = language_model(
        path, "open_rs", "open_rs", max_prompt=512, max_new=4096, devices=devices
    )
    config.rule.n = 6
    methods.apply(config, method)
    config.driver.groups = 96  # 576 samples
    config.driver.screen_prompts, config.driver.buffer_groups = 96, 192  # ours
    # Contexts are a prompt and a replayed response, and take the room of the others.
    config.sampler.slots = max(128, 32 * devices)
    if config.replay.window != "none":
        config.replay.window, config.replay.length = (
            ("fixed", int(window)) if window.isdigit() else (window, config.replay.length)
        )
    elif window != RPO[1][0]:
        raise ValueError(f"{method!r} replays nothing, and has no window {window!r}")
    if reward == "length_aware":
        config.reward.length_alpha, config.reward.length_low, config.reward.length_high = (
            0.01,
            0.5,
            1.0,
        )
    config.sampler.temperature = config.evaluation.temperature = 0.7
    config.training.steps = 292  # 4 epochs of 7,000 questions
    return config


def evaluation(variant: str = "") -> Config:
    """How experiments/evaluate.py asks and judges. `variant`: see `choose`, EVALUATION.

    A paper's are temperature, top-p, prompt, verifier and the limit of a response; the rest is
    ours.
    """
    (name,) = choose(variant, EVALUATION)
    if name == "chat":
        config = language_model("MODEL", "numina", name, max_prompt=0, max_new=4096, devices=1)
        config.data.instruction = "\n" + BOX
    elif name == "embedded":
        config = embedded()
    else:
        config = {"speed": speed, "band": band, "ada": ada, "rpo": rpo}[name]("MODEL", devices=1)
    # Bae et al. and Xiong et al. train with shorter responses.
    config.sampler.max_new = {"band": 8192, "ada": 4096}.get(name, config.sampler.max_new)
    config.model.compute_dtype, config.data.on_bad_row = "float32", "error"
    config.data.max_prompt_length = 0  # as the longest needs
    config.reward.workers = min(16, os.cpu_count() or 1)
    config.evaluation.samples = 32  # Xiong et al.; of the others it is ours
    return config
