"""A policy that is a table: exact rates against the task's own and against samples, the gradient
against differences, and what choices of prompts it is trained on.
"""

import json
import re

import numpy as np
import pytest

from lab import limit
from lab.limit import Choice, Curve, questions_of
from lab.limit.report import assumed, choice_of, measured_curves, shares, tokens_to
from lab.limit.tabular import _Forecast, _Stream
from rl_speed.config import flatten, presets
from rl_speed.data import chain, scratchpad
from rl_speed.data.tasks import TASKS


def of_task(task):
    return questions_of(task, [q.text for q in TASKS[task].questions("train", 0, 300)])


@pytest.fixture(scope="module")
def training():
    return of_task("scratchpad")


def test_rates_at_the_start_are_the_demonstrations():
    texts = [q.text for q in scratchpad.questions("eval", 0, 100)]
    mine = limit.pass_rates(
        limit.table("scratchpad").start(1e-12), questions_of("scratchpad", texts)
    )
    np.testing.assert_allclose(mine, [scratchpad.pass_rate(t) for t in texts], atol=1e-9)


def test_a_table_of_the_first_task():
    """Copies are right, entries of the four tables are at even odds, what rambles is never right
    and as long as may be; a wrong entry writes its misconception, and nothing is taken back.
    """
    texts = [">3512....", "+34......", "-345.....", "^12345...", "*12345..."]
    questions = questions_of("chain", texts)
    rates = limit.pass_rates(questions.table.start(1e-12), questions)
    np.testing.assert_allclose(rates, [1, 0.5, 0.25, 0.0625, 0], atol=1e-9)
    assert questions.tokens.tolist() == [4, 2, 3, 5, chain.DEFAULT_SPEC.max_response_tokens]
    assert (questions.table.operators, questions.table.repair) == (">+-~^*", 0)
    assert limit.table("chain").wrong[1 * 100 + 3 * 10 + 4] == chain.misconception("+", 3, 4)
    # After a misconception the chain goes on from it.
    logits = np.full(600, -50.0)
    _, entries, _ = limit.sample(logits, questions, 1, np.random.default_rng(0))
    assert entries[2, 0, 1] == 2 * 100 + chain.misconception("-", 3, 4) * 10 + 5
    for bad, task, match in (("3+4", "chain", "3\\+4"), ("+34......", "jsonl", "no table")):
        with pytest.raises(ValueError, match=match):
            questions_of(task, [bad])


@pytest.mark.parametrize("task", ["chain", "scratchpad"])
def test_samples_have_the_exact_rates(task):
    rng = np.random.default_rng(0)
    chosen, n = of_task(task).take(np.arange(60)), 4000
    start = chosen.table.start()
    logits = start + rng.normal(0, 1, start.shape)
    right, entries, scores = limit.sample(logits, chosen, n, rng)
    exact = limit.pass_rates(logits, chosen)
    error = np.sqrt(np.maximum(exact * (1 - exact), 1e-3) / n)
    assert np.all(np.abs(right.mean(axis=1) - exact) < 5 * error)
    assert entries.shape == scores.shape == (60, n, chosen.operators.shape[1])


def test_scores_make_the_gradient():
    """E[right x score], summed by entry, is the gradient of the exact rate by differences."""
    questions, rng, n = (
        questions_of("scratchpad", ["3a+4b~5c^9d-2"]),
        np.random.default_rng(1),
        200_000,
    )
    logits = limit.table("scratchpad").start(0.05) - 0.5
    right, entries, scores = limit.sample(logits, questions, n, rng)
    terms = scores[0] * right[0][:, None]
    mean = np.bincount(entries[0].ravel(), terms.ravel(), len(logits)) / n
    used = np.flatnonzero(np.bincount(entries[0].ravel(), minlength=len(logits)))
    assert len(used) > 4
    for entry in used:
        step = np.zeros_like(logits)
        step[entry] = 1e-5
        up, down = (limit.pass_rates(logits + s * step, questions)[0] for s in (1, -1))
        slope = (up - down) / 2e-5
        spread = np.sqrt(np.sum((terms * (entries[0] == entry)).sum(axis=1) ** 2)) / n
        assert abs(mean[entry] - slope) < 5 * max(spread, 1e-9), entry


