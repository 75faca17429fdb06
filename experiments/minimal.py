"""SPEED-RLOO on the embedded task, all of it on one page, from public functions alone.

    python experiments/minimal.py [--steps=60] [--seed=0]        # under a minute on two cores

A step is one compiled program. It screens candidates with 4 samples each, draws 20 more of those
that were neither always nor never solved, and makes one RLOO update on the first 16 such groups.
Held-out accuracy is printed every ten steps. This is SPEED's Algorithm 1. experiments/train.py adds
methods, checkpoints, metrics and export; its default is Algorithm 2 (rollout/host_driver.py).
"""

import argparse
import time

import jax
import optax

from rl_speed import policy, sampling
from rl_speed.data import TASKS, PromptStream
from rl_speed.data.embedded_tokenizer import TEMPLATE, embedded_directory
from rl_speed.objectives import policy_loss, rloo
from rl_speed.rewards import ExactMatch, pad_answers
from rl_speed.runtime.setup import setup_jax
from rl_speed.sampling import SamplerConfig, Speed, sample_adaptive, training_batch

GROUPS = 16  # that a step trains on
CANDIDATES = 320  # that it may screen to find them; about one in seven passes
RULE = Speed(n_init=4, n_cont=20)
CHAIN = TASKS["chain"]
PROMPT = CHAIN.max_prompt_tokens
RESPONSE = CHAIN.max_response_tokens


def train(steps: int, seed: int = 0, held_out: int = 512) -> list[float]:
    """Held-out accuracies: before the first step, after every tenth, and after the last."""
    setup_jax()  # compiled programs are kept on disk
    directory = embedded_directory()
    tokenizer = policy.load_tokenizer(directory)
    params, model = policy.load_hf(directory)
    decoder = policy.decoder(model)
    sampler = SamplerConfig(
        slots=256,
        max_new=RESPONSE,
        end_tokens=policy.end_token_ids(directory, tokenizer),
        prefill_chunk=32,
    )
    verify = ExactMatch(sampler.end_tokens)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, weight_decay=0.1))

    encode = [policy.prompt_encoder(tokenizer, format) for format in (TEMPLATE, "{question}")]
    stream = PromptStream(CHAIN.prompts("train", seed, 4096, *encode), seed)
    evaluation = CHAIN.prompts("eval", 0, held_out, *encode)

    @jax.jit
    def step(params, opt_state, prompts, key):
        samples, counts = sample_adaptive(
            decoder, params, prompts, RULE, verify, GROUPS, key, sampler
        )
        batch = training_batch(samples, counts, prompts, GROUPS)
        advantages = rloo(batch.rewards, batch.group_ids, GROUPS)

        def loss(params):
            logprobs, _ = policy.sequence_logprobs(params, batch.tokens, model)
            old = batch.behaviour_logprobs
            return policy_loss(logprobs, old, advantages, batch.mask, loss="pg")[0]

        updates, moved = optimizer.update(jax.grad(loss)(params), opt_state, params)
        new = optax.apply_updates(params, updates), moved
        # Without any group there is no step, not even one of momentum.
        params, opt_state = jax.tree.map(
            lambda a, b: jax.numpy.where(batch.mask.any(), a, b), new, (params, opt_state)
        )
        return params, opt_state, samples.consumed, samples.missing

    contexts = sampling.build_contexts([p.tokens for p in evaluation], held_out, PROMPT)
    requests = sampling.build_requests(
        range(held_out), range(held_out), [0] * held_out, contexts, held_out, RESPONSE
    )
    answers = pad_answers([p.answer_tokens for p in evaluation], RESPONSE)

    @jax.jit
    def accuracy(params):
        samples = sampling.sample(decoder, params, contexts, requests, jax.random.key(1), sampler)
        return verify(samples.tokens, samples.lengths, answers).mean()

    opt_state = optimizer.init(params)
    history = [float(accuracy(params))]
    screened = 0
    started = time.perf_counter()
    print(f"step   0  held-out accuracy {history[0]:.3f}")
    for number in range(1, steps + 1):
        candidates = stream.take(CANDIDATES)
        prompts = sampling.build_prompts(
            [p.tokens for p in candidates],
            [p.visit for p in candidates],
            pad_answers([p.answer_tokens for p in candidates], RESPONSE),
            CANDIDATES,
            PROMPT,
        )
        params, opt_state, consumed, missing = step(
            params, opt_state, prompts, jax.random.key(seed)
        )
        stream.put_back(candidates[int(consumed) :])  # those behind the last group were not sampled
        screened += int(consumed)
        if number % 10 == 0 or number == steps:
            history.append(float(accuracy(params)))
            print(
                f"step {number:3}  held-out accuracy {history[-1]:.3f}  prompts screened "
                f"{screened}  groups missing {int(missing)}  {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
