"""The same requests through JetStream's server, through the engine alone,
and through the sampler: what serving costs.

Greedy responses of set, ragged lengths, so that all three do the same work, token for token. The
clients are a process apart.
"""

import asyncio
import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_speed.data.embedded_tokenizer import embedded_directory
from rl_speed.policy import ModelConfig, decoder, init, num_params
from rl_speed.sampling import SamplerConfig, build_contexts, build_requests, sample
from rl_speed.serving import ServedPolicy

WAYS = ("sampler", "engine", "jetstream")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A random Qwen2-shaped policy, and requests that come at once;
    prompts and responses of any length up to the largest.
    """

    model: ModelConfig
    requests: int = 64
    slots: int = 32
    prompt_length: int = 64
    max_new: int = 256


STANDARD = Workload(
    ModelConfig(
        vocab_size=2048, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_width=768
    )
)
SMALL = Workload(
    ModelConfig(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64),
    requests=12,
    slots=4,
    prompt_length=20,
    max_new=24,
)


def standard() -> Workload:
    """The same on every platform."""
    return STANDARD


def ask_all(address: str, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Every request at once, from one thread; token ids of the responses."""
    from rl_speed.serving.client import grpc, jetstream_pb2, jetstream_pb2_grpc

    request = jetstream_pb2.DecodeRequest

    async def one(stub: Any, prompt: list[int], limit: int) -> list[int]:
        asked = request(max_tokens=limit, token_content=request.TokenContent(token_ids=prompt))
        return [
            t
            async for reply in stub.Decode(asked)
            for t in reply.stream_content.samples[0].token_ids
        ]

    async def every() -> list[list[int]]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            return await asyncio.gather(*(one(stub, p, n) for p, n in zip(prompts, limits)))

    return asyncio.run(every())


def drive(engine: Any, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """The same by the engine in a plain loop, each step's tokens fetched before the next."""
    params, state, waiting = (
        engine.load_params(),
        engine.init_decode_state(),
        list(enumerate(prompts))[::-1],
    )
    tenants, found = {}, [[] for _ in prompts]
    while waiting or tenants:
        for slot in range(engine.max_concurrent_decodes):
            if slot not in tenants and waiting:
                tenants[slot], ids = waiting.pop()
                prefix = engine.prefill(
                    params=params, padded_tokens=engine.pad(ids), true_length=len(ids)
                )
                state = engine.insert(prefix, state, slot)
        state, result = engine.generate(params, state)
        data = np.asarray(result.data)
        for slot, i in list(tenants.items()):
            found[i].append(int(data[slot, 0]))
            if len(found[i]) == limits[i]:
                del tenants[slot]
    return found


def run(work: Workload, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure. The three take turns, after a turn that compiles and connects; medians are reported.

    Processor seconds are this process's, all threads together: without the clients, and little
    moved by other jobs on the machine.
    """
    from rl_speed.serving import PolicyEngine, Server

    rng = np.random.default_rng(0)
    params, longest, count = init(work.model, jax.random.key(0)), work.prompt_length, work.requests
    prompts = [
        rng.integers(1, work.model.vocab_size, n).tolist()
        for n in rng.integers(1, longest + 1, count)
    ]
    limits = rng.integers(1, work.max_new + 1, count).tolist()
    # The end token is none of the vocabulary, so that lengths are as asked for.
    policy = ServedPolicy(
        embedded_directory(), params, work.model, (work.model.vocab_size,), "random"
    )
    engine = PolicyEngine(policy, SamplerConfig(work.slots, work.max_new, temperature=0.0), longest)
    engine.warm_up()
    contexts = build_contexts([np.array(p) for p in prompts], count, longest)
    requests = build_requests(range(count), range(count), [0] * count, contexts, count, limits)

    def sampler() -> list[list[int]]:
        out = jax.device_get(
            sample(
                decoder(work.model), params, contexts, requests, jax.random.key(0), engine.config
            )
        )
        return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths)]

    say("compiling")
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    processor: dict[str, list[float]] = {name: [] for name in WAYS}
    with Server(engine) as server, multiprocessing.get_context("spawn").Pool(1) as client:
        ways = {
            "sampler": sampler,
            "engine": lambda: drive(engine, prompts, limits),
            "jetstream": lambda: client.apply(
                ask_all, (f"localhost:{server.port}", prompts, limits)
            ),
        }
        found = {name: way() for name, way in ways.items()}
        for turn in range(repeats):
            for name, way in ways.items():
                begin, busy = time.perf_counter(), time.process_time()
                found[name] = way()
                seconds[name].append(time.perf_counter() - begin)
                processor[name].append(time.process_time() - busy)
            say(f"repeat {turn + 1} of {repeats}")
    tokens = sum(limits)
    speed = {name: tokens / float(np.median(values)) for name, values in seconds.items()}
    same = {name: sum(a == b for a, b in zip(found[name], found["sampler"])) for name in WAYS}
    return {
        "workload": {**dataclasses.asdict(work), "parameters": num_params(work.model)},
        "tokens": tokens,
        "seconds": seconds,
        "processor_seconds": processor,
        "tokens_per_s": speed,
        "same_responses": same,
        "complete": list(map(len, found["jetstream"])) == limits,
        "ratio": speed["jetstream"] / speed["sampler"],
    }


def verdicts(numbers: dict[str, Any]) -> dict[str, bool]:
    """Whether every response came, whole, and is the sampler's."""
    return {
        "complete": numbers["complete"],
        "same_tokens": len(set(numbers["same_responses"].values())) == 1,
    }


def table(numbers: dict[str, Any]) -> str:
    """Text table of the three."""
    work = numbers["workload"]
    lines = [
        (
            f"{work['requests']} requests at once, prompts of 1 to {work['prompt_length']} tokens, "
            f"responses of 1 to {work['max_new']}, {numbers['tokens']:,} tokens, {work['slots']} "
            f"slots, {work['parameters'] / 1e6:.1f} M parameters"
        ),
        "",
        f"  {'':12}{'wall clock':>24}{'processor':>24}{'same':>12}",
        (
            f"  {'':12}{'seconds':>12}{'of sampler':>12}{'seconds':>12}{'of sampler':>12}"
            f"{'responses':>12}"
        ),
    ]
    clocks = [
        {name: float(np.median(values)) for name, values in numbers[key].items()}
        for key in ("seconds", "processor_seconds")
    ]
    for name in WAYS:
        times = "".join(
            f"{clock[name]:12.2f}{clock[name] / clock['sampler']:12.2f}" for clock in clocks
        )
        lines.append(f"  {name:12}{times}{numbers['same_responses'][name]:12d}")
    lines += [
        "",
        f"tokens per second of jetstream / sampler: {numbers['ratio']:.2f}; per processor second "
        f"{clocks[1]['sampler'] / clocks[1]['jetstream']:.2f}, its clients not counted",
    ]
    return "\n".join(lines)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Tokens per second of the three."""
    from rl_speed.runtime.plotting import pyplot

    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5, 2.2), constrained_layout=True)
    axis.barh(WAYS[::-1], [numbers["tokens_per_s"][name] for name in WAYS[::-1]])
    axis.set_xlabel("tokens per second")
    figure.savefig(path, dpi=110)
    plt.close(figure)