def test_the_oracle_takes_those_worth_most(training):
    logits, rng = training.table.start(), np.random.default_rng(2)
    rates = limit.pass_rates(logits, training)
    for power, by_tokens in ((1.0, False), (0.25, False), (1.0, True)):
        stream = _Stream(Choice(power=power, by_tokens=by_tokens), training, rng, 24)
        batch = stream.next(logits, 0, 16)
        worth = rates**power * (1 - rates) / (training.tokens if by_tokens else 1)
        assert batch.paid == 24 * training.tokens[batch.index].sum()
        assert len(set(batch.index.tolist())) == 16 == len(batch.right)
        # Measured with 16 samples: not the very best, and far from any.
        assert worth[batch.index].mean() > 0.8 * np.sort(worth)[-16:].mean() > 1.5 * worth.mean()


@pytest.mark.parametrize("screen", [4, 24])
def test_screening_pays_for_what_it_refuses(training, screen):
    """A group is accepted by its own first samples, all of them where the filter is DAPO's."""
    logits, rng = training.table.start(), np.random.default_rng(2)
    rates = limit.pass_rates(logits, training)
    batch = _Stream(Choice(screen=screen), training, rng, 24).next(logits, 0, 16)
    first = batch.right[:, :screen].sum(axis=1)
    assert np.all((0 < first) & (first < screen)) and batch.right.shape == (16, 24)
    refused = batch.paid - 24 * training.tokens[batch.index].sum()
    assert refused > 0 and refused % screen == 0
    if screen == 4:
        worth = rates * (1 - rates)
        assert worth[batch.index].mean() > 1.3 * worth.mean()


def test_a_forecast_on_the_table_learns_whom_to_pick(training):
    """After some batches it picks prompts worth more than those of a shuffle, without an oracle."""
    rng, logits = np.random.default_rng(3), training.table.start()
    worth = limit.pass_rates(logits, training)
    worth = worth**0.25 * (1 - worth)
    stream = _Forecast(Choice(power=0.25, forecast=True), training, rng, 24)
    picked = []
    for _ in range(9):
        batch = stream.next(logits, 0, 8)
        picked.append(worth[batch.index].mean())
        assert len(batch.index) == 8 and batch.paid >= 24 * training.tokens[batch.index].sum()
    assert np.mean(picked[-4:]) > 1.2 * worth.mean()


def test_losses_on_the_table(training):
    """Each of the three takes a course of its own from the same start, and learns."""
    run = lambda **loss: limit.train(Choice(**loss), training, training, 0.2, 0, 6).accuracy
    rloo, dapo, grpo = run(), run(normalise=True), run(normalise=True, by_sample=True)
    assert np.all(rloo[:1] == dapo[:1]) and len({rloo[-1], dapo[-1], grpo[-1]}) == 3
    assert min(rloo[-1], dapo[-1], grpo[-1]) > rloo[0]


def test_training_repeats_and_lifts_accuracy(training):
    run = lambda seed: limit.train(Choice(), training, training, 0.2, seed, 12)
    one, two, other = run(0), run(0), run(1)
    np.testing.assert_array_equal(one.accuracy, two.accuracy)
    assert np.any(one.accuracy != other.accuracy)
    assert one.accuracy[-1] > one.accuracy[0] + 0.02
    assert one.tokens[0] == 0 and np.all(np.diff(one.tokens) > 16 * 24 * 25)
    # It may end with an accuracy: what came before is the same.
    until = float(one.accuracy[5])
    short = limit.train(Choice(), training, training, 0.2, 0, 12, until=until)
    assert short.accuracy[-1] >= until > short.accuracy[:-1].max(initial=0)
    np.testing.assert_array_equal(short.tokens, one.tokens[: len(short.tokens)])


def test_the_rate_that_made_a_curve_is_found(training):
    true = [limit.train(Choice(), training, training, 0.2, seed, 15) for seed in (7, 8, 9)]
    measured = [(c.steps, c.accuracy) for c in true]
    rate, left = limit.fit_rate(measured, training, training, [0.1, 0.2, 0.4], seeds=(0, 1))
    assert rate == 0.2 and left < 0.02


