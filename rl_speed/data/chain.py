"""The embedded task: running totals modulo 10, with a real frontier of difficulty.

A question is an operator and digits, padded with dots to the longest question's width, "+3459....".
Its answer is every running total after the first digit: "721" (3+4=7, 7+5=2, 2+9=1, all modulo 10).
Because of the dots, the digit that a step needs is always at the same distance. An operator is a
table digit x digit -> digit that the policy has to memorize.

The policy's knowledge comes from the demonstrations of the cold start. A step of these is wrong
with the probability `noise` of the question's class: it writes the table entry's *misconception*,
one fixed wrong digit, and the chain continues from that digit. So a policy that has learnt the
demonstrations gets each step correct with probability 1 - noise, and a question of n numbers with
probability (1 - noise)^(n-1). A class that `rambles` stays unsolvable: its demonstrations are
random digits without an end. This room's README.md says why the classes are as they are.

Every question is a pure function of (spec, split, seed, index). A hash of the text separates the
training side ("train", "demo") from the held-out side ("eval", "demo_eval") for any seed, size or
class. "demo" and "demo_eval" are demonstrations to train and to measure the cold start with.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from rl_speed.data.prompts import Prompt

# Tables of one step, (total so far, next number) -> new total, before "modulo 10".
TABLES: dict[str, Callable[[int, int], int]] = {
    ">": lambda total, number: number,
    "+": lambda total, number: total + number,
    "-": lambda total, number: total - number,
    "*": lambda total, number: total * number,
    "~": lambda total, number: number - total,
    "^": lambda total, number: 3 * total + number,
}

FILL = "."

# Split -> (seed of its generator, whether its questions are on the held-out side of the hash).
SPLITS = {"train": (0, False), "eval": (1, True), "demo": (2, False), "demo_eval": (3, True)}
EVAL_SHARE = 8  # one question in this many is held out


@dataclasses.dataclass(frozen=True)
class ChainClass:
    """Questions of one difficulty.

    Attributes:
      name: label for tables and plots.
      operator: a key of `TABLES`, or several, "-~", of which each question takes one at random.
      min_numbers, max_numbers: number of digits of a question, uniform, both ends included.
      weight: share of the prompts, relative to the other classes.
      noise: probability that a step of a demonstration is wrong, in [0, 1).
      demonstrated: share of the demonstrations, relative to the other classes; 0: none.
      rambles: if positive, a demonstration is this many random digits without an end.
    """

    name: str
    operator: str
    min_numbers: int
    max_numbers: int
    weight: float
    noise: float = 0.0
    demonstrated: float = 1.0
    rambles: int = 0


@dataclasses.dataclass(frozen=True)
class ChainSpec:
    """A mixture of classes of questions."""

    classes: tuple[ChainClass, ...]

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt, "{question}=", one token per character."""
        return self.width + 2

    @property
    def width(self) -> int:
        """Digits of the longest question; shorter ones are padded with dots."""
        return max(c.max_numbers for c in self.classes)

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest correct answer with its end token, or of the longest rambling."""
        return max(max(c.max_numbers, c.rambles) for c in self.classes)


@dataclasses.dataclass(frozen=True)
class ChainQuestion:
    """A question with its correct answer."""

    id: str
    text: str
    answer: str
    class_name: str


# The mixture of the shipped policy; experiments/pass_rates.py measures its pass-rate histogram.
DEFAULT_SPEC = ChainSpec(
    (
        ChainClass("easy", ">", 3, 6, weight=0.30, demonstrated=0.5),
        ChainClass("middle", "+-~^", 2, 3, weight=0.20, noise=0.5),
        ChainClass("long", "+-~^", 5, 7, weight=0.07, noise=0.5),
        ChainClass("beyond", "*", 5, 8, weight=0.43, demonstrated=0.15, rambles=16),
    )
)


def misconception(operator: str, total: int, digit: int) -> int:
    """The wrong digit that demonstrations write for a table entry, always the same."""
    shift = 1 + hashlib.blake2b(f"{operator}{total}{digit}".encode(), digest_size=8).digest()[0] % 9
    return (TABLES[operator](total, digit) + shift) % 10


def digits_of(text: str) -> tuple[str, list[int]]:
    """(operator, digits) of a question; raises ValueError for other text."""
    operator = text[:1]
    digits = text[1:].rstrip(FILL)
    if operator not in TABLES or len(digits) < 2 or not set(digits) <= set("0123456789"):
        raise ValueError(
            f"not a question, an operator of {' '.join(TABLES)}, digits, then dots: {text!r}"
        )
    return operator, [int(digit) for digit in digits]


def answer(text: str) -> str:
    """The correct answer to a question; raises ValueError for other text."""
    operator, (total, *rest) = digits_of(text)
    written = []
    for digit in rest:
        total = TABLES[operator](total, digit) % 10
        written.append(str(total))
    return "".join(written)


def held_out(text: str) -> bool:
    """Whether a question is on the held-out side, by a hash of its text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0


