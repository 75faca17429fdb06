"""Supervised updates on packed rows against the same examples padded, one a row: solution tokens a second.

Examples have the lengths of GSM8K's training rows as a chat, in Qwen2.5's tokens; what they say makes no difference to the time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rl_speed.benchmark.decode import QWEN_1P5B
from rl_speed.benchmark.machine import is_cpu
from rl_speed.benchmark.step import clock
from rl_speed.mesh import batch_sharding, make_mesh
from rl_speed.policy import ModelConfig, init, num_params, param_shardings
from rl_speed.training.optimizer import OptimizerConfig, make_optimizer
from rl_speed.training.sft import make_update
from rl_speed.training.sft_data import Example, Layout, Schedule, SFTBatch, make_layout
from rl_speed.training.state import TrainState, state_shardings

# Mean and standard deviation of the logarithm, and the extremes, of prompt and solution lengths in 7,473 rows; their correlation.
PROMPT, SOLUTION, CORRELATION = (4.458, 0.228, 41, 241), (4.722, 0.420, 30, 454), 0.547


@dataclasses.dataclass(frozen=True)
class Workload:
    """`examples` in batches of `batch`, rows of `length` tokens, about `piece` positions at a time."""

    model: ModelConfig
    examples: int
    batch: int
    length: int
    piece: int


CPU = Workload(ModelConfig(vocab_size=2048, width=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp_width=384), examples=512,
               batch=32, length=1024, piece=4096)
ACCELERATOR = Workload(dataclasses.replace(QWEN_1P5B, remat=True), examples=512, batch=64, length=1024, piece=16384)
SMALL = Workload(ModelConfig(vocab_size=64, width=32, layers=1, heads=2, kv_heads=2, head_dim=16, mlp_width=64), examples=24,
                 batch=4, length=1024, piece=1024)


def standard() -> Workload:
    """That of this platform."""
    return CPU if is_cpu() else ACCELERATOR


def gsm8k_like(count: int, vocab_size: int) -> list[Example]:
    """Random tokens in correlated log-normal lengths."""
    rng = np.random.default_rng(0)
    normal = rng.multivariate_normal([0, 0], [[1, CORRELATION], [CORRELATION, 1]], count)
    lengths = [np.clip(np.exp(mean + std * normal[:, i]).round().astype(int), low, high)
               for i, (mean, std, low, high) in enumerate((PROMPT, SOLUTION))]
    return [Example(*(rng.integers(1, vocab_size, n).astype(np.int32) for n in pair)) for pair in zip(*lengths)]


def timed(model: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState, make: Callable[[], Any], layout: Layout,
          batches: Sequence[SFTBatch], mesh: Mesh) -> tuple[float, list[float]]:
    """(loss of the first batch under the weights that `make` gives, seconds of an update on each batch)."""
    params = make()
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    update = make_update(model, optimizer, layout.pieces, shardings=shardings)
    batches = jax.device_put(list(batches), batch_sharding(mesh))
    params, opt_state, metrics = update(params, opt_state, batches[0])  # compiles
    first_loss, seconds = float(metrics["loss"]), []
    for batch in batches:
        (params, opt_state, _), took = clock(lambda batch=batch: update(params, opt_state, batch))
        seconds.append(took)
    return first_loss, seconds


def run(work: Workload, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of the updates of the same `repeats` batches, packed and padded in turn, and how far the first losses are apart."""
    examples, mesh = gsm8k_like(work.examples, work.model.vocab_size), make_mesh()
    schedule = Schedule(len(examples), work.batch, seed=0)
    steps = max(repeats, len(examples) // work.batch)  # the layout is that of an epoch
    lengths = [len(e) for e in examples]
    make = jax.jit(lambda: init(work.model, jax.random.key(0)), out_shardings=param_shardings(work.model, mesh))
    optimizer = make_optimizer(OptimizerConfig(), jax.eval_shape(make))
    shardings = state_shardings(work.model, optimizer, mesh)
    kinds: dict[str, Any] = {}
    for name, packed in (("padded", False), ("packed", True)):
        say(f"compiling: {name}")
        longest = work.length if packed else max(lengths)
        layout = make_layout(lengths, lambda: schedule.all_indices(steps), work.length, packed, max(1, work.piece // longest), 1)
        batches = [layout.batch([examples[i] for i in schedule.indices(step)]) for step in range(repeats)]
        first_loss, seconds = timed(work.model, optimizer, shardings, make, layout, batches, mesh)
        # Pieces of padded rows have an example in each row; those of packed rows may be empty, and are then not computed.
        held = sum(lengths[i] for step in range(repeats) for i in schedule.indices(step))
        use = (np.mean([layout.use(batch)["use"] for batch in batches]) if packed
               else held / (repeats * layout.rows * layout.length))
        kinds[name] = {"rows": layout.rows, "length": layout.length, "pieces": layout.pieces, "use": float(use),
                       "first_loss": first_loss, "seconds": seconds,
                       "tokens_per_s": int(sum(batch.mask.sum() for batch in batches)) / sum(seconds)}
    return {"workload": {**dataclasses.asdict(work), "parameters": num_params(work.model)}, "kinds": kinds,
            "ratio": kinds["packed"]["tokens_per_s"] / kinds["padded"]["tokens_per_s"],
            "losses_apart": abs(kinds["packed"]["first_loss"] - kinds["padded"]["first_loss"])}


def table(numbers: dict[str, Any]) -> str:
    """Shapes, shares and rates."""
    w = numbers["workload"]
    lines = [f"updates of {w['batch']} examples as long as GSM8K's, {w['parameters'] / 1e6:,.1f} M parameters, "
             f"{w['model']['dtype']}, about {w['piece']:,} positions a piece", "",
             f"{'':8}{'rows':>6}{'length':>8}{'pieces':>8}{'tokens in positions':>21}{'ms an update':>14}{'solution tokens/s':>19}"]
    for name, k in numbers["kinds"].items():
        lines.append(f"{name:8}{k['rows']:6}{k['length']:8}{k['pieces']:8}{k['use']:21.1%}{1e3 * np.median(k['seconds']):14,.0f}"
                     f"{k['tokens_per_s']:19,.0f}")
    apart = f"first losses {numbers['losses_apart']:.1e} nats apart"
    return "\n".join([*lines, "", f"packed / padded: {numbers['ratio']:.2f}; {apart}"])


def verdicts(numbers: dict[str, Any]) -> dict[str, bool]:
    """Both must train on the same loss."""
    return {"same loss": numbers["losses_apart"] < 1e-4}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Solution tokens a second."""
    from rl_speed.training.plots import pyplot

    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 1.6), constrained_layout=True)
    bars = axis.barh(list(numbers["kinds"]), [k["tokens_per_s"] for k in numbers["kinds"].values()])
    axis.bar_label(bars, fmt=" {:,.0f}")
    axis.set(xlabel="solution tokens a second")
    figure.savefig(path)
    plt.close(figure)
