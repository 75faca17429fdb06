"""What an order of prompts is worth: the real stream and order, SPEED's screening on known pass
rates that drift, no policy.

Training is at a place of its pass-rate curves f64[P, E] that depends on the groups trained on so
far, not on the prompts looked at: curve epoch e lasts as many groups as one shuffled pass over the
data would accept in it. Every order is so compared over the same training, at the same pass rates;
what is left out is that another choice of prompts may train another policy.

Prompts leave the stream in calls of a fixed number. Those that are rejected are observed after
their call, accepted ones a call later, as with pre-fetch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_speed.data.orders import MemoryOrder
from rl_speed.data.prompts import Prompt, PromptStream
from rl_speed.rollout.acceptance import Acceptance, qualifying
from rl_speed.rollout.counted import BetaEma
from rl_speed.sampling import Speed


@dataclasses.dataclass(frozen=True)
class Memory:
    """Settings of `MemoryOrder`; `prior` and `decay` of `memory.BetaEma`.

    The defaults are those of training (tested).
    """

    explore: float = 0.05
    max_unseen: float = 4.0
    rest: float = 0.5
    decay: float = 0.9
    prior: tuple[float, float] = (0.5, 0.5)

    @property
    def label(self) -> str:
        """What differs from the defaults."""
        changed = [
            f"{f.name} {getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(changed) or "default"

    def order(self, ids: Sequence[str], rule: Speed, seed: int) -> MemoryOrder:
        """The order itself."""
        acceptance = Acceptance(rule, BetaEma(*self.prior, self.decay))
        return MemoryOrder(ids, acceptance, seed, self.explore, self.max_unseen, self.rest)


@dataclasses.dataclass(frozen=True)
class Course:
    """One training course.

    Per curve epoch, i64[E]: groups accepted, prompts screened; f64[E]: `information`, the sum of
    (N-1) s^2 over groups (as in `simulate`); `tokens`, of all samples (samples, where no lengths
    are given). Over all of it: `unseen`, most visits that any prompt went unseen, in epochs (visits
    / P); `prompts`, the effective number of prompts trained on, (sum g)^2 / sum g^2 of the
    groups g of each.
    """

    groups: np.ndarray
    screened: np.ndarray
    information: np.ndarray
    unseen: float
    prompts: float
    tokens: np.ndarray


# One setting changed at a time.
SWEEP = tuple(
    Memory(**{name: value})
    for name, values in (
        ("explore", (0.0, 0.2)),
        ("max_unseen", (1.5, 2.0, 8.0)),
        ("rest", (0.0, 0.25, 0.75)),
        ("decay", (0.7, 1.0)),
        ("prior", ((1.0, 16.0),)),
    )
    for value in values
)


def follow(
    curves: np.ndarray,
    rule: Speed,
    memory: Memory | None = None,
    seed: int = 0,
    call: int = 64,
    ends: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> Course:
    """Trains through all curve epochs, f64[P, E], with a shuffle (`memory` None) or with memory;
    `call` prompts leave at a time.

    Args:
      ends: f64[E], groups trained on by the end of each curve epoch, where that is known; else see
        the module.
      lengths: f64[P, E], mean tokens of a sample.

    Raises ValueError: so few prompts that all of them are out.
    """
    size, epochs = curves.shape
    ends = np.cumsum(qualifying(rule)(curves).sum(axis=0)) if ends is None else ends
    lengths = np.ones_like(curves) if lengths is None else lengths
    ids = [str(i) for i in range(size)]
    nothing = np.zeros(0, np.int32)
    data = [Prompt(name, nothing, "", nothing, "") for name in ids]
    stream = PromptStream(data, seed, order=memory and memory.order(ids, rule, seed))
    rng = np.random.default_rng([seed, 1])
    groups, screened = np.zeros(epochs, np.int64), np.zeros(epochs, np.int64)
    information, tokens = np.zeros(epochs), np.zeros(epochs)
    last, unseen, of_prompt = np.full(size, -1), 0, np.zeros(size, np.int64)
    (low, high), n, done = rule.accepted_counts, rule.max_samples, 0
    waiting = ([], nothing)
    while (epoch := int(np.searchsorted(ends, done, side="right"))) < epochs:
        if not (prompts := stream.take(call)):
            raise ValueError(
                f"all {size} prompts are out at once: {call} leave at a time, and with memory none "
                "is out twice; give pass rates of more prompts"
            )
        index, visits = (np.array(x) for x in zip(*((int(p.id), p.visit) for p in prompts)))
        unseen = max(unseen, int((visits - last[index]).max()) - 1)
        last[index] = visits
        right = rng.binomial(rule.n_init, curves[index, epoch])
        passed = (low <= right) & (right <= high)
        total = right + passed * rng.binomial(rule.n_cont, curves[index, epoch])
        stream.observe(waiting[0], waiting[1], [n] * len(waiting[0]))
        failed = np.flatnonzero(~passed)
        stream.observe([prompts[i] for i in failed], right[failed], [rule.n_init] * len(failed))
        waiting = [prompts[i] for i in np.flatnonzero(passed)], total[passed]
        done += int(passed.sum())
        groups[epoch] += passed.sum()
        screened[epoch] += len(prompts)
        information[epoch] += (total * (n - total) / n)[passed].sum()
        tokens[epoch] += (lengths[index, epoch] * (rule.n_init + rule.n_cont * passed)).sum()
        np.add.at(of_prompt, index[passed], 1)
    unseen = max(unseen, int((stream.state_dict()["serial"] - last).max()) - 1)
    return Course(
        groups,
        screened,
        information,
        unseen / size,
        float(of_prompt.sum() ** 2 / (of_prompt**2).sum()),
        tokens,
    )


def summary(courses: Sequence[Course], rule: Speed) -> dict[str, Any]:
    """Means over repeats, and standard errors under the same name with "_error" where it matters.

    samples, screening: samples drawn, and of those screening ones, per group; accepted: of the
    prompts screened; signal: information per sample; unseen: the most of any repeat; prompts;
    by_epoch: samples per group in each curve epoch.
    """
    groups, screened = (
        np.array([getattr(c, name) for c in courses]) for name in ("groups", "screened")
    )
    screening = rule.n_init * screened.sum(1) / groups.sum(1)
    samples = screening + rule.n_cont
    error = lambda x: float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        by_epoch = rule.n_init * screened.sum(0) / groups.sum(0) + rule.n_cont
    signal = np.array([c.information.sum() for c in courses]) / (samples * groups.sum(1))
    return {
        "samples": float(samples.mean()),
        "samples_error": error(samples),
        "screening": float(screening.mean()),
        "screening_error": error(screening),
        "accepted": float((groups.sum(1) / screened.sum(1)).mean()),
        "signal": float(signal.mean()),
        "unseen": max(c.unseen for c in courses),
        "prompts": float(np.mean([c.prompts for c in courses])),
        "by_epoch": by_epoch.tolist(),
    }


def compare(
    curves: np.ndarray,
    rule: Speed,
    settings: Sequence[Memory],
    repeats: int = 3,
    call: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """{"shuffle": a `summary`, "memory": [for each of the settings, a `summary` with what it gains
    on the shuffle]}.

    Gains: `ratio` of samples per group, shuffle over memory, and its standard error over repeats
    (`ratio_error`); so too `screening_ratio`; `signal_ratio`, of signal per sample, memory over
    shuffle; `prompts_ratio`, likewise.

    Raises: ValueError for repeats below 2, which have no error.
    """
    if repeats < 2:
        raise ValueError(f"repeats must be at least 2, got {repeats}")
    run = lambda memory: [follow(curves, rule, memory, seed + r, call) for r in range(repeats)]
    base = summary(run(None), rule)
    rows = []
    for memory in settings:
        row = {
            "label": memory.label,
            "settings": dataclasses.asdict(memory),
            **summary(run(memory), rule),
        }
        for name, ratio in (("samples", "ratio"), ("screening", "screening_ratio")):
            row[ratio] = base[name] / row[name]
            # The two are independent: relative errors add in squares.
            relative = np.hypot(
                base[f"{name}_error"] / base[name], row[f"{name}_error"] / row[name]
            )
            row[f"{ratio}_error"] = row[ratio] * float(relative)
        rows.append(
            row | {name + "_ratio": row[name] / base[name] for name in ("signal", "prompts")}
        )
    return {"shuffle": base, "memory": rows}


def survey_orders(
    sources: Mapping[str, np.ndarray],
    n: int = 24,
    n_inits: Sequence[int] = (4, 6, 8),
    seed: int = 0,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """`compare` on every source {name: curves f64[P, E]} for every n_init,
    with the default settings; with `SWEEP` too on the first source at the n_init in the middle.

    Returns: dicts with source, n_init, prompts, epochs, and what `compare` returns.
    """
    found = []
    for name, curves in sources.items():
        for n_init in n_inits:
            sweep = SWEEP if len(found) == len(n_inits) // 2 else ()
            found.append(
                {
                    "source": name,
                    "n_init": n_init,
                    "prompts": len(curves),
                    "epochs": curves.shape[1],
                    **compare(
                        curves, Speed(n_init, n - n_init), (Memory(), *sweep), repeats, seed=seed
                    ),
                }
            )
    return found
