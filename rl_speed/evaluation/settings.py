"""Fields of a `Config` that an evaluation uses, and the precedence of their sources."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_speed.config import Config, presets
from rl_speed.config.checks import check_evaluation
from rl_speed.config.command import nearest
from rl_speed.data.tasks import POLICIES
from rl_speed.policy.prompt_formats import PROMPTS

# Fields taken from the policy's run: end tokens, and limits of its machine. The fields of ASKED
# (sampling, prompt, verifier) are taken from the run only if no file is given.
MACHINE = (
    "model.end_tokens sampler.slots model.compute_dtype mesh.data mesh.fsdp mesh.tensor "
    "reward.timeout_s reward.stall_s reward.workers reward.batch_size"
).split()
ASKED = (
    "evaluation.temperature evaluation.top_p sampler.max_new data.prompt data.instruction "
    "data.system reward.verifier reward.mode"
).split()
# Questions, weights and end tokens have their own identity (`responses.model_facts`). The verifier
# gives the same results with other worker settings.
NO_MATTER = (
    "data.max_prompt_length data.question_field data.on_bad_row model.path model.end_tokens "
    "reward.stall_s reward.workers reward.batch_size"
).split()
OWN = ["evaluation.samples", "sampler.top_k", "seed"]
FIELDS = [*dict.fromkeys(MACHINE + ASKED + OWN + NO_MATTER)]


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def resolve(
    directory: str,
    run: Config | None = None,
    given: Config | None = None,
    overrides: Mapping[str, Any] = {},
) -> Config:
    """The settings of an evaluation; all other fields have their defaults.

    Overrides take precedence over the given file, and the file over the run. Without a file, a
    policy that no run made is prompted as in configs/evaluation.py. The samples, the seed and how
    questions are read never come from the run.

    Args:
      directory: of the policy, or a key of POLICIES. run: config of the run that made it. given:
        the file of `--config`.
      overrides: values by "section.field". A prompt in them drops the system turn, and also the
        instruction if the prompt has its own; but not those that are also overridden.

    Raises ValueError with the first invalid field.
    """
    if unknown := [path for path in overrides if path not in FIELDS]:
        near = ", ".join(f"config.{name}" for name in nearest(unknown[0], FIELDS))
        raise ValueError(
            f"--config.{unknown[0]}: an evaluation does not look at it; "
            + (
                f"nearest: {near}"
                if near
                else "rl_speed/evaluation/settings.py lists what it looks at"
            )
        )
    base = given or presets.evaluation(directory if directory in POLICIES else "chat")
    of_run = [] if run is None else MACHINE if given else MACHINE + ASKED
    values = {path: (run if path in of_run else base).get(path) for path in FIELDS}
    if (prompt := overrides.get("data.prompt")) is not None:
        values["data.system"] = ""
        if prompt in PROMPTS and prompt not in ("chat", "plain"):
            values["data.instruction"] = ""
    config = Config()
    for path, value in {**values, **overrides, "model.path": directory}.items():
        config.set(path, value)
    check_evaluation(config)
    return config


def fingerprint(config: Config, questions_per_call: int = 0) -> dict[str, Any]:
    """Settings that determine responses and results; equal ones may share a directory."""
    values = {_leaf(path): config.get(path) for path in FIELDS if path not in NO_MATTER}
    return {**values, "questions_per_call": questions_per_call}


def capacities(config: Config, questions: int, questions_per_call: int = 0) -> tuple[int, int]:
    """(work items per generation call, maximum samples of one item).

    Eight samples per slot, so that slots are busy while the last responses of a call end. At most
    two work items per slot, because their contexts are held. Never more than exist. Further samples
    of a question are drawn in later calls.
    """
    samples = config.evaluation.samples
    slots = config.sampler.slots
    piece = min(samples, 8 * slots)
    items = questions_per_call or max(1, min(8 * slots // piece, 2 * slots))
    return min(items, questions * -(-samples // piece)), piece


def parse_k(texts: Sequence[str] | None, samples: int) -> tuple[int, ...]:
    """The k of pass@k: (1, 8) for ["8", "1"]; for None 1, 8 and 32, up to the number of samples.

    Raises ValueError: no number, below 1, or more than the samples.
    """
    if not texts:
        return tuple(k for k in (1, 8, 32) if k <= samples)
    for text in texts:
        if not text.strip().isdigit():
            raise ValueError(f"--k must be numbers with commas between them; got {text!r}")
    k = sorted(set(map(int, texts)))
    if k[0] < 1 or k[-1] > samples:
        raise ValueError(
            f"--k must be numbers of at least 1, and at most config.evaluation.samples ({samples}"
            f"): pass@k needs k responses to a question; got {','.join(map(str, k))}"
        )
    return tuple(k)
