"""Configuration of an experiment: plain typed dataclasses, one per part, checked before anything is
built.

A file in configs/ returns a `Config`; the command line can change any field:
`--config.driver.groups=32`, and choose objects by words: `--config.rule=band
--config.rule.low=0.3`. Units are in the names or the comments: lengths are tokens, ages are
policy updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_speed.config import dotted
from rl_speed.config.checks import check
from rl_speed.data.held_out import EVALUATION_FILES, HELD_OUT_OF_TRAIN, NamedFile, parse_files
from rl_speed.data.tasks import TASKS
from rl_speed.named import chosen, one_of
from rl_speed.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_KINDS,
    LOSSES,
    POOL_ADVANTAGES,
    LossFn,
    Pg,
)
from rl_speed.policy.hf import AS_READ, STORED_DTYPES
from rl_speed.sampling.rules import RULES, Rule, Speed, changed, group_size, sized

# Directory of the policy that ships with the package.
EMBEDDED = "embedded"


@dataclass
class Model:
    # A Hugging Face directory; a model of the hub, OWNER/NAME[@REVISION], which is downloaded; or
    # the policy that ships with an embedded task: "embedded" for "chain", "scratchpad" for
    # "scratchpad".
    path: str = EMBEDDED
    # Tokens that end a response, besides those in the model's files, separated by commas:
    # <|im_end|>.
    end_tokens: str = ""
    compute_dtype: str = one_of("float32", "bfloat16")  # master weights are always float32
    remat: bool = False  # recompute each layer in the backward pass
    head_chunk: int = 0  # tokens whose logits exist at once in the trainer (0: about 2^27 logits)


@dataclass
class Data:
    # An embedded task that generates its questions; or jsonl: questions and answers from files.
    task: str = one_of(*TASKS, "jsonl")
    # For jsonl: FILE (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a pattern (train-*.parquet),
    # FOLDER[@SPLIT], or a data set of the Hugging Face hub, OWNER/NAME[:CONFIG][@SPLIT]; or several
    # of these, separated by commas and read in order.
    train: str = ""
    # Held-out questions, in the same forms, but a comma begins the next set (give several files as
    # a folder or a pattern). Each set may be NAME[:SAMPLES]=FILE, with its own samples a question
    # (default: evaluation.samples) and accuracy under its name. The word hold_out in place of a
    # file stands for the questions held out of train.
    eval: str = ""
    # Questions held out of train (those of lowest hash); the evaluation set if eval is empty.
    hold_out: int = 0
    # Evaluation files, separated by commas, whose questions are removed from train; the word eval
    # stands for all files of eval.
    decontaminate: str = ""
    # Train only on the first of rows with the same question (ignoring case and white space).
    unique: bool = True
    # Filters of train, separated by commas: integer (answers), no_proof, valid, no_choice.
    keep: str = ""
    # One field, or several joined in this order: body+question. "": detected. Dotted if nested:
    # extra_info.question.
    question_field: str = ""
    # The same for eval and decontaminate ("": question_field, in files that have it).
    eval_question_field: str = ""
    answer_field: str = ""  # for example reward_model.ground_truth
    solution_field: str = ""
    # "chat", "plain", another name in policy/prompt_formats.py, or a format with {question}.
    prompt: str = "{question}="
    # System turn of prompts that go through the chat template ("": that of the format `prompt`,
    # else that of the row, else none).
    system: str = ""
    instruction: str = ""  # added after every question, before the prompt format
    max_prompt_length: int = 24  # tokens; longer prompts are dropped and counted
    # Training questions of more tokens, without the prompt format, are dropped and counted (0:
    # none).
    max_question_length: int = 0
    train_prompts: int = 0  # use only this many (0: all; embedded task: unlimited)
    # First questions used of each held-out file (0: all), or of all held-out sets of an embedded
    # task (0: 512).
    eval_prompts: int = 512
    on_bad_row: str = one_of("error", "skip")  # skipped rows are counted
    # Order of a finite training set: "shuffle" (anew each epoch), "file" (as stored), "visits"
    # (least visited first), "schedule" (easy to hard by pass_rates), "forecast" (highest value
    # first, forecast from their tokens and earlier visits).
    order: str = one_of("shuffle", "file", "visits", "schedule", "forecast")
    # File of pass rates by prompt id, measured with a proxy: for "schedule", keep_low, keep_high.
    pass_rates: str = ""
    # Offline curation: keep prompts whose rate in pass_rates lies in [keep_low, keep_high].
    keep_low: float = 0.0
    keep_high: float = 1.0
    forecast_buckets: int = 256  # forecast: features for tokens, and for pairs of tokens
    # forecast: visits that it remembers. Use fewer if forecasts lag behind the policy (metric
    # forecast/mean below forecast/pass_rate).
    forecast_memory: int = 64
    # forecast: a prompt of pass rate p has the value p^worth_power (1-p), less the loss of groups
    # with equal rewards. 1: SPEED's signal; smaller: rarely solved prompts count more; 0: the
    # signal of log p.
    worth_power: float = 0.25
    worth_of: str = one_of("sample", "token")  # forecast: value per sample or per token
    explore: float = 0.05  # forecast: share drawn uniformly from all prompts that may be visited
    rest: float = 0.5  # forecast: epochs (visits / size) before a prompt may be visited again
    forecast_decay: float = 0.9  # forecast: share of a prompt's counts kept at its next visit

    def held_out_files(self) -> list[NamedFile]:
        """Files of the held-out sets, in the order of `eval`; none for a generated task.

        Raises ValueError: `eval` is not a list of sets.
        """
        if self.task != "jsonl":
            return []
        found = parse_files(self.eval, "config.data.eval")
        return found or [NamedFile("", HELD_OUT_OF_TRAIN)] * (self.hold_out > 0)

    def decontamination_files(self) -> list[str]:
        """The files of `decontaminate`, each once, with the word "eval" resolved."""
        words = list(filter(None, map(str.strip, self.decontaminate.split(","))))
        of_eval = [f.file for f in self.held_out_files() if f.file != HELD_OUT_OF_TRAIN]
        resolved = (of_eval if word == EVALUATION_FILES else [word] for word in words)
        return list(dict.fromkeys(file for files in resolved for file in files))


@dataclass
class Estimate:
    """Pass rates of prompts before their visit, for rules and objectives that use them."""

    # ema: decayed counts of each prompt; value: a head on the policy's hidden state.
    kind: str = one_of("none", "ema", "value")
    gamma: float = 0.5  # allocated: budgets in proportion to p_hat^-gamma
    # variance: in proportion to sqrt((1 - p_hat) / p_hat) instead.
    form: str = one_of("power", "variance")
    prior_a: float = 1.0  # ema: Beta prior, correct and wrong
    prior_b: float = 16.0
    decay: float = 0.9  # ema: decay of a prompt's counts at each visit
    learning_rate: float = 1e-2  # value: Adam's learning rate
    hidden: int = 32  # value: width of the hidden layer (0: a linear head)


@dataclass
class Driver:
    where: str = one_of("host", "in_loop")  # rules run between calls, or inside the compiled step
    groups: int = 16  # complete groups a training step takes (B)
    # Prompts screened per call: as many as are missing, or a fixed number.
    screening: str = one_of("missing", "fixed")
    # When prompts that passed screening get their last samples: when a step needs their groups
    # ("needed"), so that the policy that trains on them draws them; or all in the next call
    # ("at_once": with "fixed" screening this is SPEED's Algorithm 2).
    continuation: str = one_of("needed", "at_once")
    # The generation batch: most prompts a call, with "fixed" exactly this many (in_loop: a step).
    # For single-phase rules this bounds the prompts in flight (C_max of Bae et al.); in_loop,
    # sampler.context_pool bounds them.
    screen_prompts: int = 64
    # Two-phase rules: one call continues accepted prompts and screens for the next step.
    prefetch: bool = True
    # "missing": standard deviations of the accepted count to screen on top of the mean.
    margin: float = 1.0
    # Calls generated ahead of scoring: call k + depth is generated while call k is scored; 0: none.
    # For slow verifiers. With one call a step, samples are depth updates older. The offset is
    # fixed, so runs repeat. Host only.
    depth: int = 0
    # Age of the policy that draws a step's groups, 0 or 1 updates. With 1 they are drawn while the
    # step before trains: useful if generation has its own devices. Host only.
    lag: int = 0
    buffer_groups: int = 64  # complete groups that may wait; screening stops when it is full
    buffer_order: str = one_of("fifo", "random")  # which waiting groups are trained on first
    max_age: int = -1  # drop groups whose oldest sample is older than this, in updates (-1: never)
    # Which groups fill a batch: those launched first ("launch"), or those that complete first
    # ("completion"). The latter cancels the others and begins them anew later, as published for
    # bands, and favours short responses. Host, single-phase rules, depth 0.
    accept: str = one_of("launch", "completion")
    max_calls: int = 32  # generation calls in a step before it trains on fewer groups


@dataclass
class Replay:
    """RPO: samples start inside a cached response to their prompt."""

    # Tokens cut off the end of a cached response, uniform in 0..L: "none" (no replay), "fixed" (L =
    # replay.length), "half_min" or "min" (half of the shortest response of its group, or all of
    # it).
    window: str = one_of("none", "fixed", "half_min", "min")
    length: int = 500  # fixed: L in tokens
    per_sample: bool = False  # every sample draws its own cut; otherwise a group shares one
    # Most tokens of a suffix (0: sampler.max_new; -1: as many as were cut off, as released).
    max_new: int = 0
    # Train on the suffix alone (ours); otherwise also on the replayed tokens, treated as on-policy
    # (equations 3 and 5 of the paper, and its release).
    mask_prefix: bool = True
    # Tokens that the loss's means divide by, |o| in 1/|o|: trained ones, or those of whole
    # responses, including a masked prefix. "response" gives each suffix token its scale in the
    # paper and the released code, which train on prefixes (mask_prefix=False).
    normaliser: str = one_of("trained", "response")
    # Response cached of a group: with this probability the one of highest reward, else any other
    # (-1: none; what the cache starts with stays forever).
    eps: float = 0.1
    only_correct: bool = False  # a wrong response never replaces a correct one
    max_tokens: int = 0  # most tokens of all cached responses (0: no bound)
    # Before the first step: "sample" one response a prompt; "empty": a prompt's first visit starts
    # at its end.
    start: str = one_of("empty", "sample")
    # A file of responses to start from (experiments/replay_cache.py), by this policy or another.
    cache: str = ""


@dataclass
class Sampler:
    slots: int = 64  # responses decoded at once, over all devices
    max_new: int = 16  # tokens of a response, including the end token
    temperature: float = 1.0
    top_k: int = 0  # evaluation and serving alone; 0: off
    top_p: float = 1.0  # evaluation and serving alone; 1: off
    prefill_chunk: int = 0  # prompts read at once (0: all)
    # Host driver: with fewer samples left than slots, narrow continues in half of the slots, a
    # quarter, ...: for CPUs, where the cost of a step grows with its rows. Tokens then agree
    # between calls only up to rounding.
    tail: str = one_of("whole", "narrow")
    # How decoding reads keys and values: all, blocks in use, or by a kernel (JAX's on GPUs, ours on
    # TPUs).
    attention: str = one_of("auto", "dense", "ragged", "pallas")
    # Dtype of keys and values: "": as computed; bfloat16 has half the size of float32.
    cache_dtype: str = one_of("", "float32", "bfloat16")
    # in_loop: prompts whose KV is held at once (0: all that a step may screen).
    context_pool: int = 0


def _made_loss(kind: Any, present: LossFn) -> LossFn:
    return kind() if isinstance(kind, type) else kind


# The hash by value finds the update's compiled function; build.py passes a copy.
@dataclass(unsafe_hash=True)
class Objective:
    # Computed from the samples trained on; pool: r - the mean over all samples of the prompt, times
    # the prompt's weight; pool_std: also divided by their std; value: r - the estimate from before
    # the visit. A function of yours is an `objectives.AdvantageFn`.
    advantage: str = one_of(ADVANTAGES, *POOL_ADVANTAGES, function=True)
    # pool: weight f'(p) of a prompt; power: weight_power p^(weight_power - 1).
    weight: str = one_of("none", "inv_p", "inv_sqrt_p", "power")
    weight_power: float = 0.5
    weight_cap: float = 0.0  # largest weight (0: no bound)
    # p of the weight: the pool's (Reinforce-Ada, Algorithm 1; biased, because the advantage has the
    # same rewards), or estimated before the visit (ours; unbiased for the weight's own p).
    weight_from: str = one_of("pool", "estimate")
    # pool: advantage of a single sample: 0, r - the estimate, or r (Reinforce-Ada-Est as released).
    singleton: str = one_of("zero", "estimate", "reward")
    # pool: which samples of a class are kept.
    downsample_order: str = one_of("first", "random")
    downsample_correction: str = one_of("none", "importance")  # importance: undoes the balance
    # objectives/losses.py has their formulas; one of yours is an `objectives.LossFn`.
    loss: LossFn = chosen(Pg(), LOSSES, make=_made_loss)
    aggregation: str = one_of(*AGGREGATIONS)
    aggregation_constant: float = 0.0  # token_sum_constant: the constant a sample (0: max_new)
    # micro_token_mean: sequences of a micro-batch. verl takes the mean over tokens of each
    # micro-batch, and the mean of those; ours go over the rows in batch order.
    micro_rows: int = 4
    truncation: float = 2.0  # old_logprobs="corrected": largest importance weight
    # Log-probs in the denominator of ratios: "behaviour" (as sampled), "recompute" (just before the
    # update: stale samples count as on-policy), or "corrected" (recomputed, with the loss weighted
    # by the truncated ratio to the behaviour policy).
    old_logprobs: str = one_of("behaviour", "recompute", "corrected")
    # Temperature of the trainer's log-probs (0: the sampler's). Another one needs
    # old_logprobs="recompute", because ratios to what was sampled would be of two temperatures.
    # The metrics that compare with it then hold the two temperatures, too. RPO as released: 1.
    logprob_temperature: float = 0.0
    kl_coef: float = 0.0  # KL to the reference policy
    # Steps after which the current policy becomes the reference (outer iterations); 0: the initial
    # policy stays.
    reference_every: int = 0
    kl_kind: str = one_of(*KL_KINDS, default="k3")  # in the loss; in the reward it is k1
    kl_in: str = one_of("loss", "reward")
    entropy_coef: float = 0.0


# The hash by value finds the optimizer that was made before.
@dataclass(unsafe_hash=True)
class Optimizer:
    learning_rate: float = 1e-4
    warmup_steps: int = 10  # optimizer steps; an RL step has training.minibatches of them
    # In place of warmup_steps, where above 0: RL steps, whose optimizer steps have one rate, as in
    # verl. A schedule counts likewise.
    warmup_rl_steps: int = 0
    schedule: str = one_of("constant", "linear", "cosine")
    final_rate: float = 0.0  # linear, cosine: share of learning_rate at the end
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # larger gradients are scaled down to it; 0: off


@dataclass
class Reward:
    # In JAX: "exact" (token ids), "integer" (the last boxed or last integer), "scratchpad" (the
    # written results of steps, for that task). In worker processes: "math" (math-verify), or a
    # function of yours, "module:function" (rewards/custom.py has its arguments; those of verl and
    # TRL run unchanged): values above 0.5 are correct.
    verifier: str = "exact"
    mode: str = one_of("boxed", "free")  # math and integer; free: the last integer in the text
    # Tokens at the end of a response that "integer" reads. Wrong responses with an answer only
    # before them are counted on the host ("beyond_window").
    integer_window: int = 64
    workers: int = 2  # verifier processes for each process of a run
    # Limits per response and function. timeout_s: processor time in seconds, including child
    # processes, so that the load of the machine does not matter ("timeout"). stall_s: wall-clock
    # seconds, for code that sleeps ("stalled"; 0: six times timeout_s).
    timeout_s: float = 5.0
    stall_s: float = 0.0
    # Responses in one call of a function that takes lists (such as TRL's), and calls of an async
    # function that a worker awaits at once. The limits above then apply to one call.
    batch_size: int = 32
    memory_limit_mb: int = 1024  # address space of a worker in MiB (0: no limit)
    overlong_buffer: int = 0  # tokens of DAPO's overlong shaping, before the limit (0: off)
    overlong_factor: float = 1.0  # the penalty at the limit
    accuracy_weight: float = 1.0  # weight of the verifier's value in the trained reward
    # Added to the trained reward. Only accuracy decides what is filtered and reported as correct
    # (Bae et al.). Host only.
    # Weight of five checks, 0.2 each: opened, closed, some thought, text after it, ended.
    format_weight: float = 0.0
    # Weight of the share of characters that English mathematics uses.
    language_weight: float = 0.0
    think_open: str = "<think>"
    think_close: str = "</think>"
    think_in_prompt: bool = False  # the prompt's template ends with the opening tag
    # Functions of yours, "module:function=weight,module:function" (weight 1 if not given; 0: only
    # logged). Host only.
    extra: str = ""
    # RPO's length-aware reward of complete groups, clip(r / (1 + exp(-alpha (l_ref - length))),
    # low, high). Host only. Rules see correctness: dynamic drops groups with only correct samples,
    # for which it was proposed (Yi et al., section 3.4), unless rule.metric is "reward".
    length_alpha: float = 0.0  # per token (0: off; the paper's 0.01)
    length_low: float = 0.5
    length_high: float = 1.0
    # l_ref is the mean length of these responses of the group.
    length_reference: str = one_of("all", "correct")
    # Wrong samples get length_low, as in the formula; by default their reward does not change.
    length_literal: bool = False


@dataclass
class Training:
    steps: int = 200
    # Stop after this many seconds of training steps (0: no limit); evaluation and compilation do
    # not count.
    max_seconds: float = 0.0
    # Approximate tokens whose activations a device holds at once: rows are packed into pieces of
    # this many (0: 1/32 of the longest possible rows of a batch). A piece holds at least one row of
    # any length.
    micro_tokens: int = 0
    # Optimizer steps per RL step, each on equally many samples. Groups stay whole if they have one
    # size and their number is divisible. 0: the samples of a group by those that screen it, rule.n
    # / rule.n_init, and 1 without screening: so verl's code makes of SPEED, whose mini-batch it
    # multiplies by the samples of one call.
    minibatches: int = 1
    max_skipped: int = 5  # stop after this many non-finite updates in a row


@dataclass
class MeshConfig:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass
class GenerationMesh:
    """Mesh that draws responses. All axes 0: `mesh`, without transfer of weights."""

    # "shared": the devices of `mesh` in another layout. "own": other devices, which draw the next
    # step's groups while this step's are trained on; needs driver.lag=1.
    devices: str = one_of("shared", "own")
    data: int = 0
    fsdp: int = 0
    tensor: int = 0


@dataclass
class Evaluation:
    every: int = 20  # steps; 0: never
    samples: int = 2  # per held-out prompt, if data.eval does not give its own
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Checkpoints:
    every: int = 100  # steps; 0: only the last
    # Folder for checkpoints, or gs://BUCKET/FOLDER ("": checkpoints/ in the workdir). One folder is
    # for one run.
    dir: str = ""
    # Number of newest ones kept. experiments/evaluate.py --step can evaluate a kept one later, on
    # any questions.
    keep: int = 2
    # auto: continue from the newest checkpoint, if any; must: fail if there is none; never: fail if
    # there is a run.
    resume: str = one_of("auto", "never", "must")


@dataclass
class Logging:
    rollouts: int = 2  # decoded samples written per step
    profile_step: int = -1  # trace this step with jax.profiler (-1: none)
    progress: bool = True
    export: bool = True  # write the final policy as a Hugging Face directory
    # Dtype of the exported weights; as_read: that of model.path.
    export_dtype: str = one_of(AS_READ, *STORED_DTYPES)
    tensorboard: bool = True  # event files in workdir/tensorboard
    wandb: str = ""  # a Weights & Biases project, if wandb is installed ("": none)
    trackio: str = ""  # a Trackio project, if trackio is installed ("": none)
    # Steps between decoded samples that these writers show as text (0: none).
    text_every: int = 20


def _made_rule(kind: Any, present: Rule) -> Rule:
    return sized(kind, group_size(present))


@dataclass
class Config:
    """All settings of a run.

    `validate` raises ValueError naming the first invalid field.
    """

    seed: int = 0
    method: str = "speed_rloo"  # a label; set by methods.apply
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    # How many samples a prompt gets, and when to stop: an object of rl_speed/sampling/rules.py, or
    # one of yours. A word takes over the present samples of a group: --config.rule=band.
    rule: Rule = chosen(Speed.of_size(24), RULES, make=_made_rule, change=changed)
    estimate: Estimate = field(default_factory=Estimate)
    driver: Driver = field(default_factory=Driver)
    replay: Replay = field(default_factory=Replay)
    sampler: Sampler = field(default_factory=Sampler)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    reward: Reward = field(default_factory=Reward)
    training: Training = field(default_factory=Training)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    generation_mesh: GenerationMesh = field(default_factory=GenerationMesh)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    logging: Logging = field(default_factory=Logging)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; an object such as the rule is {"name": its word, number: value, ...}."""
        return dotted.to_dict(self)

    def get(self, path: str) -> Any:
        """The value of "section.field"."""
        return dotted.get(self, path)

    def set(self, path: str, value: Any) -> None:
        """Sets "section.field"; see `dotted.update`."""
        dotted.update(self, {path: value})

    def update(self, values: Mapping[str, Any]) -> None:
        """Sets several fields; see `dotted.update`."""
        dotted.update(self, values)

    def validate(self) -> "Config":
        """Raises ValueError naming the first invalid field, and its allowed values.

        Returns self.
        """
        check(self)
        return self

    @property
    def generation_axes(self) -> tuple[int, int, int]:
        """(data, fsdp, tensor) of the mesh that generates."""
        g = self.generation_mesh
        mesh = g if any((g.data, g.fsdp, g.tensor)) else self.mesh
        return mesh.data, mesh.fsdp, mesh.tensor

    @property
    def devices(self) -> int:
        """Number of devices of a run, over all processes."""
        training = self.mesh.data * self.mesh.fsdp * self.mesh.tensor
        own = self.generation_mesh.devices == "own"
        return training + (math.prod(self.generation_axes) if own else 0)

    @property
    def most_evaluation_samples(self) -> int:
        """Most responses to a held-out prompt, over all sets."""
        usual = self.evaluation.samples
        return max((one.samples or usual for one in self.data.held_out_files()), default=usual)

    @property
    def group_size(self) -> int:
        """Samples of a group that are trained on (on average): rows of a batch for each group."""
        return group_size(self.rule)

    @property
    def minibatches(self) -> int:
        """Optimizer steps of an RL step, `training.minibatches` resolved."""
        screening = getattr(self.rule, "n_init", self.group_size)
        return self.training.minibatches or max(1, self.group_size // screening)
