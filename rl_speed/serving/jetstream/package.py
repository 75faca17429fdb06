"""Imports the package google-jetstream 0.2.2 and works around its problems.

- Its import sets the root logger to DEBUG, with its own handler, and then logs two lines per token.
  This is undone.
- It imports TensorFlow, through seqio, for tokenizers that are not used here. This takes seconds.
- After each insert it calls `jax.tree_map`, which JAX 0.6 removed, in a thread that kills the
  process on any exception. `delete_pytree` is replaced.
"""

from typing import Any

import jax

from rl_speed.serving.jetstream import importing


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


with importing():
    from jetstream.core import orchestrator, server_lib
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

orchestrator.delete_pytree = _delete

__all__ = [
    "engine_api",
    "jetstream_pb2",
    "jetstream_pb2_grpc",
    "orchestrator",
    "server_lib",
    "tokenizer_api",
    "tokenizer_pb2",
]
