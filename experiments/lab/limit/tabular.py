"""An embedded task with a policy that is a table: a logit for each entry that it may get right or
wrong, as the demonstrations of the cold start have it.

Its pass rates are exact, a step costs a millisecond, and RLOO with Adam trains it as it trains a
transformer: each sample moves the logits of the entries that it used. Nothing is shared between
entries, so that what a choice of prompts gains here it gains by what the prompts are about, and by
what Adam makes of gradients of any size.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from rl_speed.config import Data
from rl_speed.data import chain, scratchpad
from rl_speed.data.orders import ForecastOrder
from rl_speed.data.prompts import Prompt
from rl_speed.rollout.forecast import Forecast

# Adam's, as in rl_speed/update/optimizer.py.
BETAS, EPS = (0.9, 0.999), 1e-8
# As `data.oracle_every`, `oracle_prompts` and `oracle_samples`.
EVERY, MEASURED, SAMPLES = 10, 1024, 16
# Samples of a group and groups of a step, as config.rule.n and config.driver.groups.
GROUP, GROUPS = 24, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What a task has to be known by heart: for each operator, total and digit the next total.

    Attributes:
      operators: in the order of the entries, 100 each.
      right, wrong: i64[E], by entry the next total, and the misconception in its place.
      error: f64[E], how often it is wrong at the start.
      repair: how often a wrong line is taken back and written anew.
    """

    operators: str
    right: np.ndarray
    wrong: np.ndarray
    error: np.ndarray
    repair: float

    def start(self, least: float = 1e-3) -> np.ndarray:
        """Logits f64[E] of being right, as demonstrated; no error rate below `least`. What is never
        right is so once in a million times, and not learnt.
        """
        error = np.clip(self.error, least, 1 - 1e-6)
        return np.log((1 - error) / error)

    def entry(self, operators, totals, digits):
        """Which entry a step uses."""
        return (operators * 10 + totals) * 10 + digits


@functools.cache
def table(task: str) -> Table:
    """The table of an embedded task. What a class of `chain` rambles about is never right.

    Raises ValueError: there is no such task.
    """
    if task == "scratchpad":
        operators, repair, rate = "".join(scratchpad.OPERATORS), scratchpad.REPAIR, None
    elif task == "chain":
        noise = {
            operator: 1.0 if cls.rambles else cls.noise
            for cls in chain.DEFAULT_SPEC.classes
            for operator in cls.operator
        }
        operators, repair, rate = "".join(noise), 0.0, noise
    else:
        raise ValueError(f"the task {task!r} has no table; chain and scratchpad have one")
    every = [(o, t, d) for o in operators for t in range(10) for d in range(10)]
    return Table(
        operators,
        np.array([chain.TABLES[o](t, d) % 10 for o, t, d in every]),
        np.array([chain.misconception(o, t, d) for o, t, d in every]),
        np.array([rate[o] if rate else scratchpad.error_rate(o, t, d) for o, t, d in every]),
        repair,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """Questions as arrays.

    Attributes:
      table: of their task. texts: str[P].
      first: i64[P], first totals. operators, digits: i64[P, K]. steps: i64[P].
      tokens: f64[P], of a response without a line taken back, its end included.
    """

    table: Table
    texts: np.ndarray
    first: np.ndarray
    operators: np.ndarray
    digits: np.ndarray
    steps: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: np.ndarray) -> "Questions":
        names = [field.name for field in dataclasses.fields(self) if field.name != "table"]
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in names})


def questions_of(task: str, texts: Sequence[str]) -> Questions:
    """Raises ValueError naming a text that is no question of the task, or a task without a
    table.
    """
    known = table(task)
    parsed = [(scratchpad.parse if task == "scratchpad" else _parse_chain)(t) for t in texts]
    size = len(parsed), max(len(steps) for _, steps in parsed)
    operators, digits = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for i, (_, steps) in enumerate(parsed):
        operators[i, : len(steps)] = [known.operators.index(o) for o, _ in steps]
        digits[i, : len(steps)] = [d for _, d in steps]
    first = np.array([total for total, _ in parsed], np.int64)
    steps = np.array([len(steps) for _, steps in parsed], np.int64)
    if task == "scratchpad":
        tokens = 6.0 * steps + 1
    else:  # where it rambles, as long as a response may be
        hopeless = known.error[operators[:, 0] * 100] == 1
        tokens = np.where(hopeless, chain.DEFAULT_SPEC.max_response_tokens, steps + 1.0)
    return Questions(known, np.array(texts), first, operators, digits, steps, tokens)


def _parse_chain(text: str) -> tuple[int, list[tuple[str, int]]]:
    operator, (first, *digits) = chain.digits_of(text)
    return first, [(operator, digit) for digit in digits]


def _error(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(logits))


