"""The sampler against a lockstep batch sampler of the same width, with the same weights, keys and decode function."""

import dataclasses
import heapq
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_speed.policy import ModelConfig, decoder, init, num_params
from rl_speed.sampling import Contexts, Requests, Samples, SamplerConfig, build_contexts, build_requests, sample, sample_lockstep


@dataclasses.dataclass(frozen=True)
class Workload:
    """A random Qwen2-shaped policy and ragged requests.

    Attributes:
      requests_per_slot: at the size whose schedule is judged. end_ids: how many of the vocabulary end a response; their number
        sets the mean length (about vocabulary / end_ids, cut at max_new).
      sizes: numbers of requests at which throughput is measured.
    """

    model: ModelConfig
    prompts: int = 16
    prompt_length: int = 64
    slots: int = 32
    requests_per_slot: int = 8
    max_new: int = 256
    end_ids: int = 32
    sizes: tuple[int, ...] = (64, 128, 256, 512)


STANDARD = Workload(ModelConfig(vocab_size=2048, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_width=768))
SMALL = Workload(ModelConfig(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64), prompts=4,
                 prompt_length=8, slots=8, requests_per_slot=8, max_new=48, end_ids=6, sizes=(32, 64))


def list_schedule(lengths: Sequence[int], slots: int) -> tuple[int, np.ndarray]:
    """(steps, start of each request) when every request goes, in order, to the slot that is free first."""
    free = [(0, slot) for slot in range(slots)]
    starts = []
    for length in lengths:
        at, slot = heapq.heappop(free)
        starts.append(at)
        heapq.heappush(free, (at + int(length), slot))
    return max(at for at, _ in free), np.array(starts)


def occupancy(starts: np.ndarray, lengths: np.ndarray, steps: int) -> np.ndarray:
    """i64[steps]: slots that decode at each step."""
    change = np.zeros(steps + 1, np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + lengths, -1)
    return np.cumsum(change)[:steps]


def tables(work: Workload, count: int) -> tuple[Contexts, Requests]:
    """Random prompts; `count` requests spread over them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(work.end_ids, work.model.vocab_size, (work.prompts, work.prompt_length))
    contexts = build_contexts(list(prompts), work.prompts, work.prompt_length)
    index = np.arange(count)
    return contexts, build_requests(index % work.prompts, index % work.prompts, index // work.prompts, contexts,
                                    max(*work.sizes, work.slots * work.requests_per_slot), work.max_new)


def timed(call: Callable[[], Samples]) -> tuple[Samples, float]:
    """Result and seconds; blocks."""
    begin = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - begin


def run(work: Workload, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure. Compilation is excluded by a first call; the two samplers take turns, and medians are reported."""
    params = init(work.model, jax.random.key(0))
    config = SamplerConfig(slots=work.slots, max_new=work.max_new, end_tokens=tuple(range(work.end_ids)))
    policy, key = decoder(work.model), jax.random.key(1)
    count = work.slots * work.requests_per_slot
    call = lambda sampler, requests: sampler(policy, params, contexts, requests, key, config)
    contexts, requests = tables(work, count)
    say("compiling")
    samplers = {"ours": sample, "lockstep": sample_lockstep}
    results = {name: jax.block_until_ready(call(sampler, requests)) for name, sampler in samplers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(repeats):
        for name, sampler in samplers.items():
            results[name], elapsed = timed(lambda: call(sampler, requests))
            seconds[name].append(elapsed)
        say(f"repeat {turn + 1} of {repeats}")
    ours, lockstep = results["ours"], results["lockstep"]
    lengths = np.asarray(ours.lengths)[:count]
    ideal, _ = list_schedule(lengths, work.slots)
    tokens = int(lengths.sum())
    sizes = []
    for size in work.sizes:
        _, sized = tables(work, size)
        timings = [timed(lambda: call(sample, sized)) for _ in range(repeats)]
        drawn = int(timings[0][0].lengths.sum())
        sizes.append({"requests": size, "tokens": drawn, "seconds": float(np.median([s for _, s in timings])),
                      "tokens_per_s": drawn / float(np.median([s for _, s in timings]))})
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "workload": {**dataclasses.asdict(work), "parameters": num_params(work.model)}, "requests": count, "tokens": tokens,
        "mean_length": float(lengths.mean()), "mean_length_share": float(lengths.mean() / work.max_new),
        "slot_use_while_queue": int(ours.queue_slot_steps) / max(int(ours.queue_steps) * work.slots, 1),
        "decode_steps": int(ours.decode_steps), "list_schedule_steps": ideal, "lockstep_steps": int(lockstep.decode_steps),
        "against_list_schedule": ideal / int(ours.decode_steps),
        "step_ratio": int(lockstep.decode_steps) / int(ours.decode_steps),
        "same_tokens": bool((np.asarray(ours.tokens) == np.asarray(lockstep.tokens)).all()),
        "seconds": seconds, "tokens_per_s": {name: tokens / s for name, s in median.items()},
        "wall_clock_ratio": median["lockstep"] / median["ours"], "sizes": sizes, "lengths": lengths.tolist(),
        "starts": {name: np.asarray(r.start_step)[:count].tolist() for name, r in results.items()},
    }


