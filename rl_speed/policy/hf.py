"""Hugging Face directories in and out: config.json and safetensors, one file or several.

Tensors are read one at a time and placed straight into their shards; the whole checkpoint is never held twice.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl_speed.mesh import TRAIN_RULES
from rl_speed.policy.config import ModelConfig
from rl_speed.policy.transformer import Weight, param_shardings, weights

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a weight stands in Hugging Face's naming, and how its layouts turn into each other.

    Attributes:
      name: with {layer} for those of a layer.
      load: (array as stored, our shape without the layers axis) -> array of our shape.
      store: the inverse, to the stored shape.
    """

    name: str
    load: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    store: Callable[[np.ndarray], np.ndarray]


# torch's Linear keeps [out, in]; ours is [in, *out] or [*in, out].
_SAME = (lambda x, shape: x.reshape(shape), lambda x: x)
_INTO = (lambda x, shape: x.T.reshape(shape), lambda x: x.reshape(x.shape[0], -1).T)
_OUT = (lambda x, shape: x.T.reshape(shape), lambda x: x.reshape(-1, x.shape[-1]).T)
_FLAT = (lambda x, shape: x.reshape(shape), lambda x: x.reshape(-1))

TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight", *_SAME),
    "final_norm": Tensor("model.norm.weight", *_SAME),
    "lm_head": Tensor("lm_head.weight", *_INTO),
    "attn_norm": Tensor("model.layers.{layer}.input_layernorm.weight", *_SAME),
    "wq": Tensor("model.layers.{layer}.self_attn.q_proj.weight", *_INTO),
    "wk": Tensor("model.layers.{layer}.self_attn.k_proj.weight", *_INTO),
    "wv": Tensor("model.layers.{layer}.self_attn.v_proj.weight", *_INTO),
    "bq": Tensor("model.layers.{layer}.self_attn.q_proj.bias", *_FLAT),
    "bk": Tensor("model.layers.{layer}.self_attn.k_proj.bias", *_FLAT),
    "bv": Tensor("model.layers.{layer}.self_attn.v_proj.bias", *_FLAT),
    "wo": Tensor("model.layers.{layer}.self_attn.o_proj.weight", *_OUT),
    "mlp_norm": Tensor("model.layers.{layer}.post_attention_layernorm.weight", *_SAME),
    "w_gate": Tensor("model.layers.{layer}.mlp.gate_proj.weight", *_INTO),
    "w_up": Tensor("model.layers.{layer}.mlp.up_proj.weight", *_INTO),
    "w_down": Tensor("model.layers.{layer}.mlp.down_proj.weight", *_OUT),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; errors name the file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; is {path.parent} a Hugging Face model directory?") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None