def test_labels_are_choices():
    assert choice_of("rloo") == Choice() and choice_of("speed_rloo n_init=8") == Choice(screen=8)
    assert choice_of("oracle_rloo worth_power=1.0 worth_of=token") == Choice(0, 1.0, True)
    assert choice_of("oracle_rloo") == Choice(power=0.25)
    assert choice_of("forecast_rloo") == Choice(power=0.0, forecast=True)
    assert choice_of("dapo") == Choice(screen=24, normalise=True)
    assert choice_of("oracle_dapo") == Choice(power=0.25, normalise=True)
    assert choice_of("forecast_dapo") == Choice(power=0.0, forecast=True, normalise=True)
    assert choice_of("grpo") == Choice(normalise=True, by_sample=True)
    others = ("band_grpo", "rpo_dapo", "rloo learning_rate=0.1", "speed_rloo where=in_loop")
    for label in (*others, "rloo path=a=b", "rloo train=my file", "speed_rloo train=my n_init=0"):
        assert choice_of(label) is None


@pytest.mark.parametrize(
    "label,field",
    [
        *((f"speed_rloo n_init={value}", "n_init") for value in ("x", "0", "1", "24", "")),
        *((f"oracle_rloo worth_power={value}", "worth_power") for value in ("abc", "0.0", "nan")),
        ("forecast_dapo worth_power=1.5", "worth_power"),
        ("oracle_dapo worth_of=word", "worth_of"),
    ],
)
def test_labels_that_cannot_be(label, field):
    with pytest.raises(ValueError, match=f"'{label}': {field} must be"):
        choice_of(label)


def line(*tokens):
    """Accuracy 0, 0.5, 1.0 at these tokens."""
    return Curve(np.arange(3.0), np.array(tokens, float), np.array([0.0, 0.5, 1.0]))


def test_shares_of_the_limit_by_hand():
    curves = {
        "rloo": [line(0, 100, 200), line(0, 140, 280)],
        "oracle_rloo": [line(0, 60, 120)],
        "forecast_rloo": [line(0, 80, 160)],
        "dapo": [line(0, 50, 100)],
        "speed_dapo": [line(0, 50, 200)],
    }
    found = shares(curves, [0.5, 0.75])
    assert [cell["tokens"] for cell in found["rloo"]] == [120, 180]
    assert found["forecast_rloo"][0] == pytest.approx(
        {"target": 0.5, "tokens": 80, "ratio": 1.5, "share": 0.5}
    )
    assert found["oracle_rloo"][1]["share"] == 1 and found["rloo"][0]["share"] == 0
    assert found["speed_dapo"][1]["ratio"] == 0.6 and found["speed_dapo"][1]["share"] is None
    assert tokens_to([line(0, 1, 2), Curve(*(np.zeros(2),) * 3)], 0.5) is None


def test_a_page_of_a_comparison(tmp_path, monkeypatch):
    """From table.json to a page whose ratios are those of the curves in it."""
    points = lambda tokens: [
        {"optimizer_steps": s, "tokens": t, "eval/accuracy": a}
        for s, t, a in zip((0, 5, 10), tokens, (0.42, 0.44, 0.46))
    ]
    curves = [
        {"method": m, "seed": 0, "evaluations": points(tokens)}
        for m, tokens in (("rloo", (0, 100, 200)), ("speed_rloo", (0, 200, 400)))
    ]
    monkeypatch.setattr("lab.limit.report.RATES", [0.1, 0.2])
    monkeypatch.setattr("lab.limit.report.SEEDS", [0])
    monkeypatch.setattr("lab.limit.report.ALSO", ())
    (tmp_path / "table.json").write_text(json.dumps({"curves": curves}))
    text, names = limit.compare(tmp_path / "table.json", [0.45], tmp_path / "out", "as typed")
    assert "`as typed`" in text and "limit.png" in names and (tmp_path / "out/limit.png").exists()
    written = json.loads((tmp_path / "out/table.json").read_text())
    (row,) = written["predictions"]
    assert row["measured"] == 0.5 and 0.4 < row["predicted"] < 1.5
    assert row["off"] == pytest.approx(row["predicted"] / 0.5 - 1)
    assert written["task"] == "scratchpad"  # a table from before tasks were named
    (tmp_path / "table.json").write_text(json.dumps({"task": "jsonl", "curves": curves}))
    with pytest.raises(ValueError, match="of the task 'jsonl', and not of chain or scratchpad"):
        limit.compare(tmp_path / "table.json", [0.45], tmp_path / "out", "")
    (tmp_path / "table.json").write_text(json.dumps({"curves": curves[1:]}))
    with pytest.raises(ValueError, match="has no runs of rloo"):
        limit.compare(tmp_path / "table.json", [0.45], tmp_path / "out", "")


