"""The experiment's configuration: plain typed dataclasses, one per part, checked before anything is built.

A file in configs/ returns a `Config`; any field can be changed on the command line: `--config.rule.n_init=6`.
Units are in the names or the comments: lengths are tokens, ages are policy updates.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from rl_speed.sampling.rules import Band, Dynamic, Rule, Speed, Uniform

# Directory of the policy that ships with the package.
EMBEDDED = "embedded"
# Verifiers that are JAX functions: they can judge inside the compiled loop on any mesh.
JAX_VERIFIERS = ("exact", "integer")


@dataclass
class Model:
    path: str = EMBEDDED  # a Hugging Face directory, or "embedded"
    compute_dtype: str = "float32"  # or bfloat16; master weights are always float32
    remat: bool = False  # recompute each layer in the backward pass
    head_chunk: int = 0  # tokens whose logits exist at once in the trainer (0: about 2^27 logits)


@dataclass
class Data:
    task: str = "chain"  # "chain" (embedded, generated) or "jsonl" (question and answer files)
    train: str = ""  # file, for jsonl
    eval: str = ""  # file of held-out questions, for jsonl
    prompt: str = "{question}="  # "chat", "plain", or a format with {question}
    instruction: str = ""  # put after every question, before the prompt's template
    max_prompt_length: int = 24  # tokens; longer prompts are dropped and counted
    train_prompts: int = 0  # use only so many (0: all; for chain: an unbounded stream)
    eval_prompts: int = 512  # 0: all
    on_bad_row: str = "error"  # or "skip", counted
    # Which prompt of a finite training set goes next: "shuffle" (anew each epoch), "file" (as they stand), "visits" (least visited
    # first), "schedule" (easy to hard by pass_rates), "memory" (those that will probably qualify, by what earlier visits found).
    order: str = "shuffle"
    pass_rates: str = ""  # file of pass rates by prompt id, measured by a proxy: for "schedule", and for keep_low and keep_high
    keep_low: float = 0.0  # offline curation: keep prompts whose rate in pass_rates lies in [keep_low, keep_high]
    keep_high: float = 1.0
    explore: float = 0.05  # memory: share drawn from the prompts seen least recently
    max_unseen: float = 4.0  # memory: no prompt goes unseen for more than so many epochs (visits / size)
    rest: float = 0.5  # memory: epochs before a prompt may go again
    memory_decay: float = 0.9  # memory: of what is known of a prompt, kept at its next visit


@dataclass
class RuleConfig:
    name: str = "speed"  # uniform, dynamic, band, speed
    n: int = 24  # samples of a complete group
    n_init: int = 4  # speed: screening samples
    low: float = 0.0  # speed: continue where low < pass rate < high, strictly; band: keep what lies between
    high: float = 1.0
    inclusive: bool = True  # band: low and high themselves count


@dataclass
class Driver:
    where: str = "host"  # rules run between calls ("host"), or inside the compiled step ("in_loop")
    groups: int = 16  # complete groups a training step takes (B)
    screening: str = "missing"  # prompts screened per call: "missing" (what is lacking) or "fixed"
    screen_prompts: int = 64  # the generation batch: at most, or with "fixed" exactly, so many prompts a call; in_loop: a step
    prefetch: bool = True  # two-phase rules: one call continues what was accepted and screens for the next step
    margin: float = 1.0  # "missing": standard deviations of the accepted count to screen on top of the mean
    # Calls generated ahead of scoring: call k + depth is generated while call k is scored; 0 is strictly sequential. For verifiers
    # that take time: with a call a step, samples are so many updates older. The offset is fixed, so that runs repeat. Host only.
    depth: int = 0
    buffer_groups: int = 64  # complete groups that may wait; screening stops while it is full
    buffer_order: str = "fifo"  # or "random"
    max_age: int = -1  # drop groups whose oldest sample is more updates old than this (-1: never)
    max_calls: int = 32  # generation calls in a step before it trains on what there is


@dataclass
class Sampler:
    slots: int = 64
    max_new: int = 16  # tokens of a response, the end token included
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prefill_chunk: int = 0
    attention: str = "auto"  # how decoding reads keys and values: "dense", "ragged" (blocks that are held), "pallas" (GPU kernel)
    cache_dtype: str = ""  # of keys and values: "" as computed, or bfloat16, half the size under float32
    context_pool: int = 0  # in_loop: prompts whose KV is held at once (0: all that a step may screen)


@dataclass
class Objective:
    advantage: str = "rloo"  # rloo, grpo, dr_grpo, reinforce, reinforce_pp, reinforce_pp_baseline
    loss: str = "pg"  # pg, ppo, tis
    aggregation: str = "token_mean"  # seq_mean_token_mean, seq_mean_token_sum, token_sum_constant
    aggregation_constant: float = 0.0  # token_sum_constant: the constant (0: max_new)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0: off; else the bound c > 1 for negative advantages
    truncation: float = 2.0  # tis: largest importance weight
    # What ratios are taken against: "behaviour" (as sampled), "recompute" (just before the update: stale samples count as
    # on-policy), or "corrected" (recomputed, and the loss weighted by the truncated ratio to the behaviour policy).
    old_logprobs: str = "behaviour"
    kl_coef: float = 0.0  # KL to the starting policy
    kl_kind: str = "k3"
    kl_in: str = "loss"  # or "reward"
    entropy_coef: float = 0.0


@dataclass
class Optimizer:
    learning_rate: float = 1e-4
    warmup_steps: int = 10
    schedule: str = "constant"  # linear, cosine
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass
class Reward:
    # "exact" (token ids) and "integer" (the last boxed or last integer), both in JAX; "math" (math-verify in worker processes).
    verifier: str = "exact"
    mode: str = "boxed"  # math and integer: "boxed", or "free" (integer: the last one in the text)
    workers: int = 2
    timeout_s: float = 5.0  # per response
    overlong_buffer: int = 0  # DAPO's overlong shaping over the last so many tokens (0: off)
    overlong_factor: float = 1.0


@dataclass
class Training:
    steps: int = 200
    max_seconds: float = 0.0  # stop earlier, after so long in training steps (0: no limit); evaluation, compilation are free
    micro_batch: int = 0  # samples per gradient piece (0: the whole batch)
    minibatches: int = 1  # optimizer steps per RL step
    max_skipped: int = 5  # stop after so many non-finite updates in a row
    length_multiple: int = 0  # cut training rows to a multiple of this many tokens (0: one length)


@dataclass
class MeshConfig:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass
class Evaluation:
    every: int = 20  # steps; 0: never
    samples: int = 2  # per held-out prompt
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Checkpoints:
    every: int = 100  # steps; 0: only the last
    keep: int = 2
    resume: str = "auto"  # "auto", "never", "must"


@dataclass
class Logging:
    rollouts: int = 2  # decoded samples written per step
    profile_step: int = -1  # trace this step with jax.profiler (-1: none)
    progress: bool = True
    export: bool = True  # write the final policy as a Hugging Face directory


@dataclass
class Config:
    """Everything a run is made of. `validate` raises ValueError naming the first field that cannot be."""

    seed: int = 0
    method: str = "speed_rloo"  # a label; set by methods.apply
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    rule: RuleConfig = field(default_factory=RuleConfig)
    driver: Driver = field(default_factory=Driver)
    sampler: Sampler = field(default_factory=Sampler)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    reward: Reward = field(default_factory=Reward)
    training: Training = field(default_factory=Training)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    logging: Logging = field(default_factory=Logging)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def validate(self) -> "Config":
        """Raises ValueError naming the first field that cannot be, and what it may be. Returns self."""
        self._check_types()
        choices = {
            "data.task": ("chain", "jsonl"),
            "data.on_bad_row": ("error", "skip"),
            "data.order": ("shuffle", "file", "visits", "schedule", "memory"),
            "rule.name": tuple(RULES),
            "driver.where": ("host", "in_loop"),
            "driver.screening": ("missing", "fixed"),
            "driver.buffer_order": ("fifo", "random"),
            "model.compute_dtype": ("float32", "bfloat16"),
            "sampler.attention": ("auto", "dense", "ragged", "pallas"),
            "sampler.cache_dtype": ("", "float32", "bfloat16"),
            "objective.advantage": ("rloo", "grpo", "dr_grpo", "reinforce", "reinforce_pp", "reinforce_pp_baseline"),
            "objective.loss": ("pg", "ppo", "tis"),
            "objective.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_constant"),
            "objective.old_logprobs": ("behaviour", "recompute", "corrected"),
            "objective.kl_kind": ("k1", "k2", "k3"),
            "objective.kl_in": ("loss", "reward"),
            "optimizer.schedule": ("constant", "linear", "cosine"),
            "reward.verifier": (*JAX_VERIFIERS, "math"),
            "reward.mode": ("boxed", "free"),
            "checkpoints.resume": ("auto", "never", "must"),
        }
        for name, allowed in choices.items():
            if (value := self._get(name)) not in allowed:
                raise ValueError(f"config.{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name in ("rule.n", "driver.groups", "driver.screen_prompts", "driver.max_calls", "sampler.slots",
                     "sampler.max_new", "training.steps", "training.minibatches", "training.max_skipped",
                     "data.max_prompt_length", "evaluation.samples", "checkpoints.keep",
                     "reward.workers"):
            if self._get(name) < 1:
                raise ValueError(f"config.{name} must be at least 1; got {self._get(name)!r}")
        if self.data.task == "jsonl" and not self.data.train:
            raise ValueError("config.data.train must name a file when config.data.task is 'jsonl'")
        self._check_order()
        if self.sampler.top_k > 0 or self.sampler.top_p < 1 or self.sampler.temperature == 0:
            raise ValueError(
                "config.sampler.top_k, top_p and temperature=0 cut the distribution that training samples from: after an "
                "update a sampled token can leave the kept set and its ratio becomes 0 or undefined. Train with top_k=0, "
                "top_p=1, temperature > 0; evaluation has its own settings")
        if self.driver.buffer_groups < self.driver.groups:
            raise ValueError(f"config.driver.buffer_groups ({self.driver.buffer_groups}) must hold at least one training "
                             f"batch (config.driver.groups = {self.driver.groups})")
        self._check_depth()
        if self.driver.groups % self.training.minibatches:
            raise ValueError(f"config.training.minibatches ({self.training.minibatches}) must divide "
                             f"config.driver.groups ({self.driver.groups}): groups are not split")
        rows = self.driver.groups * self.rule.n // self.training.minibatches
        micro = self.training.micro_batch or rows
        shards = self.mesh.data * self.mesh.fsdp
        if rows % micro:
            raise ValueError(f"config.training.micro_batch ({micro}) must divide the {rows} samples of an optimizer step "
                             "(config.driver.groups x config.rule.n / config.training.minibatches); 0 takes them all at once")
        if micro % shards:
            raise ValueError(f"{micro} samples per gradient piece cannot be split over mesh data={self.mesh.data} x fsdp="
                             f"{self.mesh.fsdp}; change config.training.micro_batch or config.driver.groups")
        if self.sampler.attention == "pallas" and self.mesh.tensor > 1:
            raise ValueError(f"config.sampler.attention='pallas' needs config.mesh.tensor=1; got {self.mesh.tensor}: the kernel is "
                             "not split over heads. 'dense' and 'ragged' run on any mesh")
        self.make_rule()
        if self.driver.where == "in_loop":
            self._check_in_loop(shards)
        return self

    def _check_order(self) -> None:
        """Orders and curation of the training prompts."""
        d = self.data
        for name, ok, allowed in [("keep_low", 0 <= d.keep_low <= 1, "in [0, 1]"),
                                  ("keep_high", d.keep_low <= d.keep_high <= 1, "between config.data.keep_low and 1"),
                                  ("explore", 0 <= d.explore <= 1, "in [0, 1]"), ("max_unseen", d.max_unseen >= 1, "at least 1"),
                                  ("rest", 0 <= d.rest < 1, "in [0, 1)"), ("memory_decay", 0 < d.memory_decay <= 1, "in (0, 1]")]:
            if not ok:
                raise ValueError(f"config.data.{name} must be {allowed}; got {getattr(d, name)!r}")
        needs_table = d.order == "schedule" or (d.keep_low, d.keep_high) != (0.0, 1.0)
        if needs_table and not d.pass_rates:
            raise ValueError("config.data.order='schedule' and config.data.keep_low/keep_high need config.data.pass_rates, a file "
                             "of pass rates by prompt id (experiments/pass_rates.py --split=train writes one)")
        if d.pass_rates and not needs_table:
            raise ValueError("config.data.pass_rates is used by config.data.order='schedule' and by "
                             "config.data.keep_low/keep_high, and neither is set")
        if d.task == "chain" and not d.train_prompts and (d.order != "shuffle" or needs_table):
            raise ValueError(f"config.data.order={d.order!r} with config.data.keep_low={d.keep_low:g}, keep_high={d.keep_high:g} "
                             "needs a finite training set: with config.data.train_prompts=0 the chain task never repeats a prompt. "
                             "Set config.data.train_prompts")

    def _check_depth(self) -> None:
        """What a pipeline of so many calls needs."""
        d = self.driver
        if d.depth < 0:
            raise ValueError(f"config.driver.depth must be 0 (no call generated ahead of scoring) or more; got {d.depth}")
        if d.buffer_groups < d.groups * (1 + d.depth):
            raise ValueError(f"config.driver.buffer_groups ({d.buffer_groups}) must hold {d.groups * (1 + d.depth)} groups, "
                             f"config.driver.groups ({d.groups}) for each of the 1 + {d.depth} generation calls that "
                             f"config.driver.depth={d.depth} keeps under way: each brings about one training batch")
        if 0 <= d.max_age < d.depth:
            raise ValueError(f"config.driver.max_age ({d.max_age}) must be -1 or at least config.driver.depth ({d.depth}): with "
                             "one call a step, that many updates pass between a call's generation and its scoring, and its "
                             "samples would be too old by then")

    def _check_in_loop(self, shards: int) -> None:
        """What the fused step cannot do is refused with the reason, and with what can."""
        for name, value, allowed, reason in [
                ("driver.depth", self.driver.depth, (0,), "scoring is part of the program, there is none to overlap with"),
                ("reward.overlong_buffer", self.reward.overlong_buffer, (0,), "rewards are the verifier's alone"),
                ("training.minibatches", self.training.minibatches, (1,), "there is one update a program"),
                ("objective.kl_coef", self.objective.kl_coef, (0.0,), "no reference policy is held there"),
                ("objective.old_logprobs", self.objective.old_logprobs, ("behaviour",), "every sample is on-policy already")]:
            if value not in allowed:
                raise ValueError(f"config.driver.where='in_loop' needs config.{name}={allowed[0]!r} ({reason}); got {value!r}. "
                                 "config.driver.where='host' takes any")
        if self.reward.verifier not in JAX_VERIFIERS and self.mesh.tensor > 1:
            raise ValueError(f"config.driver.where='in_loop' with config.reward.verifier={self.reward.verifier!r} needs "
                             f"config.mesh.tensor=1; got {self.mesh.tensor}: the loop calls back to Python, which JAX can do only "
                             f"where every mesh axis is manual. On any mesh: {', '.join(JAX_VERIFIERS)}, or "
                             "config.driver.where='host'")
        if self.driver.groups % shards:
            raise ValueError(f"config.driver.where='in_loop' needs config.driver.groups ({self.driver.groups}) to be divisible by "
                             f"mesh data x fsdp ({shards}): each shard fills its share")

    def _check_types(self) -> None:
        """Fields that a file in configs/ invented (a dataclass takes them silently) or gave another type."""
        for path, section in [("", self), *((f"{f.name}.", getattr(self, f.name)) for f in dataclasses.fields(self)
                                            if f.name not in ("seed", "method"))]:
            known = {f.name: f for f in dataclasses.fields(section)}
            for name in vars(section):
                if name not in known:
                    close = difflib.get_close_matches(name, known, 3, 0.5) or sorted(known)
                    raise ValueError(f"there is no config.{path}{name}; nearest: "
                                     + ", ".join(f"config.{path}{k}" for k in close))
            for name, f in known.items():
                value, kind = getattr(section, name), f.type
                if kind is float and type(value) is int:
                    setattr(section, name, float(value))
                elif kind in (bool, int, float, str) and type(value) is not kind:
                    raise ValueError(f"config.{path}{name} must be {kind.__name__}, got {value!r}")

    def make_rule(self) -> Rule:
        """The sampling rule that `rule` describes."""
        return RULES[self.rule.name](self.rule)

    def _get(self, path: str) -> Any:
        value = self
        for name in path.split("."):
            value = getattr(value, name)
        return value


def _speed(rule: RuleConfig) -> Speed:
    if not 1 <= rule.n_init <= rule.n:
        raise ValueError(f"config.rule.n_init must be between 1 and config.rule.n ({rule.n}); got {rule.n_init}")
    return Speed(n_init=rule.n_init, n_cont=rule.n - rule.n_init, low=rule.low, high=rule.high)


# A new rule is one line here and one file in rl_speed/sampling/.
RULES = {
    "uniform": lambda rule: Uniform(rule.n),
    "dynamic": lambda rule: Dynamic(rule.n),
    "band": lambda rule: Band(rule.n, rule.low, rule.high, rule.inclusive),
    "speed": _speed,
}