class Shards:
    """The tensors of a directory by name, whichever file they are in. Raises FileNotFoundError or ValueError that name the
    file or the tensor."""

    def __init__(self, directory: Path):
        self._directory, self._open = directory, {}
        if (directory / INDEX).exists():
            index = read_json(directory / INDEX)
            if "weight_map" not in index:
                raise ValueError(f"{directory / INDEX} has no weight_map: it is no index of a checkpoint")
            self._files = dict(index["weight_map"])
            missing = sorted({f for f in self._files.values() if not (directory / f).exists()})
            if missing:
                raise FileNotFoundError(f"{directory / INDEX} names {', '.join(missing)}, which is not there: the download "
                                        "is incomplete")
        elif (directory / SINGLE).exists():
            self._files = {name: SINGLE for name in self._handle(SINGLE).keys()}
        else:
            raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}")

    def _handle(self, file: str):
        if file not in self._open:
            try:
                # The torch-free numpy framework cannot represent bfloat16; flax's goes through ml_dtypes.
                self._open[file] = safe_open(str(self._directory / file), framework="flax")
            except SafetensorError as error:
                raise ValueError(f"{self._directory / file}: damaged or truncated safetensors file ({error}); fetch it "
                                 "again") from None
        return self._open[file]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor as float32 on the host."""
        if name not in self._files:
            raise ValueError(f"{self._directory}: tensor {name} is missing from the checkpoint")
        file = self._files[name]
        try:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return np.asarray(self._handle(file).get_tensor(name)).astype(np.float32)
        except SafetensorError as error:
            raise ValueError(f"{self._directory / file}: cannot read tensor {name} ({error})") from None


def read_weight(shards: Shards, name: str, weight: Weight) -> np.ndarray:
    """One weight of ours, layers stacked. Raises ValueError naming the tensor whose size is not what the config says."""
    def one(tensor_name: str, shape: tuple[int, ...]) -> np.ndarray:
        stored = shards[tensor_name]
        expected = TENSORS[name].store(np.broadcast_to(np.float32(0), shape)).shape
        if stored.shape != expected:
            raise ValueError(f"tensor {tensor_name} has shape {stored.shape}; config.json implies {expected}")
        return TENSORS[name].load(stored, shape)

    if weight.logical_axes[0] != "layers":
        return one(TENSORS[name].name, weight.shape)
    return np.stack([one(TENSORS[name].name.format(layer=i), weight.shape[1:]) for i in range(weight.shape[0])])


def load_hf(directory: str | os.PathLike, mesh: jax.sharding.Mesh | None = None,
            rules: Mapping[str, str | None] = TRAIN_RULES, dtype: str = "float32",
            remat: bool = False) -> tuple[dict[str, Any], ModelConfig]:
    """Read a model directory.

    Args:
      directory: with config.json and model.safetensors, or shards with their index; float32, bfloat16 or float16.
      mesh: where to put the weights, by `rules`; None leaves them on the default device.
      dtype, remat: of the returned config; weights are float32 always.

    Returns:
      (params, config).

    Raises:
      FileNotFoundError: a file that must be there is not. ValueError: an unsupported architecture (with the reason), a
      damaged file, a tensor that is missing or has another shape; file or tensor is named.
    """
    directory = Path(directory)
    path = directory / "config.json"
    try:
        config = ModelConfig.from_hf(read_json(path), dtype=dtype, remat=remat)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    shards, tree = Shards(directory), weights(config)
    shardings = None if mesh is None else param_shardings(config, mesh, rules)

    def place(keys, weight: Weight):
        host = read_weight(shards, keys[-1].key, weight)
        if shardings is None:
            return jax.numpy.asarray(host)
        sharding = shardings
        for key in keys:
            sharding = sharding[key.key]
        return jax.make_array_from_callback(weight.shape, sharding, lambda index: host[index])

    return jax.tree_util.tree_map_with_path(place, tree), config


def stored_tensors(params: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 array in its layout) of every weight."""
    for keys, weight in jax.tree_util.tree_leaves_with_path(weights(config)):
        name, value = keys[-1].key, params
        for key in keys:
            value = value[key.key]
        host, tensor = np.asarray(jax.device_get(value), np.float32), TENSORS[name]
        if weight.logical_axes[0] != "layers":
            yield tensor.name, np.ascontiguousarray(tensor.store(host))
        else:
            for i in range(weight.shape[0]):
                yield tensor.name.format(layer=i), np.ascontiguousarray(tensor.store(host[i]))


def save_hf(directory: str | os.PathLike, params: Mapping[str, Any], config: ModelConfig, tokenizer: Any = None,
            extra: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write a directory that transformers (and `load_hf`) opens, float32.

    Written beside and moved into place: an interrupted save leaves what was there. An existing directory is replaced.

    Args:
      tokenizer: saved along, with its end token in generation_config.json.
      extra: further JSON files, {"generation_config.json": {...}}.
    """
    directory = Path(directory).absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        files: dict[str, Any] = {"config.json": config.to_hf()}
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
            if tokenizer.eos_token_id is not None:
                files["generation_config.json"] = {"eos_token_id": tokenizer.eos_token_id,
                                                   "pad_token_id": tokenizer.pad_token_id}
        save_file(dict(stored_tensors(params, config)), fresh / SINGLE, metadata={"format": "pt"})
        for name, value in {**files, **(extra or {})}.items():
            (fresh / name).write_text(json.dumps(value, indent=2) + "\n")
        # mkdtemp and safetensors write for the owner alone.
        fresh.chmod(0o755)
        (fresh / SINGLE).chmod(0o644)
        old = None
        if directory.exists():
            old = directory.with_name(f".{directory.name}-old-{os.getpid()}")
            directory.rename(old)
        try:
            fresh.rename(directory)
        except BaseException:
            if old is not None:
                old.rename(directory)
            raise
        if old is not None:
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