def pass_rates(logits: np.ndarray, questions: Questions) -> np.ndarray:
    """f64[P], exact: the product over steps of (1 - e) + e REPAIR (1 - e)."""
    error, known = _error(logits), questions.table
    totals, rates = questions.first.copy(), np.ones(len(questions))
    for j in range(questions.operators.shape[1]):
        on = j < questions.steps
        entry = known.entry(questions.operators[:, j], totals, questions.digits[:, j])
        e = error[entry]
        rates = np.where(on, rates * ((1 - e) + e * known.repair * (1 - e)), rates)
        totals = np.where(on, known.right[entry], totals)
    return rates


def sample(
    logits: np.ndarray, questions: Questions, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(right bool[P, n], entries used i64[P, n, K], the score of each use f64[P, n, K]).

    The score is d log(probability) / d logit. After a mistake that stands a response goes on from
    the wrong total; a line that is taken back uses its entry twice.
    """
    error, known = _error(logits), questions.table
    size = (len(questions), n)
    totals = np.repeat(questions.first[:, None], n, 1)
    right = np.ones(size, bool)
    entries = np.zeros((*size, questions.operators.shape[1]), np.int64)
    scores = np.zeros(entries.shape)
    for j in range(entries.shape[2]):
        on = (j < questions.steps)[:, None]
        columns = questions.operators[:, j, None], totals, questions.digits[:, j, None]
        entry = known.entry(*columns)
        e = error[entry]
        wrong = rng.random(size) < e
        again = wrong & (rng.random(size) < known.repair)
        stands = np.where(again, rng.random(size) < e, wrong)
        score = np.where(wrong, e - 1, e) + again * np.where(stands, e - 1, e)
        entries[:, :, j], scores[:, :, j] = entry, np.where(on, score, 0.0)
        right &= ~(stands & on)
        moved = np.where(stands, known.wrong[entry], known.right[entry])
        totals = np.where(on, moved, totals)
    return right, entries, scores


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which prompts are trained on, and with which loss.

    Attributes:
      screen: samples to screen with (SPEED; those of a whole group are DAPO's filter), 0: none.
      power: of worth p^power (1-p). An oracle's; 0: no oracle, prompts as they come. With
        `forecast`, that of its `Forecast`, where 0 is the signal of log p.
      by_tokens: whether worth is a token's.
      forecast: prompts worth most by a forecast that learns from what is drawn (`ForecastOrder`),
        each screened as it says.
      normalise: whether advantages are divided by the group's standard deviation (GRPO, DAPO).
      by_sample: whether the loss is a mean over samples (GRPO), or over tokens.
    """

    screen: int = 0
    power: float = 0.0
    by_tokens: bool = False
    forecast: bool = False
    normalise: bool = False
    by_sample: bool = False


@dataclasses.dataclass(frozen=True)
class Curve:
    """Accuracy f64[T] on the held-out questions after so many steps and sampled tokens, f64[T]."""

    steps: np.ndarray
    tokens: np.ndarray
    accuracy: np.ndarray

    def reaches(self, target: float) -> float | None:
        """Tokens at which the accuracy first crosses the target; None if it does not."""
        above = np.flatnonzero(self.accuracy >= target)
        if not above.size:
            return None
        i = int(above[0])
        if i == 0:
            return float(self.tokens[0])
        at, x = self.accuracy[i - 1 : i + 1], self.tokens[i - 1 : i + 1]
        return float(np.interp(target, at, x))


def train(
    choice: Choice,
    training: Questions,
    held_out: Questions,
    rate: float,
    seed: int,
    steps: int,
    groups: int = GROUPS,
    n: int = GROUP,
    warmup: int = 5,
    until: float = 1.0,
) -> Curve:
    """RLOO, or GRPO's and DAPO's losses, with Adam on the table, one update a step.

    Args:
      rate: Adam's learning rate, after `warmup` steps of a linear rise. groups, n: of a batch.
      until: the held-out accuracy with which it ends, before `steps` if need be.
    """
    rng, logits = np.random.default_rng(seed), training.table.start()
    moments, tokens, found = np.zeros((2, len(logits))), 0.0, []
    stream = (_Forecast if choice.forecast else _Stream)(choice, training, rng, n)
    for step in range(steps + 1):
        found.append((step, tokens, pass_rates(logits, held_out).mean()))
        if found[-1][2] >= until:
            break
        batch = stream.next(logits, step, groups)
        tokens += batch.paid
        rewards = batch.right.astype(float)
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        if choice.normalise:
            advantages = advantages / (rewards.std(axis=1, keepdims=True) + 1e-6)
        length = training.tokens[batch.index][:, None]
        advantages = advantages / (length if choice.by_sample else length.mean()) / rewards.size
        pushed = (batch.scores * advantages[:, :, None]).ravel()
        slope = np.bincount(batch.entries.ravel(), pushed, len(logits))
        powers = np.stack([slope, slope**2])
        decay = np.array(BETAS)[:, None]
        moments = decay * moments + (1 - decay) * powers
        mean, square = moments / (1 - decay ** (step + 1))
        logits = logits + rate * min(1.0, (step + 1) / warmup) * mean / (np.sqrt(square) + EPS)
    return Curve(*map(np.array, zip(*found)))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Groups to train on: prompts i64[G] and, as `sample` has them, right, entries and scores;
    tokens paid for them and for those that were refused.
    """

    index: np.ndarray
    right: np.ndarray
    entries: np.ndarray
    scores: np.ndarray
    paid: float


class _Stream:
    """Prompts in the order of a shuffle, screened or not; or by an oracle's worth."""

    def __init__(self, choice: Choice, training: Questions, rng: np.random.Generator, n: int):
        self._choice, self._training, self._rng, self._n = choice, training, rng, n
        self._order, self._at = rng.permutation(len(training)), 0

    def next(self, logits: np.ndarray, step: int, groups: int) -> Batch:
        """The next batch; a prompt is accepted where its first samples, those of its screening, are
        not all alike.
        """
        self._begin(logits, step)
        parts, missing, paid = [], groups, 0.0
        while missing:
            index, screen = self._candidates(missing)
            drawn = sample(logits, self._training.take(index), self._n, self._rng)
            positive = (drawn[0] & (np.arange(self._n) < screen[:, None])).sum(axis=1)
            kept = (screen == 0) | ((0 < positive) & (positive < screen))
            tokens, count = self._training.tokens[index], np.where(kept, self._n, screen)
            paid += float((count * tokens).sum())
            seen = np.where(kept, drawn[0].sum(axis=1), positive)
            self._learn(index, seen, count, tokens)
            parts.append([x[kept] for x in (index, *drawn)])
            missing -= int(kept.sum())
        return Batch(*map(np.concatenate, zip(*parts)), paid)

    def _begin(self, logits: np.ndarray, step: int) -> None:
        if self._choice.power and step % EVERY == 0:
            pool = self._rng.permutation(len(self._training))[:MEASURED]
            asked = self._training.take(pool)
            rates = self._rng.binomial(SAMPLES, pass_rates(logits, asked)) / SAMPLES
            worth = rates**self._choice.power * (1 - rates)
            if self._choice.by_tokens:
                worth = worth / asked.tokens
            # The pool is in a random order, and the sort keeps it among equals.
            self._order, self._at = pool[np.argsort(-worth, kind="stable")], 0

    def _candidates(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(i64[count] the next prompts, i64[count] samples to screen each with)."""
        index = self._order[np.arange(self._at, self._at + count) % len(self._order)]
        self._at += count
        return index, np.full(count, self._choice.screen)

    def _learn(self, index, positive, total, tokens) -> None:
        """Nothing."""


class _Forecast(_Stream):
    """Prompts in the order of `ForecastOrder`, with its forecast of their pass rates."""

    def __init__(self, choice: Choice, training: Questions, rng: np.random.Generator, n: int):
        super().__init__(choice, training, rng, n)
        d = Data()
        forecast = Forecast(
            _prompts(training),
            n,
            buckets=d.forecast_buckets,
            memory=d.forecast_memory,
            decay=d.memory_decay,
            power=choice.power,
            by_tokens=choice.by_tokens,
        )
        self._forecasts = ForecastOrder(
            len(training), forecast, int(rng.integers(2**31)), d.explore, d.rest
        )
        self._serial, self._nobody = 0, np.zeros(len(training), bool)

    def _begin(self, logits: np.ndarray, step: int) -> None:
        """Nobody measures anything."""

    def _candidates(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        index = self._forecasts.pick(count, self._serial, self._nobody)
        self._serial += len(index)
        screen = self._forecasts.forecast.screening(index)[0]
        return index, np.where(screen == self._n, 0, screen)

    def _learn(self, index, positive, total, tokens) -> None:
        self._forecasts.observe(index, positive.tolist(), total.tolist(), tokens.tolist())


def _prompts(questions: Questions) -> list[Prompt]:
    """Questions as tokens, one a character."""
    tokens = lambda text: np.array([ord(c) for c in text], np.int32)
    none = np.zeros(0, np.int32)
    return [Prompt(str(i), tokens(q), "", none, "") for i, q in enumerate(questions.texts.tolist())]


def fit_rate(
    measured: Sequence[tuple[np.ndarray, np.ndarray]],
    training: Questions,
    held_out: Questions,
    rates: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2),
) -> tuple[float, float]:
    """(the rate with which plain RLOO on the table is nearest to the measured curves, root mean
    square of what is left between the mean curve and theirs).

    Args:
      measured: of each run of plain RLOO, (optimizer steps, accuracy).
      rates: to choose from.
    """
    steps = int(max(at.max() for at, _ in measured))
    found = []
    for rate in rates:
        curves = [train(Choice(), training, held_out, rate, seed, steps) for seed in seeds]
        mean = np.mean([c.accuracy for c in curves], axis=0)
        left = np.concatenate([np.interp(at, np.arange(steps + 1), mean) - y for at, y in measured])
        found.append(float(np.sqrt(np.mean(left**2))))
    best = int(np.argmin(found))
    return float(rates[best]), found[best]
