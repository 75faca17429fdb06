"""Checks a configuration. Every error names the field, the reason, and the allowed values."""

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from rl_speed.config import dotted
from rl_speed.config.paths import check_path
from rl_speed.data.held_out import EVALUATION_FILES, HELD_OUT_OF_TRAIN
from rl_speed.data.schemas import keep_names, question_parts
from rl_speed.data.tasks import POLICIES, TASKS
from rl_speed.named import is_function, load_function, options_of
from rl_speed.objectives import POOL_ADVANTAGES, check_advantage, check_loss
from rl_speed.policy.prompt_formats import PROMPTS, prompt_format
from rl_speed.policy.transformer import MATRIX_INPUTS
from rl_speed.rewards.custom import check_functions, parse_extra
from rl_speed.sampling.rules import needs, two_phase

if TYPE_CHECKING:
    from rl_speed.config import Config, Reward

# Verifiers that are JAX functions: they run inside the compiled loop on any mesh.
JAX_VERIFIERS = ("exact", "integer", "scratchpad")
# Aggregations whose divisor is a number of tokens.
OVER_LENGTHS = ("token_mean", "seq_mean_token_mean", "micro_token_mean")
# Fields of `data` that only data files use.
OF_FILES = (
    "train",
    "eval",
    "hold_out",
    "decontaminate",
    "unique",
    "keep",
    "question_field",
    "eval_question_field",
    "answer_field",
    "solution_field",
    "on_bad_row",
    "max_question_length",
)
# Names under which the parts of the reward are logged.
REWARD_PARTS = ("accuracy", "format", "language", "overlong")


def check_model(c: Any) -> None:
    """Checks what the settings say of the model, in RL and in supervised training."""
    m = c.model
    if m.remat_keeps != "nothing" and not m.remat:
        raise ValueError(
            f"config.model.remat_keeps={m.remat_keeps!r} says what recomputed layers keep, but "
            "config.model.remat is False: set it too"
        )
    if m.lora_rank < 0 or not m.lora_alpha > 0:
        raise ValueError(
            "config.model.lora_rank must be at least 0 and config.model.lora_alpha above 0; got "
            f"{m.lora_rank} and {m.lora_alpha}"
        )
    targets = m.lora_targets.split(",")
    unknown = [name for name in targets if name not in MATRIX_INPUTS]
    if unknown or len(set(targets)) < len(targets):
        raise ValueError(
            f"config.model.lora_targets={m.lora_targets!r}: name matrices of a layer, each once, "
            f"separated by commas: {', '.join(MATRIX_INPUTS)}"
        )


def check(c: "Config") -> None:
    """Raises ValueError naming the first invalid field, and its allowed values."""
    check_evaluation(c)
    check_model(c)
    _check_loss(c)
    _check_rule(c)
    check_optimizer(c, c.training.steps * c.minibatches)
    _require_one(
        c,
        [
            "group_size",
            "driver.groups",
            "driver.screen_prompts",
            "driver.max_calls",
            "objective.micro_rows",
            "training.steps",
            "training.max_skipped",
            "data.max_prompt_length",
            "checkpoints.keep",
        ],
    )
    if c.data.task == "jsonl" and not c.data.train:
        raise ValueError(
            "config.data.train must name a file or a data set when config.data.task is 'jsonl'; it "
            "is empty"
        )
    _check_files(c)
    _check_order(c)
    _require(
        c,
        [
            (
                "sampler.temperature",
                c.sampler.temperature == 0 or c.sampler.temperature >= _LEAST_TEMPERATURE,
                f"{_LEAST_TEMPERATURE:g} or more: below that, all samples of a group are equal and "
                "nothing is learned from them",
            )
        ],
    )
    _check_logprob_temperature(c)
    if c.sampler.top_k > 0 or c.sampler.top_p < 1 or c.sampler.temperature == 0:
        raise ValueError(
            "config.sampler.top_k, top_p and temperature=0 cut the distribution that training "
            "samples from: after an update, the ratio of a sampled token can become 0 or undefined."
            " Train with config.sampler.top_k=0, top_p=1 and temperature > 0; for evaluation set "
            "config.evaluation.temperature and top_p"
        )
    if c.driver.buffer_groups < c.driver.groups:
        raise ValueError(
            f"config.driver.buffer_groups ({c.driver.buffer_groups}) must hold at least one "
            f"training batch (config.driver.groups = {c.driver.groups})"
        )
    _check_depth(c)
    _check_environment(c)
    _check_generation_mesh(c)
    _check_rewards(c)
    _check_logging(c)
    _require(c, [("training.minibatches", c.training.minibatches >= 0, "0 or more")])
    screening = c.screening_samples
    if not c.training.minibatches and c.group_size % screening:
        raise ValueError(
            "config.training.minibatches=0 means config.rule.n / config.rule.n_init, but "
            f"{screening} does not divide {c.group_size}: give a number above 0, or change "
            "config.rule.n_init"
        )
    samples = c.driver.groups * c.group_size
    if samples % c.minibatches:
        raise ValueError(
            f"config.training.minibatches ({c.minibatches}) must divide the {samples} "
            f"samples of a batch (config.driver.groups x the {c.group_size} samples of a group)"
        )
    rows = samples // c.minibatches
    shards = c.mesh.data * c.mesh.fsdp
    if rows % shards:
        raise ValueError(
            f"the {rows} samples of an optimizer step (config.driver.groups x the "
            f"{c.group_size} samples of a group / config.training.minibatches) cannot be split "
            f"over mesh data={c.mesh.data} x fsdp={c.mesh.fsdp}; change config.driver.groups"
        )
    _check_pools(c)
    _check_replay(c)
    if c.driver.where == "in_loop":
        _check_in_loop(c, shards)


def _check_generation_mesh(c: "Config") -> None:
    g = c.generation_mesh
    training = c.mesh.data * c.mesh.fsdp * c.mesh.tensor
    axes = (g.data, g.fsdp, g.tensor)
    lag = c.driver.lag
    given = any(axes)
    _require(c, [("driver.lag", lag in (0, 1), "0 or 1")])
    if c.driver.where == "in_loop" and (lag or given or g.devices == "own"):
        raise ValueError(
            "config.driver.where='in_loop' runs on one mesh and does not support "
            "config.driver.lag=1 or config.generation_mesh: leave both at their defaults, or set "
            "config.driver.where='host'"
        )
    if given and min(axes) < 1:
        raise ValueError(
            "config.generation_mesh needs all of data, fsdp and tensor (or none); got "
            f"data={g.data}, fsdp={g.fsdp}, tensor={g.tensor}"
        )
    if given and g.devices == "shared" and math.prod(axes) != training:
        raise ValueError(
            f"config.generation_mesh has {math.prod(axes)} devices and config.mesh {training}: "
            "with config.generation_mesh.devices='shared' both must have the same number"
        )
    if g.devices == "own" and not lag:
        raise ValueError(
            "config.generation_mesh.devices='own' needs config.driver.lag=1: with 0, generation "
            "and training would wait for each other's devices"
        )
    if c.estimate.kind == "value" and (given or g.devices == "own"):
        raise ValueError(
            "config.estimate.kind='value' reads the weights on the training mesh: leave "
            "config.generation_mesh at its defaults, or set config.estimate.kind='ema'"
        )
    if lag and 0 <= c.driver.max_age < lag:
        raise ValueError(
            f"config.driver.max_age={c.driver.max_age} drops all groups, which are {lag} update "
            f"old with config.driver.lag={lag}: set it to -1 (no limit) or at least {lag}"
        )


# Below these values decoding is nearly greedy. A temperature of 0.01 scales a gap of 0.1 between
# two logits to 10, so the second token is drawn once in 20,000 times. A top_p below 0.01 keeps only
# the most likely token if its probability is at least 0.01.
_LEAST_TEMPERATURE = 0.01
_LEAST_TOP_P = 0.01


def _check_logprob_temperature(c: "Config") -> None:
    o = c.objective
    temperature = o.logprob_temperature
    _require(
        c,
        [
            (
                "objective.logprob_temperature",
                temperature == 0 or temperature >= _LEAST_TEMPERATURE,
                f"0 (the sampler's), or {_LEAST_TEMPERATURE:g} or more",
            )
        ],
    )
    if temperature in (0, c.sampler.temperature):
        return
    if o.old_logprobs != "recompute":
        raise ValueError(
            f"config.objective.logprob_temperature={temperature:g} with "
            f"config.sampler.temperature={c.sampler.temperature:g} needs "
            f"config.objective.old_logprobs='recompute'; got {o.old_logprobs!r}, whose ratios "
            "would mix the two temperatures"
        )
    if o.kl_coef > 0 and o.kl_in == "reward":
        raise ValueError(
            f"config.objective.logprob_temperature={temperature:g} with "
            f"config.sampler.temperature={c.sampler.temperature:g} needs "
            "config.objective.kl_in='loss': the KL in the reward uses the log-probs of the "
            "sampler, which have its temperature"
        )


def require_distinct_draws(
    field: str, samples: int, temperature: float, *, top_k: int = 0, top_p: float = 1.0
) -> None:
    """Raises ValueError if a question gets several samples and decoding is greedy or nearly so.

    Args:
      field: setting that gives the number of samples, for the error message.
    """
    greedy = {
        f"config.evaluation.temperature={temperature:g}": temperature < _LEAST_TEMPERATURE,
        f"config.sampler.top_k={top_k}": top_k == 1,
        f"config.evaluation.top_p={top_p:g}": top_p < _LEAST_TOP_P,
    }
    causes = [name for name, keeps_one in greedy.items() if keeps_one]
    if samples > 1 and causes:
        raise ValueError(
            f"config.{field} gives {samples} samples per question, but with {causes[0]} decoding "
            "is (nearly) greedy: all samples would be the same response, and pass@k and confidence "
            "intervals would be wrong. Set 1 sample per question, or a temperature of at least "
            f"{_LEAST_TEMPERATURE:g}, a top_p of at least {_LEAST_TOP_P:g} and a top_k other than 1"
        )


