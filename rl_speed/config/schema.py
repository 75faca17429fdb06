"""The experiment's configuration: plain typed dataclasses, one per part,
checked before anything is built.

A file in configs/ returns a `Config`; any field can be changed on the command line:
`--config.rule.n_init=6`. Units are in the names or the comments: lengths are tokens, ages are
policy updates.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_speed.config.checks import check
from rl_speed.data.held_out import EVALUATION_FILES, HELD_OUT_OF_TRAIN, NamedFile, parse_files
from rl_speed.data.tasks import TASKS
from rl_speed.named import named, one_of
from rl_speed.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_KINDS,
    LOSSES,
    POOL_ADVANTAGES,
    settings_of,
)
from rl_speed.policy.hf import AS_READ, STORED_DTYPES
from rl_speed.sampling.rules import (
    ENDS,
    METRICS,
    AdaptiveSpeed,
    Allocated,
    Band,
    Dynamic,
    Rule,
    Sequential,
    Speed,
    Uniform,
)

# Directory of the policy that ships with the package.
EMBEDDED = "embedded"


def _speed(rule: "RuleConfig") -> Speed:
    if not 1 <= rule.n_init <= rule.n:
        raise ValueError(
            f"config.rule.n_init must be between 1 and config.rule.n ({rule.n}); got {rule.n_init}"
        )
    return Speed(n_init=rule.n_init, n_cont=rule.n - rule.n_init, low=rule.low, high=rule.high)


def _allocated(rule: "RuleConfig") -> Allocated:
    n_max = rule.n_max or 4 * rule.n
    if not rule.n_min <= rule.n <= n_max:
        raise ValueError(
            f"config.rule.n ({rule.n}, the average) must lie between config.rule.n_min "
            f"({rule.n_min}) and config.rule.n_max ({n_max})"
        )
    return Allocated(n_max, rule.n_min)


# A new rule is one line here and a class in rl_speed/sampling/rules.py.
RULES: dict[str, Callable[["RuleConfig"], Rule]] = {
    "uniform": lambda rule: Uniform(rule.n),
    "dynamic": lambda rule: Dynamic(rule.n, rule.metric),
    "band": lambda rule: Band(rule.n, rule.low, rule.high, rule.inclusive),
    "speed": _speed,
    "adaptive_speed": lambda rule: AdaptiveSpeed(rule.n, rule.n_init),
    "sequential": lambda rule: Sequential(
        rule.m, rule.rounds, rule.k_pos, rule.k_neg, rule.on_unresolved
    ),
    "allocated": _allocated,
}


@dataclass
class Model:
    # A Hugging Face directory; a model of the hub, OWNER/NAME[@REVISION], which is downloaded; or
    # the policy that ships with an embedded task: "embedded" of "chain", "scratchpad" of
    # "scratchpad".
    path: str = EMBEDDED
    # Tokens that end a response beside those that the model's files name, with commas between them:
    # <|im_end|>.
    end_tokens: str = ""
    compute_dtype: str = one_of("float32", "bfloat16")  # master weights are always float32
    remat: bool = False  # recompute each layer in the backward pass
    head_chunk: int = 0  # tokens whose logits exist at once in the trainer (0: about 2^27 logits)


@dataclass
class Data:
    # Embedded and generated; or questions and answers from files, of any kind.
    task: str = one_of(*TASKS, "jsonl")
    # For jsonl: FILE (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a pattern (train-*.parquet),
    # FOLDER[@SPLIT], or a data set of the Hugging Face hub, OWNER/NAME[:CONFIG][@SPLIT]; or several
    # of these with commas between them, read one behind the other.
    train: str = ""
    # Held-out questions, likewise, but a comma begins the next set (a set of several files is a
    # folder or a pattern). Each may be NAME[:SAMPLES]=FILE: with responses to a question of its own
    # (else evaluation.samples), and accuracy under its name. The word hold_out, in place of a file,
    # is the questions held out.
    eval: str = ""
    # Questions of train, those of lowest hash, that never train; the evaluation set where
    # eval is empty.
    hold_out: int = 0
    # Evaluation files, with commas between them, whose questions are taken out of train; the word
    # eval is all files of eval.
    decontaminate: str = ""
    # Of rows of train with the same question (but for case and white space) only the first trains.
    unique: bool = True
    # Filters of train, with commas between them: integer (answers), no_proof, valid, no_choice.
    keep: str = ""
    # "" is found; one, taken alone; or several, joined in this order: body+question. Dotted for
    # nested ones: extra_info.question.
    question_field: str = ""
    # Likewise, of eval and decontaminate ("": question_field, in files that have it).
    eval_question_field: str = ""
    answer_field: str = ""  # reward_model.ground_truth
    solution_field: str = ""
    # "chat", "plain", another name of policy/prompt_formats.py, or a format with {question}.
    prompt: str = "{question}="
    # System turn of prompts that go through the chat template ("": that of the format `prompt`,
    # else that of the row, else none).
    system: str = ""
    instruction: str = ""  # put after every question, before the prompt's template
    max_prompt_length: int = 24  # tokens; longer prompts are dropped and counted
    train_prompts: int = 0  # use only so many (0: all; of an embedded task: without end)
    # The first ones of each held-out file (0: all); of an embedded task, of all its held-out sets
    # (0: 512).
    eval_prompts: int = 512
    on_bad_row: str = one_of("error", "skip")  # skipped rows are counted
    # Which prompt of a finite training set goes next: "shuffle" (anew each epoch), "file" (as they
    # stand), "visits" (least visited first), "schedule" (easy to hard by pass_rates),
    # "forecast" (those worth most by what they say, and by earlier visits).
    order: str = one_of("shuffle", "file", "visits", "schedule", "forecast")
    # File of pass rates by prompt id, measured by a proxy: for "schedule", and for keep_low
    # and keep_high.
    pass_rates: str = ""
    # Offline curation: keep prompts whose rate in pass_rates lies in [keep_low, keep_high].
    keep_low: float = 0.0
    keep_high: float = 1.0
    forecast_buckets: int = 256  # forecast: features, of tokens and of pairs of them
    # forecast: visits that it remembers. Where forecasts lag behind the policy (the metric
    # forecast/mean below forecast/pass_rate) fewer are better.
    forecast_memory: int = 64
    # forecast: a prompt of pass rate p is worth p^worth_power (1-p), less what a group loses by
    # being all alike. 1: SPEED's signal; the less, the more are prompts worth that are seldom
    # solved; 0: the signal of log p.
    worth_power: float = 0.25
    worth_of: str = one_of("sample", "token")  # forecast: of what prompts are worth most
    explore: float = 0.05  # forecast: share drawn uniformly from all that rested
    rest: float = 0.5  # forecast: epochs (visits / size) before a prompt may go again
    forecast_decay: float = 0.9  # share of what is known of a prompt, kept at its next visit

    def held_out_files(self) -> list[NamedFile]:
        """Where each held-out set is read, in the order of `eval`; none for a generated task.

        Raises ValueError: `eval` does not read as sets.
        """
        if self.task != "jsonl":
            return []
        found = parse_files(self.eval, "config.data.eval")
        return found or [NamedFile("", HELD_OUT_OF_TRAIN)] * (self.hold_out > 0)

    def decontamination_files(self) -> list[str]:
        """The files of `decontaminate`, each once, its word "eval" resolved."""
        words = list(filter(None, map(str.strip, self.decontaminate.split(","))))
        of_eval = [f.file for f in self.held_out_files() if f.file != HELD_OUT_OF_TRAIN]
        resolved = (of_eval if word == EVALUATION_FILES else [word] for word in words)
        return list(dict.fromkeys(file for files in resolved for file in files))


@dataclass
class RuleConfig:
    # A function of yours takes this section and returns the rule.
    name: str = one_of(RULES, default="speed", function=True)
    # Samples of a group that are trained on: all of a complete group; of a sequential pool, those
    # that are kept; allocated: on average. A batch has so many rows for each of driver.groups.
    n: int = 24
    n_init: int = 4  # speed: screening samples; adaptive_speed: of prompts without a forecast
    # speed: continue where low < pass rate < high, strictly; band: keep what lies between.
    low: float = 0.0
    high: float = 1.0
    # band: which of low and high are inside. Bae et al. have both in section 4.4; in Table 1
    # neither for balanced bands, and one for skewed ones.
    inclusive: str = one_of(*ENDS)
    # dynamic: what must differ within a group: verdicts (DAPO), or the rewards that are trained on,
    # so that length-aware ones keep groups of right answers. Host only.
    metric: str = one_of(*METRICS)
    m: int = 8  # sequential: samples a round
    rounds: int = 4  # sequential: at most
    k_pos: int = 1  # sequential: right samples that a prompt waits for
    k_neg: int = 0  # sequential: wrong samples that it waits for
    # Sequential, after all rounds: in the batch, or not.
    on_unresolved: str = one_of("keep", "drop")
    n_min: int = 1  # allocated: samples of a prompt, at least
    n_max: int = 0  # allocated: at most (0: four times rule.n)


@dataclass
class Estimate:
    """Pass rates of prompts before they are visited, for rules and objectives that use them."""

    # Decayed counts of each prompt; a head on the policy's hidden state.
    kind: str = one_of("none", "ema", "value")
    gamma: float = 0.5  # allocated: budgets in proportion to p_hat^-gamma
    # variance: in proportion to sqrt((1 - p_hat) / p_hat) instead.
    form: str = one_of("power", "variance")
    prior_a: float = 1.0  # ema: Beta prior, right and wrong
    prior_b: float = 16.0
    decay: float = 0.9  # ema: of a prompt's counts, at each visit
    learning_rate: float = 1e-2  # value: Adam's
    hidden: int = 32  # value: width of the hidden layer (0: a linear head)


@dataclass
class Driver:
    where: str = one_of("host", "in_loop")  # rules run between calls, or inside the compiled step
    groups: int = 16  # complete groups a training step takes (B)
    # Prompts screened per call: what is lacking, or always as many.
    screening: str = one_of("missing", "fixed")
    # When prompts that passed their screening get their last samples: when a step needs their
    # groups ("needed"), so that the policy that trains on them draws them; or all in the next call
    # ("at_once": with "fixed" screening this is SPEED's Algorithm 2).
    continuation: str = one_of("needed", "at_once")
    # The generation batch: at most, or with "fixed" exactly, so many prompts a call (in_loop: a
    # step). For rules of one phase this bounds the prompts in flight (C_max of Bae et al.);
    # in_loop, sampler.context_pool does.
    screen_prompts: int = 64
    # Two-phase rules: one call continues what was accepted and screens for the next step.
    prefetch: bool = True
    # "missing": standard deviations of the accepted count to screen on top of the mean.
    margin: float = 1.0
    # Calls generated ahead of scoring: call k + depth is generated while call k is scored; 0 is
    # strictly sequential. For verifiers that take time: with a call a step, samples are so many
    # updates older. The offset is fixed, so that runs repeat. Host only.
    depth: int = 0
    # Updates that the policy which draws a step's groups lags behind, 0 or 1. With 1 they are drawn
    # while the step before trains: of use where generation has devices of its own. Host only.
    lag: int = 0
    buffer_groups: int = 64  # complete groups that may wait; screening stops while it is full
    buffer_order: str = one_of("fifo", "random")  # of waiting groups, which are trained on first
    max_age: int = -1  # drop groups whose oldest sample is more updates old than this (-1: never)
    # Which groups fill a batch: those launched first ("launch"), or those that complete first
    # ("completion"), the others being cancelled and begun anew later: as published for bands, and
    # in favour of short responses. Host, rules of one phase, depth 0.
    accept: str = one_of("launch", "completion")
    max_calls: int = 32  # generation calls in a step before it trains on what there is


@dataclass
class Replay:
    """RPO: samples start inside a cached response to their question."""

    # How many tokens are cut off a cached response is uniform in 0..L: "none" (no replay), "fixed"
    # (L = replay.length), "half_min" or "min" (half of the shortest response of the group it came
    # from, or all of it).
    window: str = one_of("none", "fixed", "half_min", "min")
    length: int = 500  # fixed: L in tokens
    per_sample: bool = False  # every sample draws its own cut; otherwise a group shares one
    # Tokens of a suffix at most (0: sampler.max_new; -1: as many as were cut off, as released).
    max_new: int = 0
    # Train on the suffix alone (ours); otherwise on the replayed tokens too, taken as on-policy
    # (equations 3 and 5 of the paper, and its release).
    mask_prefix: bool = True
    # Tokens that the loss's means divide by, |o| of 1/|o|: those trained on, or those of whole
    # responses, of which a masked prefix is a part: each suffix token then has the scale that it
    # has in the paper, which trains on prefixes, as does the released code (mask_prefix=False).
    normaliser: str = one_of("trained", "response")
    # The response kept of a group: with this probability the one of highest reward, else any other
    # (-1: the first stays for ever).
    eps: float = 0.1
    only_correct: bool = False  # a wrong response never replaces a right one
    max_tokens: int = 0  # of all cached responses (0: no bound)
    # Before the first step: "sample" one response a question, or "empty": a question's first visit
    # starts at the prompt.
    start: str = one_of("empty", "sample")
    # A file of responses to start from (experiments/replay_cache.py), of this policy or of another.
    cache: str = ""


@dataclass
class Sampler:
    slots: int = 64  # responses that decode at once, over all devices
    max_new: int = 16  # tokens of a response, the end token included
    temperature: float = 1.0
    top_k: int = 0  # evaluation and serving alone; 0: off
    top_p: float = 1.0  # likewise; 1: off
    prefill_chunk: int = 0  # prompts read at once (0: all)
    # Host driver: with fewer samples left than slots, narrow goes on in a half of them, a quarter,
    # ...: for CPUs, where a step costs by its rows. A token is then the same in any call up to
    # rounding.
    tail: str = one_of("whole", "narrow")
    # How decoding reads keys and values: all of them, blocks that are held, or by a kernel (JAX's
    # on GPUs, ours on TPUs).
    attention: str = one_of("auto", "dense", "ragged", "pallas")
    # Of keys and values: "" as computed; bfloat16 has half the size of float32.
    cache_dtype: str = one_of("", "float32", "bfloat16")
    # in_loop: prompts whose KV is held at once (0: all that a step may screen).
    context_pool: int = 0


# The update's compiled function is found by its value; build.py hands out a copy.
@dataclass(unsafe_hash=True)
class Objective:
    # From the samples trained on; or, pool and pool_std: r - the mean over all samples of the
    # prompt, and that over their std, times the prompt's weight. A function of yours is an
    # `objectives.AdvantageFn`.
    advantage: str = one_of(ADVANTAGES, *POOL_ADVANTAGES, function=True)
    # pool: f'(p) of a prompt; power: weight_power p^(weight_power - 1).
    weight: str = one_of("none", "inv_p", "inv_sqrt_p", "power")
    weight_power: float = 0.5
    weight_cap: float = 0.0  # largest weight (0: no bound)
    # p of the weight: the pool's (Reinforce-Ada, Algorithm 1: biased, since the same rewards are in
    # the advantage), or as estimated before the visit (ours: unbiased for the weight's own p).
    weight_from: str = one_of("pool", "estimate")
    # pool: advantage of an only sample: 0, or r - the estimate.
    singleton: str = one_of("zero", "estimate")
    # Of a pool, which samples of a class are kept.
    downsample_order: str = one_of("first", "random")
    downsample_correction: str = one_of("none", "importance")  # importance: undoes the balance
    # objectives/losses.py has their formulas; a function of yours is an `objectives.LossFn`.
    loss: str = one_of(LOSSES, function=True)
    # Numbers of a loss of yours, "name=0.5,other=2". Those that are called like a field here
    # (clip_low, ...) have its value.
    loss_settings: str = ""
    aggregation: str = one_of(*AGGREGATIONS)
    aggregation_constant: float = 0.0  # token_sum_constant: the constant a sample (0: max_new)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0: off; else the bound c > 1 for negative advantages
    truncation: float = 2.0  # tis, and old_logprobs="corrected": largest importance weight
    # What ratios are taken against: "behaviour" (as sampled), "recompute" (just before the update:
    # stale samples count as on-policy), or "corrected" (recomputed, and the loss weighted by the
    # truncated ratio to the behaviour policy).
    old_logprobs: str = one_of("behaviour", "recompute", "corrected")
    kl_coef: float = 0.0  # KL to the reference policy
    # Steps after which the current policy becomes the reference (outer iterations); 0: the
    # first stays.
    reference_every: int = 0
    kl_kind: str = one_of(*KL_KINDS, default="k3")  # in the loss; in the reward it is k1
    kl_in: str = one_of("loss", "reward")
    entropy_coef: float = 0.0

    def loss_numbers(self) -> dict[str, float]:
        """The numbers of `loss`: fields of this section that are called like them,
        and `loss_settings`.

        Raises ValueError: `loss_settings` does not read name=number, or the loss takes no
        such number.
        """
        takes = settings_of(named(self.loss, LOSSES))
        found = {}
        for part in filter(None, map(str.strip, self.loss_settings.split(","))):
            name, _, number = (piece.strip() for piece in part.partition("="))
            try:
                found[name] = float(number)
            except ValueError:
                raise ValueError(
                    f"config.objective.loss_settings: {part!r} does not read name=number"
                ) from None
            if not math.isfinite(found[name]):
                raise ValueError(
                    f"config.objective.loss_settings: {part!r} must be a finite number"
                )
            if name not in takes or name in vars(self):
                raise ValueError(
                    (
                        f"config.objective.loss_settings: {self.loss!r} takes no number {name!r} "
                        "that is set here; it takes "
                        f"{', '.join(sorted(set(takes) - set(vars(self)))) or 'none'}"
                    )
                    + (f"; config.objective.{name} is a field" if name in vars(self) else "")
                )
        return {name: getattr(self, name) for name in takes if name in vars(self)} | found


@dataclass
class Optimizer:
    learning_rate: float = 1e-4
    warmup_steps: int = 10  # optimizer steps, of which an RL step has training.minibatches
    schedule: str = one_of("constant", "linear", "cosine")
    final_rate: float = 0.0  # linear, cosine: share of learning_rate that is left at the end
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # larger gradients are scaled down to it; 0: off


@dataclass
class Reward:
    # In JAX "exact" (token ids), "integer" (the last boxed or last integer) and "scratchpad" (the
    # results of steps written out, for that task); in worker processes "math" (math-verify), or a
    # function of your own, "module:function" (rewards/custom.py says what it takes; those of verl
    # and TRL run as they are): correct is what it values above 0.5.
    verifier: str = "exact"
    mode: str = one_of("boxed", "free")  # math and integer; free: the last integer in the text
    # Tokens at the end of a response in which "integer" looks for its answer. Wrong responses that
    # have one before them alone are counted on the host ("beyond_window").
    integer_window: int = 64
    workers: int = 2  # processes that verify, of each process of a run
    # Per response and function. The first is a limit in seconds of processor time, its child
    # processes' included, so that a verdict does not depend on how busy the machine is ("timeout").
    # What sleeps uses none: it is given up after so many seconds of wall-clock time ("stalled"; 0:
    # six times timeout_s).
    timeout_s: float = 5.0
    stall_s: float = 0.0
    # Responses that a call of a function of a list has (TRL's, for example), and calls of an async
    # function that a worker waits for at once. The limits above are then those of one call.
    batch_size: int = 32
    memory_limit_mb: int = 1024  # address space of a worker in MiB (0: no limit)
    overlong_buffer: int = 0  # DAPO's overlong shaping over the last so many tokens (0: off)
    overlong_factor: float = 1.0  # the penalty at the limit
    accuracy_weight: float = 1.0  # of the verifier's value, in what is trained on
    # Trained on beside accuracy, which alone decides what is filtered and reported as correct (Bae
    # et al.). Host only.
    # Of five checks, 0.2 each: opened, closed, something thought, something after it, ended.
    format_weight: float = 0.0
    # Of the share of characters that English mathematics is written in.
    language_weight: float = 0.0
    think_open: str = "<think>"
    think_close: str = "</think>"
    think_in_prompt: bool = False  # the prompt's template ends with the opening tag
    # Functions of your own, "module:function=weight,module:function" (a weight of 1 where none
    # stands; 0: only logged). Host only.
    extra: str = ""
    # RPO's length-aware reward of complete groups, clip(r / (1 + exp(-alpha (l_ref - length))),
    # low, high). Host only. Rules look at verdicts: dynamic drops groups of right answers alone,
    # for whose sake it was proposed (Yi et al., section 3.4), unless rule.metric is "reward".
    length_alpha: float = 0.0  # per token (0: off; the paper's 0.01)
    length_low: float = 0.5
    length_high: float = 1.0
    # l_ref is the mean length of these responses of the group.
    length_reference: str = one_of("all", "correct")
    # Wrong answers earn length_low, as the formula has it; by default they keep what they have.
    length_literal: bool = False


@dataclass
class Training:
    steps: int = 200
    # Stop earlier, after so long in training steps (0: no limit); evaluation, compilation are free.
    max_seconds: float = 0.0
    # Tokens whose activations a device holds at a time, about: rows of any length fill pieces of so
    # many (0: a thirty-second of the longest rows that a batch can have). A piece holds one row of
    # any length at least.
    micro_tokens: int = 0
    # Optimizer steps per RL step, each on as many samples; groups stay whole where all are of
    # one size and their number is divisible.
    minibatches: int = 1
    max_skipped: int = 5  # stop after so many non-finite updates in a row


@dataclass
class MeshConfig:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass
class GenerationMesh:
    """Where responses are drawn. All axes 0: as `mesh`, where nothing needs to be sent."""

    # "shared": the devices of `mesh`, laid out otherwise. "own": other devices, which draw the next
    # step's groups while this step's are trained on; needs driver.lag=1.
    devices: str = one_of("shared", "own")
    data: int = 0
    fsdp: int = 0
    tensor: int = 0


@dataclass
class Evaluation:
    every: int = 20  # steps; 0: never
    samples: int = 2  # per held-out prompt, where data.eval does not say its own
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Checkpoints:
    every: int = 100  # steps; 0: only the last
    # Where they are written: a folder, or gs://BUCKET/FOLDER ("": checkpoints/ in the workdir). One
    # folder is for one run.
    dir: str = ""
    # Newest ones. One that is kept can be evaluated later, on any questions, with
    # experiments/evaluate.py --step.
    keep: int = 2
    # auto: go on from the newest checkpoint, if there is one; must: refuse to begin anew; never:
    # refuse where there is a run.
    resume: str = one_of("auto", "never", "must")


@dataclass
class Logging:
    rollouts: int = 2  # decoded samples written per step
    profile_step: int = -1  # trace this step with jax.profiler (-1: none)
    progress: bool = True
    export: bool = True  # write the final policy as a Hugging Face directory
    # Of its weights; as_read: that of model.path.
    export_dtype: str = one_of(AS_READ, *STORED_DTYPES)
    tensorboard: bool = True  # event files in workdir/tensorboard
    wandb: str = ""  # a project of Weights & Biases, where wandb is installed ("": none)
    trackio: str = ""  # a project of Trackio, where trackio is installed ("": none)
    # Steps between decoded samples shown as text by the writers above (0: none).
    text_every: int = 20


@dataclass
class Config:
    """Everything a run is made of.

    `validate` raises ValueError naming the first field that cannot be.
    """

    seed: int = 0
    method: str = "speed_rloo"  # a label; set by methods.apply
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    rule: RuleConfig = field(default_factory=RuleConfig)
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
        return dataclasses.asdict(self)

    def get(self, path: str) -> Any:
        """The value of "section.field"."""
        return functools.reduce(getattr, path.split("."), self)

    def set(self, path: str, value: Any) -> None:
        """Give "section.field" a value. Raises AttributeError: there is no such section."""
        section, _, leaf = path.rpartition(".")
        setattr(self.get(section) if section else self, leaf, value)

    def validate(self) -> "Config":
        """Raises ValueError naming the first field that cannot be, and what it may be.

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
        """That a run needs, over all processes."""
        training = self.mesh.data * self.mesh.fsdp * self.mesh.tensor
        own = self.generation_mesh.devices == "own"
        return training + (math.prod(self.generation_axes) if own else 0)

    @property
    def most_evaluation_samples(self) -> int:
        """Responses to a held-out question, in the set where a question gets most of them."""
        usual = self.evaluation.samples
        return max((one.samples or usual for one in self.data.held_out_files()), default=usual)

    def make_rule(self) -> Rule:
        """The sampling rule that `rule` describes."""
        return named(self.rule.name, RULES)(self.rule)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rule.n": 24, ...} of a nested configuration."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat
