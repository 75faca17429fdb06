"""Checkpoints: the train state as sharded arrays, everything on the host beside it, in one atomic directory per step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

SEPARATOR = "/"


def split_host(tree: dict[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Nested dicts of scalars, strings and arrays -> (flat JSON values, flat arrays), keyed by the path.

    Empty dicts keep their place (a path that ends in the separator); empty arrays, which Orbax refuses, travel as their dtype
    and shape.
    """
    values, arrays = {}, {}
    for name, value in tree.items():
        if SEPARATOR in name:
            raise ValueError(f"state key {name!r} must not contain {SEPARATOR!r}")
        path = prefix + name
        if isinstance(value, dict):
            values[path + SEPARATOR] = None
            more = split_host(value, path + SEPARATOR)
            values |= more[0]
            arrays |= more[1]
        elif isinstance(value, np.ndarray) and value.size:
            arrays[path] = value
        elif isinstance(value, np.ndarray):
            values[path] = {"dtype": str(value.dtype), "shape": list(value.shape)}
        else:
            values[path] = value
    return values, arrays


def join_host(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `split_host`."""
    tree: dict[str, Any] = {}
    for path, value in [*values.items(), *arrays.items()]:
        *parents, leaf = path.split(SEPARATOR)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        if isinstance(value, dict):
            value = np.empty(value["shape"], value["dtype"])
        if leaf:
            node[leaf] = value
    return tree


class Checkpointer:
    """Saves and restores (train state, host state) by step, keeping the newest `keep`.

    Saving is asynchronous: `close` (or the next save) waits for it. A directory that was not finished is never listed.
    """

    def __init__(self, directory: str | Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(Path(directory).resolve(), options=options,
                                              item_names=("state", "arrays", "host"))

    def latest(self) -> int | None:
        """Newest finished step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """`state`: a pytree of jax arrays, copied before this returns (the update may donate it). `host`: nested dicts of
        JSON values and numpy arrays."""
        values, arrays = split_host(host)
        # Orbax refuses an empty tree; the marker also tells a checkpoint without host arrays from a damaged one.
        arrays = {"saved": np.ones((1,), np.int32)} | arrays
        self._manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), arrays=ocp.args.PyTreeSave(arrays), host=ocp.args.JsonSave(values)))

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state with the shapes and shardings of `like`, host state)."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        found = self._manager.restore(step, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), arrays=ocp.args.PyTreeRestore(), host=ocp.args.JsonRestore()))
        arrays = {name: np.asarray(value) for name, value in found["arrays"].items() if name != "saved"}
        return found["state"], join_host(found["host"], arrays)

    def close(self) -> None:
        """Wait for the save under way, and let go of the directory."""
        self._manager.wait_until_finished()
        self._manager.close()
