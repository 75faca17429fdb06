"""Supervised updates on packed rows against the same examples padded, one a row:
solution tokens a second.

Examples have the lengths of GSM8K's training rows as a chat, in Qwen2.5's tokens; what they say
makes no difference to the time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rl_speed.mesh import batch_sharding, make_mesh
from rl_speed.policy import ModelConfig, init, num_params, param_shardings
from rl_speed.sft.data import Example, Layout, Schedule, SFTBatch, make_layout
from rl_speed.sft.train import make_update
from rl_speed.studies.benchmark.decode import QWEN_1P5B
from rl_speed.studies.benchmark.machine import is_cpu
from rl_speed.studies.benchmark.step import clock
from rl_speed.update.optimizer import OptimizerConfig, make_optimizer
from rl_speed.update.state import state_shardings

# Mean and standard deviation of the logarithm, and the extremes, of prompt and solution lengths in
# 7,473 rows; their correlation.
PROMPT, SOLUTION, CORRELATION = (4.458, 0.228, 41, 241), (4.722, 0.420, 30, 454), 0.547


@dataclasses.dataclass(frozen=True)
class Workload:
    """`examples` in batches of `batch`, rows of `length` tokens,
    about `piece` positions at a time.
    """

    model: ModelConfig
    examples: int
    batch: int
    length: int
    piece: int


CPU = Workload(
    ModelConfig(
        vocab_size=512, width=256, layers=1, heads=4, kv_heads=2, head_dim=64, mlp_width=768
    ),
    examples=512,
    batch=16,
    length=1024,
    piece=2560,
)
ACCELERATOR = Workload(
    dataclasses.replace(QWEN_1P5B, remat=True), examples=512, batch=64, length=1024, piece=16384
)
SMALL = Workload(
    ModelConfig(vocab_size=64, width=32, layers=1, heads=2, kv_heads=2, head_dim=16, mlp_width=64),
    examples=24,
    batch=4,
    length=1024,
    piece=1024,
)


def standard() -> Workload:
    """That of this platform."""
    return CPU if is_cpu() else ACCELERATOR


def gsm8k_like(count: int, vocab_size: int) -> list[Example]:
    """Random tokens in correlated log-normal lengths."""
    rng = np.random.default_rng(0)
    normal = rng.multivariate_normal([0, 0], [[1, CORRELATION], [CORRELATION, 1]], count)
    lengths = [
        np.clip(np.exp(mean + std * normal[:, i]).round().astype(int), low, high)
        for i, (mean, std, low, high) in enumerate((PROMPT, SOLUTION))
    ]
    return [
        Example(*(rng.integers(1, vocab_size, n).astype(np.int32) for n in pair))
        for pair in zip(*lengths)
    ]


def ready(
    model: ModelConfig, layout: Layout, batches: Sequence[SFTBatch], mesh: Mesh
) -> tuple[Callable[[int], float], float]:
    """(an update on batch i, which returns its seconds;
    the loss of the first batch under the starting weights).
    """
    params = jax.jit(
        lambda: init(model, jax.random.key(0)), out_shardings=param_shardings(model, mesh)
    )()
    optimizer = make_optimizer(OptimizerConfig(), params)
    shardings = state_shardings(model, optimizer, mesh)
    state = [params, jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)]
    update = make_update(model, optimizer, layout.pieces, shardings=shardings)
    placed = jax.device_put(list(batches), batch_sharding(mesh))

    def step(i: int) -> dict[str, jax.Array]:
        *state[:], metrics = update(*state, placed[i])
        return metrics

    return (lambda i: clock(lambda: step(i))[1]), float(step(0)["loss"])


def run(work: Workload, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of updates on the same `repeats` batches, packed and padded in turn,
    and how far the first losses are apart.
    """
    examples, mesh = gsm8k_like(work.examples, work.model.vocab_size), make_mesh()
    schedule = Schedule(len(examples), work.batch, seed=0)
    steps = max(repeats, len(examples) // work.batch)  # the layout is that of an epoch
    lengths, shown = [len(e) for e in examples], [schedule.indices(step) for step in range(repeats)]
    kinds: dict[str, dict[str, Any]] = {}
    calls = {}
    for name, packed in (("padded", False), ("packed", True)):
        say(f"compiling: {name}")
        longest = work.length if packed else max(lengths)
        layout = make_layout(
            lengths,
            lambda: map(schedule.indices, range(steps)),
            work.length,
            packed,
            max(1, work.piece // longest),
            1,
        )
        batches = [layout.batch([examples[i] for i in part]) for part in shown]
        calls[name], first_loss = ready(work.model, layout, batches, mesh)
        # Pieces of padded rows have an example in each row; those of packed rows may be empty, and
        # are then not computed.
        use = (
            np.mean([layout.use(batch)["use"] for batch in batches])
            if packed
            else sum(lengths[i] for part in shown for i in part)
            / (repeats * layout.rows * layout.length)
        )
        kinds[name] = {
            "rows": layout.rows,
            "length": layout.length,
            "pieces": layout.pieces,
            "use": float(use),
            "first_loss": first_loss,
            "seconds": [],
        }
    for i in range(repeats):
        for name, call in calls.items():
            kinds[name]["seconds"].append(call(i))
    solutions = [sum(len(examples[i].response) for i in part) for part in shown]
    for kind in kinds.values():
        kind["tokens_per_s"] = float(np.median(np.divide(solutions, kind["seconds"])))
    return {
        "workload": {**dataclasses.asdict(work), "parameters": num_params(work.model)},
        "kinds": kinds,
        "ratio": kinds["packed"]["tokens_per_s"] / kinds["padded"]["tokens_per_s"],
        "losses_apart": abs(kinds["packed"]["first_loss"] - kinds["padded"]["first_loss"]),
    }


def table(numbers: dict[str, Any]) -> str:
    """Shapes, shares and rates."""
    w = numbers["workload"]
    lines = [
        (
            f"updates of {w['batch']} examples as long as GSM8K's, {w['parameters'] / 1e6:,.1f} M "
            f"parameters, {w['model']['dtype']}, about {w['piece']:,} positions a piece"
        ),
        "",
        (
            f"{'':8}{'rows':>6}{'length':>8}{'pieces':>8}{'tokens in positions':>21}"
            f"{'ms an update':>14}{'solution tokens/s':>19}"
        ),
    ]
    for name, k in numbers["kinds"].items():
        lines.append(
            f"{name:8}{k['rows']:6}{k['length']:8}{k['pieces']:8}{k['use']:21.1%}"
            f"{1e3 * np.median(k['seconds']):14,.0f}{k['tokens_per_s']:19,.0f}"
        )
    apart = f"first losses {numbers['losses_apart']:.1e} nats apart"
    return "\n".join([*lines, "", f"packed / padded: {numbers['ratio']:.2f}; {apart}"])


def verdicts(numbers: dict[str, Any]) -> dict[str, bool]:
    """Both must train on the same loss."""
    return {"same loss": numbers["losses_apart"] < 1e-4}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Solution tokens a second."""
    from rl_speed.runtime.plotting import pyplot

    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 1.6), constrained_layout=True)
    bars = axis.barh(list(numbers["kinds"]), [k["tokens_per_s"] for k in numbers["kinds"].values()])
    axis.bar_label(bars, fmt=" {:,.0f}")
    axis.set(xlabel="solution tokens a second")
    figure.savefig(path)
    plt.close(figure)