def table_of(tmp_path, **changes):
    """A table.json of one run of plain RLOO, with other top-level fields."""
    points = [{"optimizer_steps": s, "tokens": 9 * s, "eval/accuracy": 0.4} for s in (0, 5)]
    told = {"task": "chain", "curves": [{"method": "rloo", "evaluations": points}]}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(told | changes))
    return path


POINT = {"optimizer_steps": 1, "tokens": 1, "eval/accuracy": 0.5}


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"task": ["chain"]}, r"is of the task \['chain'\]"),
        ({"curves": "none"}, "curves must be a list, and is a string"),
        ({"curves": [None]}, r"curves\[0\]: it must be an object, and is null"),
        ({"curves": [{"evaluations": [POINT]}]}, r"curves\[0\]: method must be a string"),
        (
            {"curves": [{"method": 3, "evaluations": [POINT]}]},
            r"curves\[0\]: method must be a string, and is a number; make it with experiments/comp",
        ),
        ({"curves": [{"method": "rloo"}]}, r"curves\[0\]: evaluations must be a list"),
        ({"curves": [{"method": "rloo", "evaluations": []}]}, r"curves\[0\]: evaluations must be"),
        *(
            (
                {"curves": [{"method": "rloo", "evaluations": [POINT, POINT | bad]}]},
                rf"curves\[0\]: evaluations\[1\] must have a number .* as '{name}'",
            )
            for name, value in (
                ("eval/accuracy", "abc"),
                ("eval/accuracy", None),
                ("eval/accuracy", float("nan")),
                ("eval/accuracy", 1.5),
                ("tokens", None),
                ("tokens", [1]),
                ("optimizer_steps", True),
            )
            for bad in [{name: value}]
        ),
        ({"curves": [{"method": "rloo", "evaluations": [7]}]}, r"evaluations\[0\] must have"),
        (
            {"curves": [{"method": "speed_rloo n_init=0", "evaluations": [POINT]}]},
            r"curves\[0\]: 'speed_rloo n_init=0': n_init must be .*make it with experiments/comp",
        ),
        (
            {"curves": [{"method": "rloo", "evaluations": [POINT | {"optimizer_steps": 0}]}]},
            "no runs of rloo that trained",
        ),
        ({"settings": []}, "settings must be an object, and is a list"),
        ({"settings": {"rloo": 1}}, r"settings\['rloo'\] must be an object"),
    ],
)
def test_damaged_tables_are_named(tmp_path, changes, message):
    path = table_of(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as told:
        measured_curves(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("task", ["chain", "scratchpad"])
@pytest.mark.parametrize("method", ["rloo", "grpo", "dapo", "speed_dapo", "forecast_rloo"])
def test_settings_of_the_preset_are_those_assumed(task, method):
    settings = flatten(presets.embedded(method, task).to_dict())
    wanted = assumed(choice_of(method))
    assert wanted == {name: settings[name] for name in wanted}


def test_settings_that_predictions_are_not_for(tmp_path):
    told = flatten(presets.embedded("rloo").to_dict())
    settings = {"rloo": told | {"data.eval_prompts": 0}, "band_grpo": {"rule.n": 7}}
    assert measured_curves(table_of(tmp_path, settings=settings))[0] == "chain"
    path = table_of(tmp_path, settings={"rloo": told | {"data.train_prompts": 200}})
    message = f"config.data.train_prompts=200 for 'rloo' in {path}, and this predicts for 4096"
    with pytest.raises(ValueError, match=re.escape(message)):
        measured_curves(path)
    for method, field in (
        ("oracle_rloo", "data.oracle_every"),
        ("oracle_rloo", "data.worth_power"),
        ("forecast_rloo", "data.explore"),
        ("speed_rloo", "rule.n_init"),
    ):
        mine = flatten(presets.embedded(method).to_dict())
        assert mine.items() >= assumed(choice_of(method)).items()
        curves = [{"method": method, "evaluations": [POINT]}]
        path = table_of(tmp_path, curves=curves, settings={method: mine | {field: 0.375}})
        with pytest.raises(ValueError, match=f"config.{field}=0.375 for '{method}'"):
            measured_curves(path)


@pytest.mark.parametrize("targets", ["nan", "-1", "0", "", "0.5,x", "1.5"])
def test_the_command_refuses_targets(launch, tmp_path, targets):
    done = launch("experiments/limit.py", f"--targets={targets}", f"--out={tmp_path / 'out'}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: targets must be accuracies above 0")
    assert last.endswith(repr(targets)) and not (tmp_path / "out").exists()
