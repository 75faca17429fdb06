"""The package google-jetstream 0.2.2: where it is imported, and what has to be put right about it.

- Its import sets the root logger to DEBUG, with a handler of its own, and then logs two lines a
  token. That is undone.
- It brings TensorFlow, by way of seqio, for tokenizers that are not used here: some
  seconds of import.
- It calls `jax.tree_map`, which JAX 0.6 removed, after each insert, in a thread that kills the
  process when anything is raised.
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
