"""The embedded task "scratchpad": running totals modulo 10 with every step written out (Nye et al.,
arXiv 2112.00114). Its pass rates follow those of a real data set.

A question is a digit and steps, each a letter, an operator and a digit: "3a+4b~5c^9". A response
has a line for each step, "a3+4=7b7~5=8c8^9=3": its letter, the total so far, operator, digit, "=",
the new total (`chain.TABLES`, modulo 10). "!" removes the line before it, and the line is written
again: "a3+4=9!a3+4=7". The answer is the remaining totals, "783", and a response is correct if all
of them are (`rewards/scratchpad.py`). Each operator is a bijection of the total, so correct steps
never turn a wrong total into a correct one.

A demonstration gets a table entry, (operator, total, digit), wrong with its `error_rate`, and then
writes its `chain.misconception`. With probability `REPAIR` it removes the wrong line and writes it
again. Questions are drawn to have given pass rates (`PASS_RATES`). When the policy learns entries
from questions of medium pass rate, harder questions become solvable.

Every question is a pure function of (split, seed, index). A hash of the text separates training and
held-out questions, as in `chain`.
"""

import bisect
import functools
import hashlib
import math

import numpy as np

from rl_speed.data.chain import (
    SPLITS,
    TABLES,
    ChainQuestion,
    exact_shares,
    generator_of,
    held_out,
    misconception,
    set_order,
)

MIN_STEPS = 4
MAX_STEPS = 12
LABELS = "abcdefghijkl"
EQUALS = "="
BACK = "!"

# Operator -> range of its entries' error rates, which are uniform in it; negative rates become 0.
OPERATORS = {"+": (-0.30, 0.30), "-": (-0.20, 0.50), "~": (0.00, 0.70), "^": (0.10, 0.80)}
REPAIR = 0.06

# (from, below, share): pass rates of Qwen2.5-Math-7B on 29,688 questions of DeepScaleR, published
# by AdaRFT (arXiv 2504.05520), 128 samples each. The first row's lower end is ours.
PASS_RATES = (
    (0.0005, 0.004, 0.2076),
    (0.004, 0.05, 0.1226),
    (0.05, 0.10, 0.0378),
    (0.10, 0.15, 0.0358),
    (0.15, 0.20, 0.0262),
    (0.20, 0.25, 0.0239),
    (0.25, 0.30, 0.0260),
    (0.30, 0.35, 0.0216),
    (0.35, 0.40, 0.0252),
    (0.40, 0.45, 0.0199),
    (0.45, 0.50, 0.0199),
    (0.50, 0.55, 0.0249),
    (0.55, 0.60, 0.0226),
    (0.60, 0.65, 0.0261),
    (0.65, 0.70, 0.0232),
    (0.70, 0.75, 0.0239),
    (0.75, 0.80, 0.0294),
    (0.80, 0.85, 0.0286),
    (0.85, 0.90, 0.0615),
    (0.90, 0.95, 0.0637),
    (0.95, 1.01, 0.1298),
)
# Class -> least pass rate at the start of training. A question is in the
# first class whose rate it reaches.
LEVELS = {"easy": 0.8, "middle": 0.05, "hard": 0.0}

MAX_PROMPT_TOKENS = 1 + 3 * MAX_STEPS + 1
# The longest correct response, with room for one removed line, its "!" and the end token.
MAX_RESPONSE_TOKENS = 6 * MAX_STEPS + 7 + 1

_TRIES = 10_000
# Exponents t for drawing steps (`_drawing`): a larger t prefers entries of lower cost.
_TILTS = np.concatenate([-np.geomspace(8, 0.05, 30), [0.0], np.geomspace(0.05, 60, 50)])
_CHOICES = [(operator, digit) for operator in OPERATORS for digit in range(10)]


@functools.cache
def error_rate(operator: str, total: int, digit: int) -> float:
    """Returns the probability that a demonstration gets an entry wrong, a hash of the entry."""
    low, high = OPERATORS[operator]
    name = f"error{operator}{total}{digit}".encode()
    at = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
    return max(0.0, low + (high - low) * at)


def pass_rate(text: str) -> float:
    """Returns the probability that a demonstration of a question is correct.

    It is the product over the steps of (1 - e) + e REPAIR (1 - e), with the entries' error rates e,
    and also the pass rate of a policy that has learnt the demonstrations.
    """
    total, steps = parse(text)
    rate = 1.0
    for operator, digit in steps:
        rate *= _step_rate(operator, total, digit)
        total = TABLES[operator](total, digit) % 10
    return rate


def parse(text: str) -> tuple[int, list[tuple[str, int]]]:
    """Parses a question into (first total, [(operator, digit), ...]); ValueError for other text."""
    steps = [text[at : at + 3] for at in range(1, len(text), 3)]
    if (
        not text[:1].isdigit()
        or not 0 < len(steps) <= MAX_STEPS
        or any(
            len(step) < 3
            or step[0] != label
            or step[1] not in OPERATORS
            or step[2] not in "0123456789"
            for step, label in zip(steps, LABELS)
        )
    ):
        raise ValueError(
            f"not a question: expected a digit and 1 to {MAX_STEPS} steps such as 'a+4' (operators "
            f"{' '.join(OPERATORS)}, letters in order); got {text!r}"
        )
    return int(text[0]), [(step[1], int(step[2])) for step in steps]


