"""`rl_speed.sampling.sample` on the peers' work."""

import jax
import numpy as np
from turns import Turns

from rl_speed.policy import decoder, load_hf
from rl_speed.sampling import SamplerConfig, build_contexts, build_requests, sample


def main(turns: Turns) -> None:
    work, options = turns.work, turns.work["options"]
    params, model = load_hf(work["model"])
    prompts, samples, policy = np.array(work["prompts"]), work["samples"], decoder(model)
    contexts = build_contexts(list(prompts), *prompts.shape)
    owner = np.repeat(np.arange(len(prompts)), samples)
    index = np.tile(np.arange(samples), len(prompts))
    config = SamplerConfig(
        options["slots"],
        work["max_new"],
        end_tokens=tuple(range(work["ends"])),
        tail_slots=tuple(options["tail_slots"]),
    )

    key = jax.random.key(0)

    def call(turn: int):
        requests = build_requests(
            owner, owner + turn * len(prompts), index, contexts, len(owner), work["max_new"]
        )
        drawn = jax.device_get(sample(policy, params, contexts, requests, key, config))
        return {"tokens": int(drawn.lengths.sum()), "steps": int(drawn.decode_steps)}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
