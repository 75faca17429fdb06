"""Sampling at Qwen2.5-1.5B's shape: tokens a second and the share of the byte bound, by attention
kernel and with fewer rows for the last requests, beside transformers' `generate` on the same
weights, prompts and device.
"""

import dataclasses

import common
import jax
import numpy as np

from lab.benchmark import decode, machine, scale
from rl_speed import policy, sampling


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in tokens; twice as many as slots. Each response ends at a length of its own,
    geometric with a quarter of the room as mean.
    """

    slots: int = 256
    samples: int = 4
    prompt: int = 512
    room: int = 1024

    def lengths(self) -> np.ndarray:
        drawn = np.random.default_rng(0).geometric(4 / self.room, 2 * self.slots)
        return np.minimum(drawn, self.room).astype(np.int32)

    def prompts(self, vocabulary: int) -> np.ndarray:
        shape = (2 * self.slots // self.samples, self.prompt)
        return np.random.default_rng(1).integers(1, vocabulary, shape).astype(np.int32)

    def arguments(self, vocabulary: int):
        """(contexts, requests, key, config) of `sampling.sample`."""
        prompts = self.prompts(vocabulary)
        lengths = self.lengths()
        contexts = sampling.build_contexts(list(prompts), *prompts.shape)
        context, index = np.divmod(np.arange(len(lengths)), self.samples)
        requests = sampling.build_requests(
            context, context, index, contexts, capacity=len(lengths), max_new=lengths
        )
        config = sampling.SamplerConfig(self.slots, self.room, prefill_chunk=8)
        return contexts, requests, jax.random.key(2), config

    def least_bytes(self, weights: int, steps: int, token: int) -> int:
        """Bytes that must be read: weights at every step, keys and values of every response so far,
        and each prompt's once for its samples.
        """
        lengths = self.lengths().astype(np.int64)
        responses = int((lengths * (lengths - 1) // 2).sum()) * token
        prompts = int(lengths.sum()) * self.prompt * token // self.samples
        return steps * weights + responses + prompts


def workload(small: bool) -> Workload:
    return Workload(slots=8, prompt=16, room=32) if small else Workload()


def ours(setting: common.Setting, found: common.Result) -> None:
    work = workload(setting.small)
    model = setting.model()
    params = jax.jit(lambda key: policy.init(model, key))(jax.random.key(0))
    policy.save_hf(setting.scratch / "qwen", params, model, dtype=model.dtype)
    bandwidth = machine.memory_bandwidth()
    itemsize = np.dtype(model.dtype).itemsize
    tokens = int(work.lengths().sum())
    token = 2 * model.layers * model.kv_heads * model.head_dim * itemsize
    ways = decode.ways(model)
    if not setting.small:
        del ways["ragged"]  # its loops of loops: on an H200 over six times the time of "dense"
    *tables, config = work.arguments(model.vocab_size)
    narrow = dataclasses.replace(config, tail_slots=(work.slots // 2, work.slots // 8))
    calls = {kind: (attention, config) for kind, attention in ways.items()}
    best = list(ways)[-1]
    calls[f"{best}, narrow tail"] = (ways[best], narrow)
    for kind, (attention, config) in calls.items():
        with found.attempt(f"sampling, {kind}"):
            decoder = policy.decoder(model, attention=attention)
            drawn = []

            def call():
                return drawn.append(sampling.sample(decoder, params, *tables, config)) or drawn[-1]

            seconds, first = machine.times(call, 1)
            steps = int(drawn[-1].decode_steps)
            least = work.least_bytes(policy.num_params(model) * itemsize, steps, token) / bandwidth
            found.figures |= {
                f"{kind}: tokens/s": tokens / seconds,
                f"{kind}: share of the byte bound": least / seconds,
                f"{kind}: decode steps": steps,
                f"{kind}: first call, compiling (s)": first,
            }
            missing = abs(tokens - int(np.asarray(drawn[-1].lengths).sum()))
            found.at_most(f"{kind}: tokens missing", missing, 0)
            found.at_most(f"{kind}: share of the byte bound", least / seconds, 1.1)
    found.figures["peak memory (bytes)"] = scale.peak_memory()


def theirs(setting: common.Setting, found: common.Result) -> None:
    work = workload(setting.small)
    rates = [x for k, x in found.figures.items() if "tokens/s" in k]
    with found.attempt("transformers", needs="torch"):
        import torch_reference

        model = torch_reference.load(setting.scratch / "qwen")
        rows = np.repeat(work.prompts(model.config.vocab_size), work.samples, axis=0)
        # One batch, of which the others differ in nothing: transformers has no slots to refill. It
        # waits for the longest, and of long ones did not end in a minute: here a quarter of the
        # room is the most, which favours it.
        one = slice(0, work.slots)
        lengths = np.minimum(work.lengths()[one], work.room // 4)
        rate = torch_reference.generated(model, rows[one], lengths)
        found.figures["transformers: tokens/s"] = rate
        found.figures["tokens/s of our best by transformers'"] = max(rates) / rate


if __name__ == "__main__":
    common.main(ours, theirs)
