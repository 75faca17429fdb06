"""How a policy is evaluated: settings, the papers' presets, and what may not be."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rl_speed.config import presets
from rl_speed.config import Config
from rl_speed.policy.prompt_formats import PROMPTS
from rl_speed.named import is_function

VERIFIERS, MODES, DTYPES = ("math", "integer", "exact"), ("boxed", "free"), ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything but policy and questions that responses and verdicts depend on; `k`, `workers` and `stall_s` should change nothing.

    Attributes:
      samples: responses to each question. k: for pass@k. temperature, top_p, top_k: of the sampler (temperature 0 is greedy).
      max_new: tokens of a response at most. max_prompt_length: tokens of a prompt; questions with longer ones are left out and
        counted (0: as the longest needs). prompt, instruction, system: as in config.data. verifier, mode, timeout_s,
        stall_s: as in config.reward.
      slots: rows that decode at once, over all devices. questions_per_call: see `capacities`. limit: questions of each benchmark,
        the first ones (0: all). seed: of the sampling.
    """

    samples: int = 32
    k: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new: int = 4096
    max_prompt_length: int = 0
    prompt: str = "chat"
    instruction: str = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    system: str = ""
    verifier: str = "math"
    mode: str = "boxed"
    timeout_s: float = 5.0
    stall_s: float = 0.0
    workers: int = 2
    slots: int = 128
    questions_per_call: int = 0
    limit: int = 0
    seed: int = 0
    compute_dtype: str = "float32"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        if not self.k:
            object.__setattr__(self, "k", tuple(k for k in (1, 8, 32) if k <= self.samples))
        for name, ok, want in (
                ("samples", self.samples >= 1, "at least 1"),
                ("k", min(self.k, default=1) >= 1, "numbers of at least 1"),
                ("k", max(self.k, default=0) <= self.samples,
                 f"at most --samples ({self.samples}): pass@k needs k responses to a question"),
                ("temperature", self.temperature >= 0, "0 (greedy) or more"),
                ("top_p", 0 < self.top_p <= 1, "in (0, 1]"), ("top_k", self.top_k >= 0, "0 (off) or more"),
                ("max_new", self.max_new >= 1, "at least 1"),
                ("max_prompt_length", self.max_prompt_length >= 0, "0 (as the longest needs) or more"),
                ("prompt", bool(self.prompt), "the name of a template, or a format with {question}"),
                ("verifier", self.verifier in VERIFIERS or is_function(self.verifier),
                 f"one of {', '.join(VERIFIERS)}, or a function of your own, module:function"),
                ("mode", self.mode in MODES, f"one of {', '.join(MODES)}"),
                ("timeout_s", self.timeout_s > 0, "above 0"),
                ("stall_s", self.stall_s == 0 or self.stall_s >= self.timeout_s, "0 (six times --timeout_s) or at least --timeout_s"),
                ("workers", self.workers >= 1, "at least 1"),
                ("slots", self.slots >= 1, "at least 1"),
                ("questions_per_call", self.questions_per_call >= 0, "0 (by --slots) or more"),
                ("limit", self.limit >= 0, "0 (all) or more"),
                ("compute_dtype", self.compute_dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
                ("mesh", min(self.data, self.fsdp, self.tensor) >= 1, "axes of at least 1")):
            if not ok:
                got = ((self.data, self.fsdp, self.tensor) if name == "mesh" else
                       ",".join(map(str, self.k)) if name == "k" else repr(getattr(self, name)))
                raise ValueError(f"--{name} must be {want}; got {got}")

    def fingerprint(self) -> dict[str, Any]:
        """What responses and verdicts depend on: two evaluations that agree in it may share a directory."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("k", "workers", "stall_s", "limit", "max_prompt_length")}


def of_config(config: Config) -> dict[str, Any]:
    """The settings that a run's configuration implies for its policy."""
    return {"temperature": config.evaluation.temperature, "top_p": config.evaluation.top_p, "max_new": config.sampler.max_new,
            "prompt": config.data.prompt, "instruction": config.data.instruction, "system": config.data.system,
            "verifier": config.reward.verifier, "mode": config.reward.mode, "timeout_s": config.reward.timeout_s,
            "stall_s": config.reward.stall_s, "workers": config.reward.workers, "slots": config.sampler.slots, "compute_dtype": config.model.compute_dtype,
            "data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}


def _paper(build: Callable[[str], Config], **own: Any) -> dict[str, Any]:
    """What is the paper's in the preset of its training; the machine's share of it is left to whoever evaluates."""
    values = of_config(build(""))
    names = ("temperature", "top_p", "max_new", "prompt", "instruction", "system", "verifier", "mode")
    return {name: values[name] for name in names} | own


# Temperature, top-p and response limit are the papers'. The prompt's format is that of the training presets (rl_speed/config/presets.py
# says what of it is ours).
PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    # Zhang et al.: temperature 1, 3072 tokens. The number of samples is ours.
    "speed": lambda: _paper(presets.speed, samples=32),
    # Bae et al.: temperature 0.6, top-p 0.95, 8192 tokens. The number of samples is ours.
    "band": lambda: _paper(presets.band, samples=32, max_new=8192),
    # Xiong et al.: average@32 at 4096 tokens, temperature 1.
    "ada": lambda: _paper(presets.ada, samples=32, max_new=4096),
    # Yi et al.: temperature 0.7, 4096 tokens. The number of samples is ours.
    "rpo": lambda: _paper(presets.rpo, samples=32),
}


def resolve(base: Mapping[str, Any], preset: str, given: Mapping[str, Any]) -> Settings:
    """What was `given` on the command line, else what the preset says, else the policy's own `base`.

    A prompt of policy/prompt_formats.py that brings its instruction along gets no other, and no system turn but its own, unless
    they are given.

    Raises ValueError naming the first flag that cannot be.
    """
    if preset and preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    values = {**base, **(PRESETS[preset]() if preset else {})}
    if "prompt" in given:
        values["system"] = ""
        if given["prompt"] in PROMPTS and given["prompt"] not in ("chat", "plain"):
            values["instruction"] = ""
    return Settings(**{**values, **given})


def capacities(settings: Settings, questions: int) -> tuple[int, int]:
    """(work items in a generation call, samples of one of them at most).

    Eight samples a slot, so that slots are busy while the last responses of a call end; at most two work items a slot, whose
    contexts are held; never more than there is. A question's samples that exceed it are drawn in several calls.
    """
    piece = min(settings.samples, 8 * settings.slots)
    items = settings.questions_per_call or max(1, min(8 * settings.slots // piece, 2 * settings.slots))
    return min(items, questions * -(-settings.samples // piece)), piece


def parse_mesh(text: str) -> dict[str, int]:
    """{"data": 1, "fsdp": 4} of "data=1,fsdp=4". Raises ValueError naming the part that cannot be."""
    axes = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in ("data", "fsdp", "tensor") or not size.isdigit() or name in axes:
            raise ValueError(f"--mesh is written data=N,fsdp=N,tensor=N (those that are not 1); got {part!r}")
        axes[name] = int(size)
    return axes


def parse_k(texts: list[str]) -> tuple[int, ...]:
    """(1, 8) of ["8", "1"]. Raises ValueError naming what is no number."""
    for text in texts:
        if not text.strip().isdigit():
            raise ValueError(f"--k must be numbers with commas between them; got {text!r}")
    return tuple(sorted({int(text) for text in texts}))
