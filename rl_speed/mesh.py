"""The device mesh and the two tables that shard named weight axes over it.

Mesh axes: `data` (copies of the weights, different rows), `fsdp` (rows split, weights sharded and
gathered for use), `tensor` (weights split inside a layer).
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the axes that split a batch

# Logical weight axis -> mesh axis.
TRAIN_RULES: Mapping[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
}
# Generation gathers weights over `fsdp` once per call and keeps `tensor`.
GENERATE_RULES: Mapping[str, str | None] = {**TRAIN_RULES, "embed": None}


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes ('data', 'fsdp', 'tensor') whose partitioning XLA decides (AxisType.Auto).

    Raises ValueError, with the numbers, if the mesh needs more devices than there are, or unequal
    numbers from its processes.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = (data, fsdp, tensor)
    if min(shape) < 1:
        raise ValueError(
            f"mesh axes must be at least 1, got data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    need = int(np.prod(shape))
    if need > len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {need} devices, but only "
            f"{len(devices)} are visible ({devices[0].platform}); lower an axis, or on a CPU ask "
            f'for more before JAX is used: jax.config.update("jax_num_cpu_devices", {need})'
        )
    taken = Counter(device.process_index for device in devices[:need])
    hosts = sorted({device.process_index for device in devices})
    if len({taken[host] for host in hosts}) > 1:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} takes {need} of {len(devices)} "
            f"devices, which {len(hosts)} processes have: of process {hosts[0]} it would take "
            f"{taken[hosts[0]]}, of process {hosts[-1]} {taken[hosts[-1]]}. Take all of them, or "
            "start fewer processes"
        )
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    # Same order as `jax.make_mesh`, which refuses an axis of 8 on a 4 x 4 torus: here such an axis
    # takes one torus axis and half of the other.
    laid = mesh_utils.create_device_mesh(shape, devices[:need], allow_split_physical_axes=True)
    return Mesh(laid, AXES, axis_types=types)


def disjoint(
    sizes: Sequence[int], devices: Sequence[jax.Device] | None = None
) -> list[list[jax.Device]]:
    """Disjoint sets of devices of these sizes, each with equally many of every process.

    Raises ValueError, with the numbers, if there are too few, or the processes do not divide them.
    """
    devices = jax.devices() if devices is None else list(devices)
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    if any(size % len(hosts) for size in sizes):
        raise ValueError(
            f"meshes of {' and '.join(map(str, sizes))} devices cannot be split over "
            f"{len(hosts)} processes: each must have equally many devices of every mesh"
        )
    each = [size // len(hosts) for size in sizes]
    least = min(map(len, hosts.values()))
    if sum(each) > least:
        raise ValueError(
            f"meshes of {' and '.join(map(str, sizes))} devices that share none need "
            f"{sum(sizes)} devices, but only {least * len(hosts)} are visible "
            f"({devices[0].platform})"
        )
    starts = [sum(each[:i]) for i in range(len(each))]
    return [
        [device for mine in hosts.values() for device in mine[start : start + size]]
        for start, size in zip(starts, each)
    ]


def platform_of(mesh: Mesh | None) -> str:
    """ "cpu", "gpu" or "tpu": platform that programs on the mesh are compiled for; without a mesh,
    the default device's.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


def own_axes(mesh: Mesh) -> set[str]:
    """Manual axes of programs that each row shard runs by itself: `ROWS`, and `tensor` if it has
    one device.

    With several devices the partitioner handles `tensor`, and callers of kernels use `over_tensor`:
    kernels, also those of libraries, need all axes to be manual.
    """
    return set(AXES) if mesh.shape["tensor"] == 1 else set(ROWS)


