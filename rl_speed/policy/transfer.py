"""Copies the policy's weights from the training mesh to the generation mesh."""

import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from rl_speed.mesh import GENERATE_RULES, replicated
from rl_speed.policy.config import ModelConfig
from rl_speed.policy.decoding import narrow
from rl_speed.policy.transformer import abstract_params, param_shardings


class Transfer:
    """Copies weights for generation, in the compute dtype, split only over `tensor`: call it with
    the parameters.

    If both meshes use the same devices, the weights are resharded. Otherwise each weight in turn is
    gathered on the training mesh, and every process copies it from one of its training devices to
    its generation devices, so every process needs devices of both meshes.

    Attributes:
      bytes: total bytes that the generation devices receive.
      same_devices: whether both meshes use the same devices.
    """

    def __init__(self, model: ModelConfig, training: Mesh, generation: Mesh):
        self._shardings = param_shardings(model, generation, GENERATE_RULES)
        self.same_devices = set(training.devices.flat) == set(generation.devices.flat)
        self._narrow = jax.jit(lambda params: narrow(params, model))
        self._gather = jax.jit(lambda x: x, out_shardings=replicated(training))
        shapes = jax.eval_shape(functools.partial(narrow, config=model), abstract_params(model))

        def part(x, sharding):
            return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

        sizes = jax.tree.leaves(jax.tree.map(part, shapes, self._shardings))
        self.bytes = sum(sizes) * generation.devices.size

    def __call__(self, params: Any) -> Any:
        narrowed = self._narrow(params)
        if self.same_devices:
            return jax.device_put(narrowed, self._shardings)
        return jax.tree.map(self._send, narrowed, self._shardings)

    def _send(self, weight: jax.Array, sharding: NamedSharding) -> jax.Array:
        whole = self._gather(weight).addressable_shards[0].data
        parts = [
            jax.device_put(whole[index], device)
            for device, index in sharding.addressable_devices_indices_map(weight.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(weight.shape, sharding, parts)