def answer(text: str) -> str:
    """Returns the correct totals of a question, one digit per step."""
    total, steps = parse(text)
    written = []
    for operator, digit in steps:
        total = TABLES[operator](total, digit) % 10
        written.append(str(total))
    return "".join(written)


def level(rate: float) -> str:
    """Returns the class of a question with this pass rate at the start of training."""
    return next(name for name, least in LEVELS.items() if rate >= least)


def question(split: str, seed: int, index: int) -> ChainQuestion:
    """Returns question `index` of an endless split."""
    generator = generator_of(split, seed, index)
    text = _draw(generator, _row(generator), SPLITS[split][1])
    return _question(text, split, seed, index)


def questions(split: str, seed: int, size: int) -> list[ChainQuestion]:
    """Returns `size` distinct questions in random order, with the exact shares of `PASS_RATES`."""
    counts = exact_shares(np.array([share for *_, share in PASS_RATES]), size)
    seen: set[str] = set()
    result = []
    for index, row in enumerate(set_order(split, seed, counts)):
        generator = generator_of(split, seed, index)
        while (text := _draw(generator, row, SPLITS[split][1])) in seen:  # rare
            pass
        seen.add(text)
        result.append(_question(text, split, seed, index))
    return result


def demonstration(seed: int, index: int, split: str = "demo") -> tuple[str, str, bool]:
    """Returns demonstration `index`: (question, response, True, since an end token follows)."""
    generator = generator_of(split, seed, index)
    while True:
        text = _draw(generator, _row(generator), SPLITS[split][1])
        written = _demonstrate(generator, text)
        if len(written) < MAX_RESPONSE_TOKENS:
            return text, written, True


def _row(generator: np.random.Generator) -> int:
    """Draws a row of `PASS_RATES` by its share."""
    shares = np.cumsum([share for *_, share in PASS_RATES])
    return int(np.searchsorted(shares, generator.random() * shares[-1], side="right"))


def _demonstrate(generator: np.random.Generator, text: str) -> str:
    total, steps = parse(text)
    lines = []
    for label, (operator, digit) in zip(LABELS, steps):
        while True:
            right = TABLES[operator](total, digit) % 10
            wrong = generator.random() < error_rate(operator, total, digit)
            new = misconception(operator, total, digit) if wrong else right
            lines.append(f"{label}{total}{operator}{digit}{EQUALS}{new}")
            if not wrong or generator.random() >= REPAIR:
                break
            lines.append(BACK)
        total = new
    return "".join(lines)


def _step_rate(operator: str, total: int, digit: int) -> float:
    right = 1 - error_rate(operator, total, digit)
    return right + (1 - right) * REPAIR * right


@functools.cache
def _drawing() -> tuple[np.ndarray, list[list[list[float]]]]:
    """Returns (mean cost of a step at each tilt, [tilt][total] cumulative probabilities of
    `_CHOICES`).

    A step's cost is the negative logarithm of its rate. Tilt t draws it with probability
    proportional to exp(-t cost).
    """
    cost = -np.log([[_step_rate(o, total, d) for o, d in _CHOICES] for total in range(10)])
    weights = np.exp(-_TILTS[:, None, None] * cost)
    weights /= weights.sum(axis=2, keepdims=True)
    means = (weights * cost).sum(axis=2).mean(axis=1)
    return means, np.cumsum(weights, axis=2).tolist()


def _draw(generator: np.random.Generator, row: int, held: bool) -> str:
    """Draws a question with a pass rate in a row of `PASS_RATES`, held out or not.

    Harder questions are longer: 5 steps at a pass rate of 1 and 10 at 0, up to 2.5 more or fewer.
    """
    low, high, _ = PASS_RATES[row]
    means, cumulative = _drawing()
    for _ in range(_TRIES):
        rate = math.exp(generator.uniform(math.log(low), math.log(min(high, 1.0))))
        steps = round(generator.uniform(-2.5, 2.5) + 5 + 5 * (1 - rate))
        steps = min(max(steps, MIN_STEPS), MAX_STEPS)
        tilt = cumulative[int(np.argmin(np.abs(means + math.log(rate) / steps)))]
        total = int(generator.integers(10))
        text = str(total)
        for label, at in zip(LABELS, generator.random(steps)):
            choice = min(bisect.bisect_right(tilt[total], at), len(_CHOICES) - 1)
            operator, digit = _CHOICES[choice]
            text += f"{label}{operator}{digit}"
            total = TABLES[operator](total, digit) % 10
        if low <= pass_rate(text) < high and held_out(text) == held:
            return text
    raise AssertionError(f"no question has a pass rate in [{low:g}, {high:g})")


def _question(text: str, split: str, seed: int, index: int) -> ChainQuestion:
    name = f"scratchpad-{split}-{seed}-{index}"
    return ChainQuestion(name, text, answer(text), level(pass_rate(text)))
