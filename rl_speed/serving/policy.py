"""What can be served: a Hugging Face directory, or what a training run left in its workdir."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from rl_speed.config import EMBEDDED
from rl_speed.data.embedded_tokenizer import embedded_directory
from rl_speed.policy import ModelConfig, end_token_ids, load_hf, load_tokenizer


@dataclasses.dataclass(frozen=True)
class ServedPolicy:
    """Weights, and the directory whose tokenizer goes with them.

    Attributes:
      directory: with the tokenizer. params: float32. source: where the weights are from, in words.
      end_tokens: ids that end a response: those of generation_config.json and the tokenizer's own.
    """

    directory: Path
    params: Any
    model: ModelConfig
    end_tokens: tuple[int, ...]
    source: str


def load_policy(path: str | os.PathLike, compute_dtype: str = "float32") -> ServedPolicy:
    """The policy to serve.

    Args:
      path: a Hugging Face directory, "embedded", or the workdir of a run: its `policy` directory where the run is over, the
        newest checkpoint where it is not.

    Raises:
      FileNotFoundError, ValueError: it is none of these, is damaged, or no model we know; both name the file.
    """
    directory = embedded_directory() if str(path) == EMBEDDED else Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    if (directory / "policy" / "config.json").exists():
        directory = directory / "policy"
    elif (directory / "checkpoints").is_dir():
        return _newest_checkpoint(directory, compute_dtype)
    params, model = load_hf(directory, dtype=compute_dtype)
    return _served(directory, params, model, str(directory))


def _served(directory: Path, params: Any, model: ModelConfig, source: str) -> ServedPolicy:
    return ServedPolicy(directory, params, model, end_token_ids(directory, load_tokenizer(directory)), source)


def _newest_checkpoint(workdir: Path, compute_dtype: str) -> ServedPolicy:
    """The weights of the newest checkpoint, read alone: neither optimizer nor host state."""
    import jax
    import orbax.checkpoint as ocp

    from rl_speed.policy import abstract_params
    from rl_speed.policy.hf import read_json

    try:
        start = json.loads((workdir / "config.json").read_text())["model"]["path"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{workdir / 'config.json'} does not tell which model the run began with ({error!r})") from None
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    if not steps:
        raise FileNotFoundError(f"{workdir / 'checkpoints'} holds no checkpoint yet")
    directory = embedded_directory() if start == EMBEDDED else Path(start)
    model = ModelConfig.from_hf(read_json(directory / "config.json"), dtype=compute_dtype)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract_params(model))}
    folder = (workdir / "checkpoints" / str(steps[-1]) / "state").resolve()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(folder, args=ocp.args.PyTreeRestore(
                like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True))
    except Exception as error:  # noqa: BLE001 (damage takes any form: JSON, zarr, checksum, missing file)
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"{folder}: cannot read the policy of this checkpoint: {first}") from None
    return _served(directory, found["params"], model, f"{folder.parent} (step {steps[-1]})")