def check_evaluation(c: "Config") -> None:
    """Checks the settings that evaluating a policy needs; `check` also checks those of training."""
    check_types(c)
    check_options(c)
    _require_one(
        c,
        [
            "evaluation.samples",
            "sampler.slots",
            "sampler.max_new",
            "reward.workers",
            "reward.integer_window",
            "reward.batch_size",
            "mesh.data",
            "mesh.fsdp",
            "mesh.tensor",
        ],
    )
    _check_turns(c)
    e = c.evaluation
    r = c.reward
    longest = c.data.max_prompt_length
    _require(
        c,
        [
            ("evaluation.temperature", e.temperature >= 0, "0 (greedy) or more"),
            ("evaluation.top_p", 0 < e.top_p <= 1, "in (0, 1]"),
            ("sampler.top_k", c.sampler.top_k >= 0, "0 (off) or more"),
            ("data.max_prompt_length", longest >= 0, "0 (that of the longest prompt) or more"),
            # Seeds of 2**32 and above repeat the keys of smaller ones.
            ("seed", 0 <= c.seed < 2**32, "0 or more, and less than 2**32"),
        ],
    )
    most = c.most_evaluation_samples
    field = "evaluation.samples" if most == e.samples else "data.eval"
    require_distinct_draws(field, most, e.temperature, top_k=c.sampler.top_k, top_p=e.top_p)
    if r.verifier not in (*JAX_VERIFIERS, "math") and not is_function(r.verifier):
        raise ValueError(
            f"config.reward.verifier must be one of {', '.join(JAX_VERIFIERS)}, math, or "
            f"a function of yours, 'module:function'; got {r.verifier!r}"
        )
    _require(
        c,
        [
            ("reward.memory_limit_mb", r.memory_limit_mb >= 0, "0 (no limit) or more"),
            ("reward.timeout_s", r.timeout_s > 0, "positive"),
        ],
    )
    if r.stall_s and not r.stall_s >= r.timeout_s:
        raise ValueError(
            "config.reward.stall_s, wall-clock time, must be 0 (six times "
            "config.reward.timeout_s) or at least config.reward.timeout_s, processor time; got "
            f"{r.stall_s} and {r.timeout_s}"
        )


def _require(c: Any, rules: Sequence[tuple[str, bool, str]]) -> None:
    """Raises ValueError for the first (field, whether its value is allowed, allowed values) that is
    not allowed.
    """
    for name, ok, want in rules:
        if not ok:
            raise ValueError(f"config.{name} must be {want}; got {dotted.get(c, name)!r}")


def _require_one(c: "Config", names: Sequence[str]) -> None:
    _require(c, [(name, c.get(name) >= 1, "at least 1") for name in names])


def check_options(c: Any) -> None:
    """Checks the fields of any configuration that allow a list of words or a user's function.
    Imports the function and tries it.
    """
    objects = dotted.choices(c)
    for section in (
        f.name
        for f in dataclasses.fields(c)
        if dataclasses.is_dataclass(getattr(c, f.name)) and f.name not in objects
    ):
        for f in dataclasses.fields(getattr(c, section)):
            value = getattr(getattr(c, section), f.name)
            words = options_of(f)
            if not words or value in words:
                continue
            own = f.metadata["function"]
            if not (own and is_function(value)):
                raise ValueError(
                    f"config.{section}.{f.name} must be one of {', '.join(words)}"
                    + (", or a function of yours, 'module:function'" if own else "")
                    + f"; got {value!r}"
                )
            try:
                function = load_function(value)
                if f.name == "advantage":
                    check_advantage(function)
            except Exception as error:  # including errors raised by the user's module
                said = (
                    error
                    if isinstance(error, ValueError)
                    else f"it raised {type(error).__name__}: {error}"
                )
                raise ValueError(f"config.{section}.{f.name}={value!r}: {said}") from error


def _check_hashable(c: "Config", path: str) -> None:
    """Checks that a rule or loss can be hashed: compiled functions are cached by its value."""
    value = dotted.get(c, path)
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"config.{path}={dotted.choices(c)[path].word_of(value)!r} cannot be hashed ({error}): "
            "declare its class with @dataclass(frozen=True), and use tuples in place of lists"
        ) from None


def _check_loss(c: "Config") -> None:
    """Calls the loss on a small batch of shapes."""
    _check_hashable(c, "objective.loss")
    try:
        check_loss(c.objective.loss)
    except ValueError as error:
        word = dotted.choices(c)["objective.loss"].word_of(c.objective.loss)
        raise ValueError(f"config.objective.loss={word!r}: {error}") from None


