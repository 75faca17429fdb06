"""Loads the policy to serve from a Hugging Face directory or the workdir of a training run."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from rl_speed.config import Config
from rl_speed.data.tasks import POLICIES
from rl_speed.evaluation import source as sources
from rl_speed.evaluation.settings import ADAPTERS
from rl_speed.mesh import make_mesh
from rl_speed.policy import ModelConfig
from rl_speed.policy.hub import model_directory
from rl_speed.runtime.checkpoint_folder import saved_steps, step_path
from rl_speed.runtime.workdir import read_summary


@dataclasses.dataclass(frozen=True)
class ServedPolicy:
    """A policy to serve.

    Attributes:
      directory: folder of its tokenizer. params: float32 weights. source: origin of the weights, in
        words.
      end_tokens: ids that end a response, from generation_config.json, config.json, the tokenizer
        and the run's settings.
    """

    directory: Path
    params: Any
    model: ModelConfig
    end_tokens: tuple[int, ...]
    source: str


def load_policy(
    path: str | os.PathLike, compute_dtype: str = "float32", end_tokens: str = ""
) -> ServedPolicy:
    """Loads the policy to serve.

    Args:
      path: a Hugging Face directory or its name on the hub, "embedded", or the workdir of a run:
        its `policy` directory if the run has finished and was not continued since, else the newest
        readable checkpoint.
      end_tokens: additional tokens that end a response, as in config.model.end_tokens.

    Raises:
      FileNotFoundError, ValueError, CheckpointError: `path` is none of these, damaged, or an
        unknown model; names the file.
    """
    at = Path(model_directory(str(path), field="--model"))
    if str(path) not in POLICIES and not at.is_dir():
        raise FileNotFoundError(
            f"{at}: no such directory; give --model a Hugging Face directory, a name on the hub, "
            "or the workdir of a run"
        )
    if (at / "policy" / "config.json").exists() and not _continued(at):
        at = at / "policy"
    running = sources.is_run(at) and not sources.is_model(at)
    source = (
        sources.find_source(checkpoint=str(at)) if running else sources.find_source(model=str(at))
    )
    config = Config()
    config.model.path = source.directory
    config.model.compute_dtype = compute_dtype
    of_run = ""
    if source.config is not None:
        of_run = source.config.model.end_tokens
        for name in ADAPTERS:
            config.set(name, source.config.get(name))
    config.model.end_tokens = f"{of_run},{end_tokens}"
    policy, step = sources.load_policy(source, config, make_mesh())
    where = str(at) if step is None else f"{step_path(source.checkpoints, step)} (step {step})"
    return ServedPolicy(
        Path(policy.directory), policy.params, policy.model, policy.end_tokens, where
    )


def _continued(workdir: Path) -> bool:
    """Returns whether the run has a newer checkpoint than the export of its summary."""
    try:
        exported = read_summary(workdir / "summary.json", "").get("steps")
        newest = saved_steps(sources.find_source(checkpoint=str(workdir)).checkpoints)[-1]
    except (OSError, ValueError):
        return False  # no summary, or no checkpoints: nothing newer is known
    return exported is not None and newest > exported