def over_tensor(
    function: Callable, split: Sequence[int | None], out: Any, args: Sequence[Any]
) -> Any:
    """Runs function(*args) on each device of `tensor` for its shard of the heads.

    Outside a row shard's program, or if `tensor` is not an axis of the partitioner, the function
    gets all heads.

    Args:
      split: for each argument, a pytree, the axis of its arrays' heads; None for arguments that all
        devices read whole. out: the axis of the result, or a tuple for several results.

    Heads that `tensor` does not divide are computed by every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or "tensor" not in mesh.auto_axes:
        return function(*args)
    size = mesh.shape["tensor"]
    heads = [
        x.shape[a] for arg, a in zip(args, split) if a is not None for x in jax.tree.leaves(arg)
    ]
    whole = any(n % size for n in heads)

    def spec(a):
        return PartitionSpec(*(() if whole or a is None else ([None] * a + ["tensor"])))

    return jax.shard_map(
        function,
        in_specs=tuple(map(spec, split)),
        out_specs=tuple(map(spec, out)) if isinstance(out, tuple) else spec(out),
        axis_names={"tensor"},
        check_vma=False,
    )(*args)


def partition_spec(
    mesh: Mesh,
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    rules: Mapping[str, str | None] = TRAIN_RULES,
) -> PartitionSpec:
    """The PartitionSpec of one array.

    An axis that its mesh axis does not divide is replicated (2 KV heads on tensor=4).
    """
    if len(logical_axes) != len(shape):
        raise ValueError(
            f"{len(logical_axes)} logical axes {tuple(logical_axes)} for shape {tuple(shape)}"
        )
    spec = []
    for name, size in zip(logical_axes, shape):
        axis = None if name is None else rules[name]
        taken = axis is None or axis in spec or size % mesh.shape[axis] != 0
        spec.append(None if taken else axis)
    return PartitionSpec(*spec)


def named_sharding(
    mesh: Mesh,
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    rules: Mapping[str, str | None] = TRAIN_RULES,
) -> NamedSharding:
    """`partition_spec` bound to the mesh."""
    return NamedSharding(mesh, partition_spec(mesh, logical_axes, shape, rules))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Splits axis 0 over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh) -> int:
    """Number of shards of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def own_row_shards(mesh: Mesh) -> list[int]:
    """Row shards with devices of this process; all of them if it is the only one."""
    if not spans_processes(mesh):
        return list(range(row_shards(mesh)))
    shards = mesh.devices.reshape(row_shards(mesh), -1)
    mine = jax.process_index()
    return [i for i, row in enumerate(shards) if any(d.process_index == mine for d in row)]


def spans_processes(mesh: Mesh) -> bool:
    """Whether other processes of this run have devices of the mesh.

    Described chips (`targets`) belong to hosts that do not run.
    """
    others = (d.process_index != jax.process_index() for d in mesh.devices.flat)
    return jax.process_count() > 1 and any(others)


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays that every process has, as arrays of the mesh; each process copies the shards of
    its devices.

    If this process has all devices, they are returned unchanged: a jitted function places them.
    """
    if not spans_processes(sharding.mesh):
        return tree

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = place(np.asarray(jax.random.key_data(x)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def place_parts(make: Callable[[slice], Any], rows: int, mesh: Mesh) -> Any:
    """`make(slice(0, rows))`, a tree of host arrays with `rows` rows, split over the row shards.
    Each process makes only its own parts.
    """
    if not spans_processes(mesh):
        return make(slice(0, rows))
    each = rows // row_shards(mesh)
    mine = {i * each: make(slice(i * each, (i + 1) * each)) for i in own_row_shards(mesh)}
    sharding = batch_sharding(mesh)
    starts = list(mine)

    def one(*leaves: np.ndarray) -> jax.Array:
        host = dict(zip(starts, leaves))
        shape = (rows, *leaves[0].shape[1:])

        def part(index):
            return host[index[0].indices(rows)[0]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(one, *mine.values())


def place_rows(shards: Mapping[int, Any], mesh: Mesh) -> Any:
    """Stacks trees of host arrays, one for each row shard of this process, along a new axis 0 that
    is split over the row shards.

    Args:
      shards: by the numbers of `own_row_shards`.
    """
    if not spans_processes(mesh):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *shards.values())
    numbers = list(shards)
    sharding = batch_sharding(mesh)

    def one(*leaves: Any) -> jax.Array:
        host = dict(zip(numbers, map(np.asarray, leaves)))
        shape = (row_shards(mesh), *host[numbers[0]].shape)

        def part(index):
            return np.stack([host[i] for i in range(*index[0].indices(shape[0]))])

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(one, *shards.values())


@functools.lru_cache(maxsize=8)
def _whole(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def gathered(tree: Any, mesh: Mesh) -> Any:
    """Arrays of the mesh, replicated so that `jax.device_get` returns all of them to every process.

    If other processes hold parts, all processes must call it, in the same order as their other
    computations on the mesh.
    """
    if not spans_processes(mesh):
        return tree

    def there(x):
        return not isinstance(x, jax.Array) or x.is_fully_replicated

    leaves, structure = jax.tree.flatten(tree)
    split = [i for i, x in enumerate(leaves) if not there(x)]
    for i, x in zip(split, _whole(mesh)([leaves[i] for i in split]) if split else []):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)