def _check_rule(c: "Config") -> None:
    """Checks the rule's attributes and the settings it needs; also calls its own `check(config)`,
    if any.
    """
    rule = c.rule
    word = dotted.choices(c)["rule"].word_of(rule)
    for name in ("max_samples", "first_samples", "init", "decide"):
        if not hasattr(rule, name):
            raise ValueError(
                f"config.rule={word!r} is not a sampling rule: it has no {name} (the interface is "
                "`Rule` in rl_speed/sampling/rules.py)"
            )
    _check_hashable(c, "rule")
    downsamples = needs(rule, "downsampling")
    if rule.max_samples > c.group_size and not (downsamples or needs(rule, "budgets")):
        raise ValueError(
            f"config.rule={word!r}: a prompt may get {rule.max_samples} samples, but a batch has "
            f"only {c.group_size} rows per group (config.rule.n); raise config.rule.n"
        )
    if needs(rule, "budgets") and not (hasattr(rule, "n_min") and hasattr(rule, "n_max")):
        raise ValueError(
            f"config.rule={word!r} needs budgets, so it must have the attributes n_min and n_max, "
            "the fewest and most samples of a prompt"
        )
    if needs(rule, "budgets") and c.estimate.kind == "none":
        raise ValueError(
            f"config.rule={word!r} needs config.estimate.kind to be 'ema' or 'value'; got 'none'"
        )
    if needs(rule, "forecast") and (c.data.order != "forecast" or c.estimate.kind != "none"):
        raise ValueError(
            f"config.rule={word!r} takes the number of screening samples from a forecast: it needs "
            "config.data.order='forecast' and config.estimate.kind='none'; got "
            f"{c.data.order!r} and {c.estimate.kind!r}"
        )
    given = needs(rule, "budgets") or needs(rule, "forecast")
    if given and c.driver.screening != "missing":
        raise ValueError(
            f"config.rule={word!r} needs config.driver.screening='missing', because the prompts of "
            "one batch share a number of samples; 'fixed' draws more prompts than a step takes"
        )
    d = c.driver
    if needs(rule, "budgets") and (d.in_flight or (d.depth and d.screen_prompts < d.groups)):
        raise ValueError(
            f"config.rule={word!r} shares a number of samples among the prompts of one generation "
            "call, which must be those of one batch: it needs config.driver.in_flight=0, and with "
            "config.driver.depth above 0 a config.driver.screen_prompts of at least "
            "config.driver.groups"
        )
    if c.data.order == "forecast" and c.group_size < 2:
        raise ValueError(
            "config.data.order='forecast' needs groups of at least 2 samples; "
            f"config.rule={word!r} has {c.group_size}"
        )
    if own := getattr(rule, "check", None):
        own(c)


def check_optimizer(c: Any, steps: int) -> None:
    """Checks the optimizer settings of any configuration for a run of `steps` optimizer steps."""
    o = c.optimizer
    if is_function(o.kind):
        load_function(o.kind)
    if o.kind == "muon" and c.model.lora_rank:
        raise ValueError(
            "config.optimizer.kind='muon' is for the matrices of the layers, which adapters "
            "(config.model.lora_rank) leave as they are: use adamw or adafactor"
        )
    name, warmup, of = "warmup_steps", o.warmup_steps, f"{steps} updates"
    if o.warmup_rl_steps:
        name, warmup, steps = "warmup_rl_steps", o.warmup_rl_steps, c.training.steps
        of = f"{steps} RL steps"
    if o.schedule != "constant" and warmup >= steps:
        raise ValueError(
            f"config.optimizer.{name}={warmup} leaves none of {of} for "
            f"config.optimizer.schedule={o.schedule!r}: set fewer warm-up steps or more steps"
        )
    _require(
        c,
        [
            ("optimizer.learning_rate", o.learning_rate >= 0, "0 or more"),
            ("optimizer.warmup_steps", o.warmup_steps >= 0, "0 or more"),
            ("optimizer.warmup_rl_steps", o.warmup_rl_steps >= 0, "0 or more"),
            ("optimizer.final_rate", 0 <= o.final_rate <= 1, "in [0, 1]"),
            ("optimizer.weight_decay", o.weight_decay >= 0, "0 or more"),
            ("optimizer.b1", 0 <= o.b1 < 1, "in [0, 1)"),
            ("optimizer.b2", 0 <= o.b2 < 1, "in [0, 1)"),
            ("optimizer.eps", o.eps > 0, "above 0"),
            ("optimizer.max_grad_norm", o.max_grad_norm >= 0, "0 (off) or more"),
        ],
    )


