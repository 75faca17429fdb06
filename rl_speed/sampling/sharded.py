"""The samplers on a mesh: every (`data`, `fsdp`) shard runs its own slots over its own table and
stops when it is done.
"""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from rl_speed.mesh import ROWS, own_axes
from rl_speed.sampling.adaptive import Verify, sample_adaptive
from rl_speed.sampling.callback import check_mesh, raising
from rl_speed.sampling.contract import check_limits, check_prefixes, checked
from rl_speed.sampling.rules import Rule
from rl_speed.sampling.sampler import Decoding, Fixed, begin, decode_steps, finished, sample
from rl_speed.sampling.types import (
    AdaptiveSamples,
    Array,
    Contexts,
    Counts,
    Decoder,
    Prompts,
    Requests,
    SamplerConfig,
    Samples,
)


def per_shard(function, whole, tables, mesh: Mesh):
    """function(*whole, tables of one shard), run by each shard for itself; `tables` and results
    have shards on axis 0.

    The loops' trip counts differ between shards, so nothing inside may communicate over the axes
    that the program has as its own (`mesh.own_axes`).
    """

    def shard(whole, tables):
        return jax.tree.map(
            lambda x: x[None], function(*whole, jax.tree.map(lambda x: x[0], tables))
        )

    rows = PartitionSpec(ROWS)
    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows),
        out_specs=rows,
        axis_names=own_axes(mesh),
        check_vma=False,
    )(whole, tables)


@checked(check_limits)
@functools.partial(jax.jit, static_argnames=("decoder", "config", "mesh"))
def sample_sharded(
    decoder: Decoder,
    params,
    contexts: Contexts,
    requests: Requests,
    key: Array,
    config: SamplerConfig,
    mesh: Mesh,
) -> Samples:
    """`sample`, one table per shard.

    Args:
      contexts, requests: as for `sample`, every leaf with a leading axis of length data x fsdp; a
        request names contexts of its own shard.
      params: weights under any sharding. They are gathered over `data` and `fsdp` once, at entry;
        `tensor` stays with the partitioner.
      key: the same on all shards: a request's randomness does not depend on where it runs.
      config: `slots` is per shard.

    Returns:
      Samples with the same leading axis.

    Raises ValueError and TypeError as `sample`.
    """
    draw = lambda params, key, tables: sample(decoder, params, *tables, key, config)
    return per_shard(draw, (decoder.narrow(params), key), (contexts, requests), mesh)


@checked(check_limits)
@functools.partial(jax.jit, static_argnames=("decoder", "config", "mesh"))
def begin_sharded(
    decoder: Decoder,
    params,
    contexts: Contexts,
    requests: Requests,
    key: Array,
    config: SamplerConfig,
    mesh: Mesh,
) -> tuple[Fixed, Decoding]:
    """`sample_sharded` up to its first decode step, for a host that looks at a call on its way:
    `advance_sharded` makes the steps, and `samples_of` the same samples, bit for bit.

    Not for a mesh with several devices on `tensor`: nothing here says how the partitioner splits
    an empty cache over them.
    """
    start = lambda params, key, tables: begin(decoder, params, *tables, key, config=config)
    return per_shard(start, (decoder.narrow(params), key), (contexts, requests), mesh)


@functools.partial(
    jax.jit, static_argnames=("decoder", "config", "mesh"), donate_argnames=("state",)
)
def advance_sharded(
    decoder: Decoder, fixed: Fixed, state: Decoding, steps: Array, config: SamplerConfig, mesh: Mesh
) -> tuple[Decoding, Array]:
    """(state after at most `steps` decode steps of each shard, requests that have ended i32[
    shards]). Takes `state` for its own. Compiles once, whatever `steps` is.
    """

    def go(steps, tables):
        fixed, state = tables
        state = decode_steps(decoder, fixed, state, config=config, limit=steps)
        return state, finished(state, fixed.requests.context.shape[0])

    return per_shard(go, (steps,), (fixed, state), mesh)


@checked(check_prefixes)
@raising
@functools.partial(
    jax.jit, static_argnames=("decoder", "rule", "verify", "target", "config", "mesh")
)
def sample_adaptive_sharded(
    decoder: Decoder,
    params,
    prompts: Prompts,
    rule: Rule,
    verify: Verify,
    target: int,
    key: Array,
    config: SamplerConfig,
    mesh: Mesh,
) -> tuple[AdaptiveSamples, Counts]:
    """`sample_adaptive`, one table of candidates per shard.

    Args:
      prompts: as for `sample_adaptive`, every leaf with a leading axis of length data x fsdp. Dealt
        by visit, what is trained on does not depend on timing.
      target: groups per shard. config: `slots` and `context_pool` are per shard.
      verify: as for `sample_adaptive`; a `HostVerify` is called by every shard, in turn, and needs
        `tensor` of size 1.

    Returns:
      (samples, counts) with the same leading axis.

    Raises:
      ValueError: as `sample_adaptive`, or a `HostVerify` where it cannot run. TypeError: as
        `sample_adaptive`.
        VerifierError: a `HostVerify` failed.
    """
    draw = lambda params, key, prompts: sample_adaptive(
        decoder, params, prompts, rule, verify, target, key, config
    )
    check_mesh(verify, mesh)
    return per_shard(draw, (decoder.narrow(params), key), prompts, mesh)
