"""`sample` on a mesh: every (`data`, `fsdp`) shard runs its own slots over its own table and stops when it is done."""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from rl_speed.mesh import ROWS
from rl_speed.sampling.sampler import sample
from rl_speed.sampling.types import Array, Contexts, Decoder, Requests, Samples, SamplerConfig


@functools.partial(jax.jit, static_argnames=("decoder", "config", "mesh"))
def sample_sharded(decoder: Decoder, params, contexts: Contexts, requests: Requests, key: Array, config: SamplerConfig,
                   mesh: Mesh) -> Samples:
    """`sample`, one table per shard.

    Args:
      contexts, requests: as for `sample`, every leaf with a leading axis of length data x fsdp; a request names contexts of
        its own shard.
      params: weights under any sharding. They are gathered over `data` and `fsdp` once, at entry; `tensor` stays with the
        partitioner.
      key: the same on all shards: a request's randomness does not depend on where it runs.
      config: `slots` is per shard.

    Returns:
      Samples with the same leading axis.
    """
    def shard(params, contexts, requests, key):
        mine = jax.tree.map(lambda x: x[0], (contexts, requests))
        return jax.tree.map(lambda x: x[None], sample(decoder, params, *mine, key, config))

    rows, whole = PartitionSpec(ROWS), PartitionSpec()
    # The loops' trip counts differ between shards, so nothing inside may communicate over the manual axes.
    return jax.shard_map(shard, mesh=mesh, in_specs=(whole, rows, rows, whole), out_specs=rows, axis_names=set(ROWS),
                         check_vma=False)(params, contexts, requests, key)