def _check_files(c: "Config") -> None:
    """Checks data files, their fields, and the prompt format."""
    d = c.data
    keep_names(d.keep)
    for name in ("question_field", "eval_question_field"):
        question_parts(getattr(d, name), f"config.data.{name}")
    form = prompt_format(d.prompt)
    _require(
        c,
        [
            ("data.hold_out", d.hold_out >= 0, "0 (none) or more"),
            ("data.max_question_length", d.max_question_length >= 0, "0 (any) or more"),
        ],
    )
    policy = POLICIES.get(c.model.path)
    if d.task in TASKS:
        if policy and policy.name != d.task:
            raise ValueError(
                f"config.model.path={c.model.path!r} is the policy of task {policy.name!r}, with "
                f"another vocabulary than config.data.task={d.task!r}: set "
                f"config.model.path={TASKS[d.task].policy!r}, or config.data.task={policy.name!r}"
            )
        for name in OF_FILES:
            if (value := getattr(d, name)) != getattr(type(d)(), name):
                raise ValueError(
                    f"config.data.{name}={value!r} is only for config.data.task='jsonl': task "
                    f"{d.task!r} generates its questions. Remove the setting, or change "
                    f"config.data.task={d.task!r}"
                )
    files = [one.file for one in d.held_out_files()]
    if HELD_OUT_OF_TRAIN in files and not d.hold_out:
        raise ValueError(
            f"config.data.eval={d.eval!r} uses questions held out of training "
            f"({HELD_OUT_OF_TRAIN!r}), but config.data.hold_out is 0: set it to their number"
        )
    words = [word.strip() for word in d.decontaminate.split(",")]
    if EVALUATION_FILES in words and set(files) <= {HELD_OUT_OF_TRAIN}:
        raise ValueError(
            f"config.data.decontaminate={d.decontaminate!r} stands for the files of "
            f"config.data.eval ({EVALUATION_FILES!r}), but config.data.eval names no file"
        )
    if d.eval_question_field and not (d.eval or d.decontaminate):
        raise ValueError(
            f"config.data.eval_question_field={d.eval_question_field!r} needs config.data.eval or "
            "config.data.decontaminate: neither is set"
        )
    if d.system and not form.chat:
        raise ValueError(
            "config.data.system needs a prompt format that uses the chat template; "
            f"config.data.prompt={d.prompt!r} does not: write the text of config.data.system into "
            "config.data.prompt"
        )
    if (
        d.instruction
        and d.prompt in PROMPTS
        and form != PROMPTS["chat"]
        and form != PROMPTS["plain"]
    ):
        raise ValueError(
            f"config.data.prompt={d.prompt!r} already has an instruction: set "
            f"config.data.instruction=''; got {d.instruction!r}"
        )


def _check_order(c: "Config") -> None:
    """Checks order and curation of the training prompts."""
    d = c.data
    _require(
        c,
        [
            ("data.keep_low", 0 <= d.keep_low <= 1, "in [0, 1]"),
            (
                "data.keep_high",
                d.keep_low <= d.keep_high <= 1,
                "between config.data.keep_low and 1",
            ),
            ("data.explore", 0 <= d.explore <= 1, "in [0, 1]"),
            ("data.rest", 0 <= d.rest < 1, "in [0, 1)"),
            ("data.forecast_memory", d.forecast_memory >= 1, "1 or more"),
            ("data.worth_power", 0 <= d.worth_power <= 1, "in [0, 1]"),
            ("data.forecast_buckets", 1 <= d.forecast_buckets <= 4096, "between 1 and 4096"),
            ("data.forecast_decay", 0 < d.forecast_decay <= 1, "in (0, 1]"),
        ],
    )
    needs_table = d.order == "schedule" or (d.keep_low, d.keep_high) != (0.0, 1.0)
    if needs_table and not d.pass_rates:
        raise ValueError(
            "config.data.order='schedule' and config.data.keep_low/keep_high need "
            "config.data.pass_rates, a file of pass rates by prompt id (experiments/pass_rates.py "
            "--split=train writes one)"
        )
    if d.pass_rates and not needs_table:
        raise ValueError(
            f"config.data.pass_rates={d.pass_rates!r} is used only by "
            "config.data.order='schedule' and by config.data.keep_low/keep_high, and neither is set"
        )
    if d.task in TASKS and not d.train_prompts and (d.order != "shuffle" or needs_table):
        raise ValueError(
            f"config.data.order={d.order!r} with config.data.keep_low={d.keep_low:g}, "
            f"keep_high={d.keep_high:g} needs a finite training set, but with "
            f"config.data.train_prompts=0 task {d.task!r} never repeats a prompt. Set "
            "config.data.train_prompts to their number"
        )