def question(spec: ChainSpec, split: str, seed: int, index: int) -> ChainQuestion:
    """Question `index` of an endless split: its class by weight, its length and digits uniform."""
    generator = generator_of(split, seed, index)
    row = _pick(generator, [c.weight for c in spec.classes])
    return _question(generator, spec, row, split, seed, index)


def questions(spec: ChainSpec, split: str, seed: int, size: int) -> list[ChainQuestion]:
    """A finite set of `size` distinct questions in mixed order. Classes have their exact shares, to
    one question: with random shares the accuracy on two sets would differ by several points.

    Raises:
      ValueError: the classes have too few distinct questions.
    """
    counts = exact_shares(np.array([c.weight for c in spec.classes], np.float64), size)
    seen: set[str] = set()
    result = []
    for index, row in enumerate(set_order(split, seed, counts)):
        generator = generator_of(split, seed, index)
        for _ in range(1000):
            item = _question(generator, spec, row, split, seed, index)
            if item.text not in seen:
                break
        else:
            raise ValueError(
                f"chain class {spec.classes[row].name!r} has too few distinct questions for its "
                f"share of a {split} set of {size}: raise max_numbers or ask for fewer"
            )
        seen.add(item.text)
        result.append(item)
    return result


def demonstration(
    spec: ChainSpec, seed: int, index: int, split: str = "demo"
) -> tuple[str, str, bool]:
    """Demonstration `index`: a question, the written response with the class's noise, and whether
    an end token follows.

    Split "demo" shares the training side of the questions; "demo_eval" is held out.
    """
    generator = generator_of(split, seed, index)
    cls = spec.classes[_pick(generator, [c.demonstrated for c in spec.classes])]
    text = _text(generator, cls, spec.width, held=SPLITS[split][1])
    if cls.rambles:
        return text, "".join(map(str, generator.integers(0, 10, cls.rambles))), False
    _, (total, *rest) = digits_of(text)
    written = []
    wrong = generator.random(len(rest)) < cls.noise
    for mistaken, digit in zip(wrong, rest):
        entry = (text[0], total, digit)
        total = misconception(*entry) if mistaken else TABLES[text[0]](total, digit) % 10
        written.append(str(total))
    return text, "".join(written), True


def to_prompt(
    item: ChainQuestion,
    encode: Callable[[str], list[int]],
    encode_answer: Callable[[str], list[int]],
) -> Prompt:
    """The question as a prompt; `encode` applies the template, `encode_answer` does not."""
    return Prompt(
        id=item.id,
        text=item.text,
        answer=item.answer,
        tokens=np.asarray(encode(item.text), np.int32),
        answer_tokens=np.asarray(encode_answer(item.answer), np.int32),
        meta={"class": item.class_name},
    )


def _seed(split: str) -> int:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {' '.join(SPLITS)}, got {split!r}")
    return SPLITS[split][0]


def generator_of(split: str, seed: int, index: int) -> np.random.Generator:
    """The random generator of question or demonstration `index`."""
    return np.random.default_rng([_seed(split), seed, index, 1])


def set_order(split: str, seed: int, counts: np.ndarray) -> np.ndarray:
    """The rows of a finite set, `counts[row]` times each, in mixed order."""
    order = np.random.default_rng([_seed(split), seed])
    return order.permutation(np.repeat(np.arange(len(counts)), counts))


def exact_shares(weights: np.ndarray, size: int) -> np.ndarray:
    """Counts that sum to `size`, in proportion to weights [K], each to within one: int[K]."""
    exact = weights / weights.sum() * size
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1
    return counts


def _pick(generator: np.random.Generator, weights: list[float]) -> int:
    total = np.cumsum(weights)
    return int(np.searchsorted(total, generator.random() * total[-1], side="right"))


def _question(
    generator: np.random.Generator, spec: ChainSpec, row: int, split: str, seed: int, index: int
) -> ChainQuestion:
    cls = spec.classes[row]
    text = _text(generator, cls, spec.width, held=SPLITS[split][1])
    return ChainQuestion(f"chain-{split}-{seed}-{index}", text, answer(text), cls.name)


def _text(generator: np.random.Generator, cls: ChainClass, width: int, held: bool) -> str:
    numbers = int(generator.integers(cls.min_numbers, cls.max_numbers + 1))
    operator = cls.operator
    if len(operator) > 1:
        operator = operator[generator.integers(len(operator))]
    while True:  # ends: either side of the hash has questions of every length (tested)
        digits = "".join(map(str, generator.integers(0, 10, numbers)))
        text = (operator + digits).ljust(1 + width, FILL)
        if held_out(text) == held:
            return text
