"""The chain task: right answers, honest noise, disjoint splits, determinism."""

import numpy as np
import pytest

from rl_speed.data import chain
from rl_speed.data.chain import ChainClass, ChainSpec
from rl_speed.data.embedded_tokenizer import TEMPLATE
from rl_speed.data.tasks import TASKS

SPEC = ChainSpec(
    (
        ChainClass("easy", "+", 3, 5, weight=2),
        ChainClass("noisy", "-", 4, 6, weight=1, noise=0.3),
        ChainClass("never", "*", 4, 5, weight=1, demonstrated=0),
    )
)


def independent_answer(text):
    """Recomputes every total from the first number on: Python's own arithmetic,
    or the closed form of a linear table.
    """
    operator = text[0]
    numbers = [int(n) for n in text[1:].strip(".")]
    if operator in "+-*":
        expressions = [
            "(" * i
            + operator.join(f"{n}" + (")" if j else "") for j, n in enumerate(numbers[: i + 1]))
            for i in range(1, len(numbers))
        ]
        return "".join(str(eval(e) % 10) for e in expressions)
    # Linear tables: closed form, total_i = sum_j coefficient_j * number_j.
    a, b = {"~": (-1, 1), "^": (3, 1), ">": (0, 1)}[operator]
    return "".join(
        str((a**i * numbers[0] + sum(a ** (i - j) * b * numbers[j] for j in range(1, i + 1))) % 10)
        for i in range(1, len(numbers))
    )


@pytest.mark.parametrize("operator", sorted(chain.TABLES))
def test_answers_agree_with_an_independent_evaluator(operator):
    spec = ChainSpec((ChainClass("c", operator, 2, 9, weight=1),))
    for i in range(100):
        item = chain.question(spec, "train", 0, i)
        assert item.answer == independent_answer(item.text), item.text


def test_known_answer_and_text_that_is_no_question():
    assert chain.answer("+3459") == chain.answer("+3459....") == "721"
    for text in ("", "+", "+3", "+3...", "3459", "+3a", "+3.4", "+-34"):
        with pytest.raises(ValueError, match="not a question"):
            chain.answer(text)


def test_questions_of_one_mixture_have_one_width():
    assert {len(chain.question(SPEC, "train", 0, i).text) for i in range(50)} == {1 + SPEC.width}


def test_a_class_with_several_operators_takes_each_of_them():
    spec = ChainSpec((ChainClass("many", "-~^>", 3, 5, weight=1, noise=0.2),))
    texts = [chain.question(spec, "train", 0, i).text for i in range(400)]
    shares = {op: sum(t[0] == op for t in texts) / len(texts) for op in "-~^>"}
    assert all(abs(share - 0.25) < 0.08 for share in shares.values()), shares
    for i in range(200):  # a demonstration's steps follow the operator of its own question
        text, written, _ = chain.demonstration(
            ChainSpec((ChainClass("c", "-~^>", 3, 5, weight=1),)), 0, i
        )
        assert written == independent_answer(text)


def test_same_seed_same_questions_other_seed_others():
    def draw(seed):
        return [chain.question(SPEC, "train", seed, i).text for i in range(30)]

    assert draw(1) == draw(1) != draw(2)
    assert chain.questions(SPEC, "eval", 3, 40) == chain.questions(SPEC, "eval", 3, 40)
    assert chain.demonstration(SPEC, 5, 7) == chain.demonstration(SPEC, 5, 7)


def test_held_out_questions_meet_neither_training_nor_demonstrations():
    held = {q.text for seed in range(3) for q in chain.questions(SPEC, "eval", seed, 200)}
    train = {chain.question(SPEC, "train", seed, i).text for seed in range(3) for i in range(1000)}
    demos = {chain.demonstration(SPEC, seed, i)[0] for seed in range(3) for i in range(1000)}
    held_demos = {
        chain.demonstration(SPEC, seed, i, "demo_eval")[0] for seed in range(3) for i in range(1000)
    }
    assert not held & train and not held & demos
    assert (
        not held_demos & train
        and not held_demos & demos
        and all(map(chain.held_out, held_demos | held))
    )


def test_the_splits_draw_different_questions_and_unknown_ones_are_named():
    firsts = {
        split: [chain.question(SPEC, split, 0, i).text for i in range(20)] for split in chain.SPLITS
    }
    assert len({tuple(texts) for texts in firsts.values()}) == len(chain.SPLITS)
    for draw in (chain.question, lambda *a: chain.demonstration(a[0], a[2], a[3], a[1])):
        with pytest.raises(
            ValueError, match="split must be one of train eval demo demo_eval, got 'test'"
        ):
            draw(SPEC, "test", 0, 0)


