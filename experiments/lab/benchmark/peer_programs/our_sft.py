"""Supervised steps of our trainer on the peers' work."""

import jax
import numpy as np
from turns import Turns

from rl_speed.config import Optimizer
from rl_speed.mesh import make_mesh
from rl_speed.policy import load_hf
from rl_speed.runtime.setup import share_processors
from rl_speed.sft.data import Example, make_layout
from rl_speed.sft.train import Pieces, make_update
from rl_speed.update.optimizer import make_optimizer

METRICS = {"tokens": "input_tokens", "padding": "padding", "loss": "loss"}


def main(turns: Turns) -> None:
    work = turns.work
    size = work["groups"] * 2
    shards = work["options"]["devices"]
    share_processors(shards)
    mesh = make_mesh(data=shards)
    params, model = load_hf(work["model"], mesh=mesh)
    examples = [Example(np.int32(prompt), np.int32(response)) for prompt, response in work["rows"]]
    layout = make_layout(size, examples, shards)
    mean = sum(map(len, examples)) / len(examples)
    tokens = round(size * mean / layout.sharing / shards * 1.1)
    optimizer = make_optimizer(Optimizer(learning_rate=1e-6), params)
    update = make_update(Pieces(model, mesh, tokens, sharing=layout.sharing), optimizer)
    state = [params, jax.jit(optimizer.init)(params)]

    def call(turn: int):
        first = turn * size % len(examples)
        *state[:], metrics = update(*state, layout.batch(examples[first : first + size]))
        return {name: float(metrics[theirs]) for name, theirs in METRICS.items()}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