# What issue A asks of the schedule: (key, target, what it means).
TARGETS = (("slot_use_while_queue", 0.95, "slots busy until the queue is empty"),
           ("against_list_schedule", 0.98, "of what ideal list scheduling of these lengths achieves"),
           ("step_ratio", 2.0, "times fewer decode steps than lockstep"))


def table(numbers: dict[str, Any]) -> str:
    """Text table of the numbers beside their targets."""
    lines = [f"{numbers['requests']} requests, {numbers['workload']['slots']} slots, mean length {numbers['mean_length']:.1f} of "
             f"{numbers['workload']['max_new']} ({numbers['mean_length_share']:.0%}), {numbers['tokens']:,} tokens", ""]
    for key, target, meaning in TARGETS:
        verdict = "met" if numbers[key] >= target else "MISSED"
        lines.append(f"  {numbers[key]:7.3f}  {meaning} (target {target}: {verdict})")
    speed = numbers["tokens_per_s"]
    lines += [f"  {numbers['wall_clock_ratio']:7.3f}  times the tokens per second of lockstep ({speed['ours']:,.0f} against "
              f"{speed['lockstep']:,.0f})", f"  identical tokens from both: {numbers['same_tokens']}", "",
              "  requests    tokens   tokens/s"]
    lines += [f"  {s['requests']:8d}  {s['tokens']:8,d}  {s['tokens_per_s']:9,.0f}" for s in numbers["sizes"]]
    return "\n".join(lines)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Occupied slots over decode steps for both samplers, lengths, and throughput over sizes."""
    from rl_speed.training.plots import pyplot

    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 3.6), constrained_layout=True, width_ratios=(2, 1, 1))
    lengths = np.array(numbers["lengths"])
    for name, steps in (("lockstep", numbers["lockstep_steps"]), ("ours", numbers["decode_steps"])):
        axes[0].fill_between(np.arange(steps), occupancy(np.array(numbers["starts"][name]), lengths, steps), step="post",
                             alpha=0.6, label=f"{name}: {steps} steps")
    axes[0].set_xlabel("decode step")
    axes[0].set_ylabel("busy slots")
    axes[0].legend()
    axes[1].hist(lengths, bins=30)
    axes[1].set_xlabel("response length (tokens)")
    axes[1].set_ylabel("responses")
    axes[2].plot([s["tokens"] for s in numbers["sizes"]], [s["seconds"] for s in numbers["sizes"]], marker="o")
    axes[2].set_xlim(left=0)
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("generated tokens")
    axes[2].set_ylabel("seconds")
    figure.savefig(path)
    plt.close(figure)