def test_digits_of_reads_back_operator_and_digits():
    assert chain.digits_of("-3459....") == ("-", [3, 4, 5, 9]) and chain.digits_of("*07") == (
        "*",
        [0, 7],
    )
    for i in range(50):
        text = chain.question(SPEC, "train", 1, i).text
        operator, digits = chain.digits_of(text)
        assert text == (operator + "".join(map(str, digits))).ljust(1 + SPEC.width, chain.FILL)


def test_finite_sets_are_distinct_and_have_exact_shares():
    items = chain.questions(SPEC, "eval", 0, 102)
    assert len({q.text for q in items}) == len({q.id for q in items}) == 102
    shares = [sum(q.class_name == name for q in items) for name in ("easy", "noisy", "never")]
    assert shares[0] == 51 and sorted(shares[1:]) == [25, 26]
    first_half = {q.class_name for q in items[:20]}
    assert first_half == {"easy", "noisy", "never"}  # mixed, not sorted by class


def test_a_class_too_small_for_its_share_is_named():
    with pytest.raises(ValueError, match="'tiny' has too few"):
        chain.questions(ChainSpec((ChainClass("tiny", "+", 2, 2, weight=1),)), "eval", 0, 90)


def test_both_sides_of_the_split_hold_questions_of_every_shortest_form():
    for operator in chain.TABLES:
        sides = [chain.held_out(f"{operator}{a}{b}..") for a in range(10) for b in range(10)]
        assert 0 < sum(sides) < len(sides) / 2


def test_noise_is_per_step_always_the_same_wrong_digit_and_continues_from_what_was_written():
    noise = 0.3
    right = 0
    steps = 0
    wholly_right = 0
    demos = 4000
    wrong = {}
    spec = ChainSpec((ChainClass("noisy", "-", 5, 5, weight=1, noise=noise),))
    for i in range(demos):
        text, written, ends = chain.demonstration(spec, 0, i)
        assert ends
        before, *numbers = (int(c) for c in text[1:].strip("."))
        for digit, number in zip(written, numbers, strict=True):
            if int(digit) == (before - number) % 10:
                right += 1
            else:
                wrong.setdefault((before, number), set()).add(int(digit))
            before = int(digit)
            steps = steps + 1
        wholly_right += written == chain.answer(text)
    assert abs(right / steps - (1 - noise)) < 0.015
    assert abs(wholly_right / demos - (1 - noise) ** 4) < 0.03
    assert len(wrong) == 100 and all(len(digits) == 1 for digits in wrong.values())
    # The misconceptions follow no pattern that could be unlearnt as a whole.
    shifts = np.bincount([(min(d) - (a - b)) % 10 for (a, b), d in wrong.items()], minlength=10)
    assert shifts[0] == 0 and shifts[1:].min() > 2 and shifts.max() < 25


def test_classes_without_noise_are_clean_and_undemonstrated_ones_absent():
    demos = [chain.demonstration(SPEC, 0, i) for i in range(500)]
    assert all(written == chain.answer(text) for text, written, _ in demos if "+" in text)
    assert not any("*" in text for text, *_ in demos) and any("-" in text for text, *_ in demos)


def test_rambling_fills_its_length_without_an_end():
    spec = ChainSpec(
        (
            ChainClass("short", "+", 3, 4, weight=1),
            ChainClass("far", "*", 3, 4, weight=1, rambles=9),
        )
    )
    assert spec.max_response_tokens == 9
    demos = [chain.demonstration(spec, 0, i) for i in range(400)]
    far = [(text, written) for text, written, ends in demos if not ends]
    assert {text[0] for text, _ in far} == {"*"} and 150 < len(far) < 250
    assert all(len(written) == 9 and set(written) <= set("0123456789") for _, written in far)
    counts = np.bincount([int(c) for _, written in far for c in written], minlength=10)
    assert counts.min() > 0.7 * counts.mean()
    assert all(
        ends and written == chain.answer(text) for text, written, ends in demos if text[0] == "+"
    )


def test_prompts_fit_the_stated_lengths_and_carry_the_answer():
    tokenizer = TASKS["chain"].build_tokenizer()

    def bare(text):
        return tokenizer(text).input_ids

    prompts = [
        chain.to_prompt(item, lambda q: bare(TEMPLATE.format(question=q)), bare)
        for item in chain.questions(SPEC, "train", 0, 60)
    ]
    assert {len(p.tokens) for p in prompts} == {SPEC.max_prompt_tokens}
    # With the end token.
    assert max(len(p.answer_tokens) for p in prompts) + 1 == SPEC.max_response_tokens
    for p in prompts:
        assert tokenizer.decode(p.tokens) == p.text + "=" and tokenizer.decode(
            p.answer_tokens
        ) == chain.answer(p.text)
        assert p.tokens.dtype == p.answer_tokens.dtype == np.int32