def _check_depth(c: "Config") -> None:
    """Checks what `driver.depth` and accept="completion" need."""
    d = c.driver
    rule = c.rule
    if d.accept == "completion" and (d.depth or two_phase(rule)):
        raise ValueError(
            "config.driver.accept='completion' needs a rule of one phase (uniform, dynamic, band, "
            f"allocated) and config.driver.depth=0; got config.rule={rule}, "
            f"config.driver.depth={d.depth}. Only groups that were neither scored nor continued "
            "can be cancelled"
        )
    on_host = d.where == "host" and two_phase(rule)
    least = d.groups + d.screen_prompts
    if on_host and d.continuation == "at_once" and d.buffer_groups < least:
        raise ValueError(
            f"config.driver.buffer_groups ({d.buffer_groups}) must be at least {least} for "
            "config.driver.continuation='at_once': all prompts that a call accepts complete in the "
            "next call. It needs config.driver.groups + config.driver.screen_prompts"
        )
    _require(c, [("driver.depth", d.depth >= 0, "0 (no call generated ahead of scoring) or more")])
    if d.buffer_groups < d.groups * (1 + d.depth):
        raise ValueError(
            f"config.driver.buffer_groups ({d.buffer_groups}) must hold "
            f"{d.groups * (1 + d.depth)} groups, config.driver.groups ({d.groups}) for each of "
            f"the 1 + {d.depth} generation calls in flight with config.driver.depth={d.depth}: "
            "each returns about one training batch"
        )
    _require(c, [("driver.in_flight", d.in_flight >= 0, "0 (off) or more")])
    if d.in_flight:
        least = max(c.sampler.slots, rule.max_samples)
        if d.in_flight < least:
            raise ValueError(
                f"config.driver.in_flight ({d.in_flight}) must be 0, or at least {least}: "
                "config.sampler.slots, and the samples of a prompt"
            )
        if d.max_age == 0:
            raise ValueError(
                "config.driver.max_age=0 drops every sample that another policy drew, and with "
                f"config.driver.in_flight={d.in_flight} samples go on under the next policies: set "
                "it to -1 (no limit) or to the updates that a response may take"
            )
        needed = {"driver.where": "host", "driver.depth": 0, "driver.accept": "launch"}
        for name, value in needed.items():
            if c.get(name) != value:
                raise ValueError(
                    f"config.driver.in_flight={d.in_flight} needs config.{name}={value!r}, got "
                    f"{c.get(name)!r}: samples go on from one call to the next"
                )
    if 0 <= d.max_age < d.depth:
        raise ValueError(
            f"config.driver.max_age ({d.max_age}) must be -1 or at least config.driver.depth "
            f"({d.depth}): with one call per step, samples are {d.depth} updates old when they are "
            "scored, and all would be dropped"
        )


def _check_turns(c: "Config") -> None:
    """Checks the section `environment` by itself."""
    e = c.environment
    if not e.reply and e.stop:
        raise ValueError(
            f"config.environment.stop={e.stop!r} has no effect without config.environment.reply"
        )
    _require_one(c, ["environment.max_turns"])
    if e.reply in ("calculator", "table") and "=" not in e.stop.split():
        raise ValueError(
            f"config.environment.reply={e.reply!r} replies to turns that end with '=', and needs "
            f"config.environment.stop='=', got {e.stop!r}"
        )


def _check_environment(c: "Config") -> None:
    """Checks what turns of an environment need of a training run."""
    e = c.environment
    if not e.reply:
        return
    if not c.driver.in_flight:
        least = max(c.sampler.slots, c.rule.max_samples)
        raise ValueError(
            f"config.environment.reply={e.reply!r} needs config.driver.in_flight, because a sample "
            f"goes on in the call after a reply: set it to {least} or more"
        )
    if c.driver.max_calls <= e.max_turns:
        raise ValueError(
            f"config.driver.max_calls ({c.driver.max_calls}) must be above "
            f"config.environment.max_turns ({e.max_turns}), the most replies: a response has one "
            "turn more, and each turn takes a generation call"
        )
    if c.replay.window != "none":
        raise ValueError(
            f"config.environment.reply={e.reply!r} needs config.replay.window='none', got "
            f"{c.replay.window!r}: a replayed response would not tell which tokens are replies"
        )


def _check_rewards(c: "Config") -> None:
    """Checks weights and bounds of reward terms, and `objective.reference_every`."""
    r = c.reward
    o = c.objective
    _check_functions(r)
    _require(
        c,
        [
            ("reward.accuracy_weight", r.accuracy_weight > 0, "positive"),
            *(
                (name, c.get(name) >= 0, "0 (off) or more")
                for name in (
                    "reward.format_weight",
                    "reward.language_weight",
                    "reward.length_alpha",
                    "objective.reference_every",
                )
            ),
        ],
    )
    if o.advantage == "ngrpo":
        for name, value in (
            ("reward.accuracy_weight", 1.0),
            ("reward.format_weight", 0.0),
            ("reward.language_weight", 0.0),
            ("reward.extra", ""),
            ("reward.length_alpha", 0.0),
        ):
            if c.get(name) != value:
                raise ValueError(
                    f"config.objective.advantage='ngrpo' takes 1 as the highest reward, but with "
                    f"config.{name}={c.get(name)!r} it may be another: set it to {value!r}, or use "
                    "another advantage"
                )
        if o.kl_coef > 0 and o.kl_in == "reward":
            raise ValueError(
                "config.objective.advantage='ngrpo' takes 1 as the highest reward, but a KL in the "
                "reward changes it: set config.objective.kl_in='loss'"
            )
    if r.format_weight and not (r.think_open and r.think_close):
        raise ValueError(
            "config.reward.think_open and think_close must not be empty when "
            f"config.reward.format_weight is set; got {r.think_open!r} and {r.think_close!r}"
        )
    if r.length_alpha and not r.length_low <= r.length_high:
        raise ValueError(
            f"config.reward.length_low ({r.length_low}) must not exceed config.reward.length_high "
            f"({r.length_high})"
        )
    if o.reference_every and not o.kl_coef > 0:
        raise ValueError(
            f"config.objective.reference_every ({o.reference_every}) needs "
            f"config.objective.kl_coef above 0 (got {o.kl_coef}): only the KL uses a reference "
            "policy"
        )


