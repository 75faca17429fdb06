"""Reads weights that are split over `fsdp`, and gathers each layer where it is used.

Each row shard runs the program for itself (`jax.shard_map` over `mesh.own_axes`) and sees its shard
of each weight. A layer is gathered in the compute dtype when it is used, and again when the
backward pass recomputes it. Gradients are summed over shards in float32, one layer at a time, and
each shard keeps the gradients of its own weights. The embedding and the head are not gathered:
tokens are sent to the shards, which hold columns of the embedding and vocabulary ids of the head.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from rl_speed.mesh import ROWS, on_row_shards, over_tensor
from rl_speed.policy.config import ModelConfig
from rl_speed.policy.transformer import (
    Array,
    Params,
    Vocabulary,
    Weights,
    param_shardings,
    trainable,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(part: Array, axis: int, tensor: int | None, dtype: str) -> Array:
    """Gathers a weight that is split over `fsdp` along `axis`.

    Values are sent in `dtype` and returned in `part`'s dtype (float32); the gradient is summed in
    float32.

    Args:
      tensor: axis that is split over mesh axis `tensor` and stays split, or None.
      dtype: the compute dtype.
    """

    def whole(x):
        return jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)

    return over_tensor(whole, (tensor,), tensor, (part.astype(dtype),)).astype(part.dtype)


def _scatter(axis, tensor, dtype, _, gradient):
    def mine(x):
        return jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True)

    return (over_tensor(mine, (tensor,), tensor, (gradient,)),)


gather.defvjp(lambda part, *settings: (gather(part, *settings), None), _scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def turn(part: Array, whole: int, split: int, tensor: int | None, dtype: str) -> Array:
    """Moves the `fsdp` split of a weight from axis `whole` to axis `split`. Dtypes, gradients and
    `tensor` are as in `gather`.
    """

    def send(x):
        return jax.lax.all_to_all(x, "fsdp", split, whole, tiled=True)

    return over_tensor(send, (tensor,), tensor, (part.astype(dtype),)).astype(part.dtype)


def _turn_back(whole, split, tensor, dtype, _, gradient):
    def send(x):
        return jax.lax.all_to_all(x, "fsdp", whole, split, tiled=True)

    return (over_tensor(send, (tensor,), tensor, (gradient,)),)


turn.defvjp(lambda part, *settings: (turn(part, *settings), None), _turn_back)


class SplitWeights(Weights):
    """Reads a policy's weights that are split over a mesh, inside one row shard.

    Attributes:
      specs: a PartitionSpec per weight for `jax.shard_map`, with the `fsdp` split only: the
        partitioner handles `tensor`.
      trainable_specs: the same for trained weights and their gradients, None for others.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh):
        self._dtype = config.dtype
        self._mesh = mesh
        shardings = param_shardings(config, mesh)
        several = mesh.shape["fsdp"] > 1

        def mine(axis):
            return axis if axis == "fsdp" and several else None

        self.specs = jax.tree.map(lambda s: PartitionSpec(*map(mine, s.spec)), shardings)
        self.trainable_specs = trainable(config, self.specs)
        self._full = jax.tree.map(lambda s: s.spec, shardings)

    def _whole(self, part: Array, spec: PartitionSpec) -> Array:
        if "fsdp" not in spec or self._mesh.shape["fsdp"] == 1:
            return part
        tensor = spec.index("tensor") if "tensor" in spec else None
        return gather(part, spec.index("fsdp"), tensor, self._dtype)

    def layer(self, layer: Params) -> Params:
        # Specs of the stacked layers, without the layers axis.
        specs = {name: PartitionSpec(*spec[1:]) for name, spec in self._full["layers"].items()}
        return {name: self._whole(part, specs[name]) for name, part in layer.items()}

    def head(self, name: str, table: Array) -> tuple[Array, Vocabulary]:
        # Each shard computes the logits of its ids for the tokens of all shards. Only hidden states
        # are sent, and no shard holds the whole table or its gradient.
        spec = self._full[name]
        shape = self._mesh.shape
        whole, split = (1, 0) if name == "embed" else (0, 1)
        tensor = spec[split] == "tensor"
        blocks = shape["tensor"] if tensor else 1
        size = table.shape[split]
        if "fsdp" not in spec or shape["fsdp"] == 1 or size % (blocks * shape["fsdp"]):
            return self._whole(table, spec), Vocabulary()
        table = turn(table, whole, split, split if tensor else None, self._dtype)
        return table, Vocabulary("fsdp", blocks, size)

    def embed(self, table: Array, tokens_N: Array, dtype: Any) -> Array:
        if "fsdp" not in self.specs["embed"]:
            return super().embed(table, tokens_N, dtype)
        # Each shard looks up its columns for the tokens of all shards, then receives all columns of
        # its own tokens. Only the tokens' rows are sent, not the table.
        all_tokens = jax.lax.all_gather(tokens_N, "fsdp", tiled=True)
        columns = table[all_tokens].astype(dtype)
        return jax.lax.all_to_all(columns, "fsdp", split_axis=0, concat_axis=1, tiled=True)

    def add_up(self, gradients: Params) -> Params:
        """All-reduces gradients over row shards."""

        def several(*axes):
            return tuple(a for a in axes if self._mesh.shape[a] > 1)

        def axes(spec):
            return several("data") if "fsdp" in spec else several(*ROWS)

        def add(g, spec):
            return jax.lax.psum(g, axes(spec)) if axes(spec) else g

        return jax.tree.map(add, gradients, self.trainable_specs)

    def run(self, function: Any, out_specs: Any, params: Params, *tables: Any) -> Any:
        """Runs `function(params, *tables)` on each row shard; see `on_row_shards`."""
        return on_row_shards(function, self._mesh, out_specs, params, *tables, specs=self.specs)
