"""`rl_speed.sampling.sample_sharded` on the peers' work."""

import jax
import numpy as np
from turns import Turns

from rl_speed.mesh import make_mesh
from rl_speed.policy import decoder, load_hf
from rl_speed.runtime.setup import share_processors
from rl_speed.sampling import SamplerConfig, build_contexts, build_requests, sample_sharded


def main(turns: Turns) -> None:
    work = turns.work
    options = turns.work["options"]
    shards = options["devices"]
    share_processors(shards)
    mesh = make_mesh(data=shards)
    params, model = load_hf(work["model"], mesh=mesh)
    prompts = np.array(work["prompts"])
    samples = work["samples"]
    policy = decoder(model)
    contexts = build_contexts(list(prompts), *prompts.shape)
    owner = np.repeat(np.arange(len(prompts)), samples)
    index = np.tile(np.arange(samples), len(prompts))
    config = SamplerConfig(
        options["slots"] // shards,
        work["max_new"],
        end_tokens=tuple(work["ends"]),
        tail_slots=tuple(width // shards for width in options["tails"]),
    )

    key = jax.random.key(0)
    capacity = -(-len(owner) // shards)

    def stack(tables):
        return jax.tree.map(lambda *x: np.stack(x), *tables)

    def requests(turn: int, shard: int):
        mine = owner[shard::shards]
        return build_requests(
            mine,
            mine + turn * len(prompts),
            index[shard::shards],
            contexts,
            capacity,
            work["max_new"],
        )

    def call(turn: int):
        tables = stack([requests(turn, shard) for shard in range(shards)])
        pools = stack([contexts] * shards)
        drawn = sample_sharded(policy, params, pools, tables, key, config, mesh)
        drawn = jax.device_get(drawn)
        return {"tokens": int(drawn.lengths.sum()), "steps": int(drawn.decode_steps.max())}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