def _check_functions(r: "Reward") -> None:
    """Checks in a worker process that the user's reward functions exist, are callable, and take
    known arguments.
    """
    try:
        extra = parse_extra(r.extra)
    except ValueError as error:
        raise ValueError(f"config.reward.extra={r.extra!r}: {error}") from None
    for e in extra:
        if e.name in REWARD_PARTS:
            raise ValueError(
                f"config.reward.extra: {e.function!r} has the name of a built-in part of the "
                f"reward ({', '.join(REWARD_PARTS)}): rename the function"
            )
    named = [(r.verifier, "verifier")] if is_function(r.verifier) else []
    for function, field in [*named, *((e.function, "extra") for e in extra)]:
        try:
            check_functions([function], r.memory_limit_mb or None)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"config.reward.{field}: {error}") from None


def _check_logging(c: "Config") -> None:
    """Checks the settings of the metric writers."""
    _require(c, [("logging.text_every", c.logging.text_every >= 0, "0 (none) or more")])
    for name in ("wandb", "trackio"):
        if getattr(c.logging, name):
            require_package(name, f"config.logging.{name} is set")


def require_package(name: str, why: str) -> None:
    """Raises ValueError unless the package is installed. A folder of that name without code does
    not count: W&B leaves one.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{why}, but the package {name} is not installed: pip install {name}")


def _check_pools(c: "Config") -> None:
    """Checks the settings of pool advantages and estimates."""
    o = c.objective
    if o.advantage in POOL_ADVANTAGES:
        if o.kl_coef > 0 and o.kl_in == "reward":
            raise ValueError(
                f"config.objective.advantage={o.advantage!r} needs config.objective.kl_in='loss': "
                "the log-probs under the reference policy are not computed for all samples of a "
                "pool"
            )
        if o.singleton != "zero" and o.advantage == "pool_std":
            raise ValueError(
                f"config.objective.singleton={o.singleton!r} needs "
                "config.objective.advantage='pool': a single sample has no std to divide by"
            )
    else:
        for name, default in (
            ("weight", "none"),
            ("singleton", "zero"),
            ("downsample_correction", "none"),
        ):
            if getattr(o, name) != default:
                allowed = [a for a in POOL_ADVANTAGES if name != "singleton" or a != "pool_std"]
                raise ValueError(
                    f"config.objective.{name}={getattr(o, name)!r} needs "
                    f"config.objective.advantage to be one of {', '.join(allowed)}; got "
                    f"{o.advantage!r}"
                )
    e = c.estimate
    _require(
        c,
        [
            ("objective.weight_power", o.weight_power > 0, "positive"),
            ("objective.weight_cap", o.weight_cap >= 0, "0 (no bound) or positive"),
            ("estimate.decay", 0 < e.decay <= 1, "in (0, 1]"),
            ("estimate.prior_a", e.prior_a > 0, "positive"),
            ("estimate.prior_b", e.prior_b > 0, "positive"),
            ("estimate.learning_rate", e.learning_rate > 0, "positive"),
            ("estimate.hidden", e.hidden >= 0, "0 (linear) or positive"),
        ],
    )
    wants = [
        name
        for name, used in (
            ("objective.weight_from='estimate'", o.weight_from == "estimate"),
            ("objective.singleton='estimate'", o.singleton == "estimate"),
            ("objective.advantage='value'", o.advantage == "value"),
        )
        if used
    ]
    if wants and c.estimate.kind == "none":
        raise ValueError(
            f"config.{wants[0]} needs config.estimate.kind to be 'ema' or 'value'; got 'none'"
        )


def _check_replay(c: "Config") -> None:
    """Checks the settings of replay."""
    r = c.replay
    if r.window == "none":
        if r.cache:
            raise ValueError(
                f"config.replay.cache={r.cache!r} has no effect, because config.replay.window is "
                "'none': choose a window, or remove the cache"
            )
        _require(c, [("replay.normaliser", r.normaliser == "trained", "'trained' without replay")])
        return
    if r.normaliser == "response" and c.objective.aggregation not in OVER_LENGTHS:
        raise ValueError(
            "config.replay.normaliser='response' needs config.objective.aggregation to be one of "
            f"{', '.join(OVER_LENGTHS)}, which divide by response lengths; got "
            f"{c.objective.aggregation!r}"
        )
    if c.data.task in TASKS and not c.data.train_prompts:
        raise ValueError(
            f"config.replay.window={r.window!r} needs a finite data set, because responses are "
            "cached by question: set config.data.train_prompts"
        )
    _require(
        c,
        [
            (
                "replay.eps",
                0 <= r.eps <= 1 or r.eps == -1,
                "in [0, 1], or -1 (the first response stays)",
            ),
            ("replay.length", r.length >= 0, "0 or more"),
            ("replay.max_tokens", r.max_tokens >= 0, "0 (no bound) or more"),
            (
                "replay.max_new",
                r.max_new >= -1,
                "-1 (as many as were cut off), 0 (config.sampler.max_new) or more",
            ),
        ],
    )
    if r.max_new > c.sampler.max_new:
        raise ValueError(
            f"config.replay.max_new ({r.max_new}) must not exceed config.sampler.max_new "
            f"({c.sampler.max_new}), which bounds prefix and suffix together"
        )


def _check_in_loop(c: "Config", shards: int) -> None:
    """Raises ValueError for settings that the fused step does not support, with the reason and the
    alternatives.
    """
    for name, value, allowed, reason in [
        (
            "driver.depth",
            c.driver.depth,
            (0,),
            "scoring is part of the compiled program, so nothing can overlap with it",
        ),
        (
            "driver.accept",
            c.driver.accept,
            ("launch",),
            "the result must not depend on which sample ended first",
        ),
        (
            "reward.overlong_buffer",
            c.reward.overlong_buffer,
            (0,),
            "the reward is the verifier's result only",
        ),
        (
            "reward.format_weight",
            c.reward.format_weight,
            (0.0,),
            "the reward is the verifier's result only",
        ),
        (
            "reward.language_weight",
            c.reward.language_weight,
            (0.0,),
            "the reward is the verifier's result only",
        ),
        (
            "reward.accuracy_weight",
            c.reward.accuracy_weight,
            (1.0,),
            "the reward is the verifier's result only",
        ),
        ("reward.extra", c.reward.extra, ("",), "the reward is the verifier's result only"),
        (
            "reward.length_alpha",
            c.reward.length_alpha,
            (0.0,),
            "the reward is the verifier's result only",
        ),
        ("training.minibatches", c.minibatches, (1,), "the program makes one optimizer step"),
        ("objective.kl_coef", c.objective.kl_coef, (0.0,), "the program has no reference policy"),
        (
            "objective.old_logprobs",
            c.objective.old_logprobs,
            ("behaviour",),
            "every sample is on-policy already",
        ),
    ]:
        if value not in allowed:
            raise ValueError(
                f"config.driver.where='in_loop' needs config.{name}={allowed[0]!r} ({reason}); "
                f"got {value!r}. config.driver.where='host' allows any value"
            )
    if needs(c.rule, "rewards"):
        raise ValueError(
            f"config.rule={c.rule} needs rewards, but with config.driver.where='in_loop' a rule "
            "gets only correct or wrong. Use config.driver.where='host'"
        )
    if c.reward.verifier not in JAX_VERIFIERS and c.mesh.tensor > 1:
        raise ValueError(
            f"config.driver.where='in_loop' with config.reward.verifier={c.reward.verifier!r} "
            f"needs config.mesh.tensor=1; got {c.mesh.tensor}: this verifier needs a Python "
            "callback in the loop, which JAX allows only when every mesh axis is manual. Use "
            f"config.reward.verifier={' or '.join(JAX_VERIFIERS)}, or config.driver.where='host'"
        )
    if c.driver.groups % shards:
        raise ValueError(
            f"config.driver.where='in_loop' needs config.driver.groups ({c.driver.groups}) to be "
            f"divisible by config.mesh.data x config.mesh.fsdp ({shards}), because each shard "
            "fills an equal share of the batch"
        )


# Thresholds that may be infinite: -inf and inf accept every group.
_MAY_BE_INFINITE = ("rule.low", "rule.high")


def check_types(c: Any) -> None:
    """Raises ValueError for a field that is not declared (assignment accepts it silently), a wrong
    type, a number that is not finite (`rule.low` and `rule.high` may be infinite), or a path with a
    URL, `~` or a shell variable. Converts integers in fields for floats.
    """
    _check_types(c, c, "", dotted.choices(c))


def _check_types(c: Any, section: Any, prefix: str, choices: Container[str]) -> None:
    known = {f.name: f for f in dataclasses.fields(section)}
    for name in vars(section):
        if name not in known:
            close = difflib.get_close_matches(name, known, 3, 0.5) or sorted(known)
            raise ValueError(
                f"there is no config.{prefix}{name}; nearest: "
                + ", ".join(f"config.{prefix}{k}" for k in close)
            )
    for name, f in known.items():
        path = prefix + name
        value = getattr(section, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _check_types(c, value, f"{path}.", choices)
            continue
        if path in choices:
            if isinstance(value, (str, type)):
                raise ValueError(
                    f"config.{path} must be an object, such as {f.default!r}; got {value!r}. To "
                    f"choose it by a word: --config.{path}=WORD, or config.set({path!r}, WORD)"
                )
            continue
        kind = f.type
        if kind is float and type(value) is int:
            dotted.update(c, {path: float(value)})
        elif kind in (bool, int, float, str) and type(value) is not kind:
            raise ValueError(f"config.{path} must be {kind.__name__}, got {value!r}")
        elif kind not in (bool, int, float, str):
            if prefix.rstrip(".") not in choices:  # a user's object may have any fields
                raise ValueError(f"config.{path} must be a section, got {value!r}")
            continue
        if kind is float and not math.isfinite(value):
            if path not in _MAY_BE_INFINITE or math.isnan(value):
                raise ValueError(f"config.{path} must be a finite number, got {value!r}")
        if kind is str:
            check_path(f"config.{path}", value)
