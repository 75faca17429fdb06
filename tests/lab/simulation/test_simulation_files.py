"""Pass rates from files: found, scaled, refused with file, line and field;
and the command from flags to pictures.
"""

import gzip
import json

import numpy as np
import pytest

from lab import simulation
from lab.simulation import table
from rl_speed.data.loaders import DataError


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    "name,values,arguments",
    [
        ("pass_rate", [0.25, 1], {}),
        ("fail_pct_model_128", [75, 0.0], {}),
        ("difficulty", [75, 0], {}),
        ("pass_pct", [25, 100], {}),
        ("fail_rate", [0.75, 0], {}),
        ("score", [0.25, 1.0], {"field": "score", "scale": "rate"}),
        ("difficulty", [0.75, 0], {"scale": "failure"}),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_fields_and_scales(tmp_path, name, values, arguments, ending):
    path = write(
        tmp_path / f"rows.{ending}",
        [{"question": "q", name: values[0]}, {name: None}, {name: values[1]}],
    )
    found = simulation.load_pass_rates(path, **arguments)
    assert found.rates.tolist() == [0.25, 1.0] and found.missing == 1
    assert name in found.source and str(tmp_path) not in found.source


def test_json_arrays_and_what_pass_rates_py_writes(tmp_path):
    rows = tmp_path / "rows.json"
    ours = tmp_path / "pass_rates.json"
    rows.write_text(json.dumps([{"accuracy": 0.5}, {"accuracy": 0}]))
    ours.write_text(json.dumps({"command": "c", "rates": [0.5, 0.0]}))
    for path in (rows, ours):
        assert simulation.load_pass_rates(path).rates.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    "rows,arguments,message",
    [
        (
            [{"question": "q"}],
            {},
            (
                r"rows.jsonl:1: no field looks like a pass rate .*; it has "
                r"question; set field to one of the row's fields"
            ),
        ),
        (
            [{"pass_rate": 1, "difficulty": 2}],
            {},
            r"rows.jsonl:1: several fields look like pass rates \(pass_rate, difficulty\)",
        ),
        ([{"pass_rate": 1}, {"other": 2}], {}, r"rows.jsonl:2: no field 'pass_rate'; it has other"),
        (
            [{"pass_rate": 1}, {"pass_rate": "0.5"}],
            {},
            r"rows.jsonl:2: pass_rate: expected a number, got '0.5'",
        ),
        ([{"pass_rate": True}], {}, r"rows.jsonl:1: pass_rate: expected a number, got True"),
        (
            [{"pass_rate": None}, {"pass_rate": 1.5}],
            {},
            r"rows.jsonl:2: pass_rate must lie in \[0, 1\] \(scale 'rate'\), got 1.5",
        ),
        (
            [{"difficulty": 3}, {"difficulty": -1}],
            {},
            r"rows.jsonl:2: difficulty must lie in \[0, 100\]",
        ),
        (
            [{"pass_rate": float("nan")}],
            {},
            r"rows.jsonl:1: pass_rate must lie in \[0, 1\] .*got nan",
        ),
        ([{"difficulty": 9.5}, {"difficulty": 3}], {}, "a grade from 1 to 10 is no pass rate"),
        ([{"difficulty": 0.5}], {}, r"read as 'difficulty', 0 to 100, but no value exceeds 1"),
        (
            [{"score": 0.5}],
            {"field": "score"},
            r"the scale of 'score' is unknown; set scale to one of rate, percent",
        ),
        (
            [{"pass_rate": 0.5}],
            {"scale": "logit"},
            r"scale must be one of rate, percent, failure, difficulty, got 'logit'",
        ),
        ([{"pass_rate": None}], {}, r"no row has a pass rate: 'pass_rate' is null in all 1"),
        ([], {}, r"no row has a pass rate, it is empty"),
        ([[1]], {}, r"rows.jsonl:1: expected an object, got list"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, rows, arguments, message):
    with pytest.raises(DataError, match=message):
        simulation.load_pass_rates(write(tmp_path / "rows.jsonl", rows), **arguments)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"pass_rate": 1}\n{"pass_rate": \n')
    (tmp_path / "bad.json").write_text('{"rates": 3}')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"pass_rate": 1}\n')[:-5])
    for name, message in (
        ("none.jsonl", "no such file"),
        ("none.json", "no such file"),
        ("bad.jsonl", "bad.jsonl:2: not JSON"),
        ("bad.json", "an object with a list under 'rates'"),
        ("cut.jsonl.gz", "not a whole gzip file"),
    ):
        with pytest.raises(DataError, match=message):
            simulation.load_pass_rates(tmp_path / name)


def test_epochs_of_unequal_length(tmp_path):
    path = tmp_path / "epochs.json"
    path.write_text(
        json.dumps({str(i): [0.0, 0.5, 1.0] for i in range(9)} | {"short": [0.0, 0.25]})
    )
    curves = simulation.load_epochs(path, cover=0.9)
    assert curves.shape == (10, 3) and curves[-1].tolist() == [0.0, 0.25, 0.25]
    assert simulation.load_epochs(path, cover=1.0).shape == (10, 2)


@pytest.mark.parametrize(
    "content,message",
    [
        ("[1]", r"expected an object \{prompt: \[accuracy of each epoch\]\}, got list"),
        ("{}", "got an empty one"),
        ('{"7": []}', "prompt '7': expected a list of accuracies"),
        ('{"7": [0, "x"]}', "prompt '7', epoch 1: expected a number, got 'x'"),
        ('{"7": [0, 8]}', r"prompt '7', epoch 1: must lie in \[0, 1\], got 8"),
        ("{", "epochs.json:1: not JSON"),
    ],
)
def test_epochs_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "epochs.json").write_text(content)
    with pytest.raises(DataError, match=message):
        simulation.load_epochs(tmp_path / "epochs.json")


def test_moving_average_is_over_as_many_epochs_everywhere():
    values = np.array([[0.0, 0.5, 1.0, 1.0, 0.0]])
    assert simulation.moving_average(values, 3)[0].tolist() == pytest.approx(
        [0.5, 0.5, 2.5 / 3, 2 / 3, 2 / 3]
    )
    assert simulation.moving_average(values, 1).tolist() == values.tolist()
    for window in (0, 2, 7):
        with pytest.raises(
            ValueError, match="window must be odd and between 1 and the number of epochs, 5"
        ):
            simulation.moving_average(values, window)


def test_mixture_is_stated_and_seeded():
    found = simulation.mixture(1000, seed=3)
    assert (
        "synthetic" in found.source
        and "Beta(" in found.source
        and np.all((found.rates >= 0) & (found.rates <= 1))
    )
    assert np.array_equal(found.rates, simulation.mixture(1000, seed=3).rates)


def test_no_machine_path_is_written():
    arguments = ["--pass_rates=/somewhere/data/set/file.jsonl", "--n=24", "--out", "/a/b/c"]
    assert (
        table.shown_command("experiments/simulate.py", arguments)
        == "python experiments/simulate.py --pass_rates=DATA/set/file.jsonl --n=24 --out DATA/b/c"
    )


def test_the_command(launch, tmp_path):
    rates = write(tmp_path / "rates.jsonl", [{"pass_rate": k / 40} for k in range(41)])
    (tmp_path / "epochs.json").write_text(
        json.dumps({str(k): [k / 10, 0.5, 1.0] for k in range(11)})
    )
    out = tmp_path / "out"
    done = launch(
        "experiments/simulate.py",
        f"--pass_rates={rates}",
        f"--over_training={tmp_path / 'epochs.json'}",
        "--window=1",
        "--n=12",
        "--n_init=3,4",
        "--groups=4",
        "--repeats=2",
        f"--out={out}",
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "table.md",
        "table.json",
        "cost.png",
        "signal.png",
        "epochs.png",
    }
    text = (out / "table.md").read_text()
    assert "SPEED 3+9" in text and "Over training" in text and str(tmp_path) not in text
    saved = json.loads(
        (out / "table.json").read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    assert saved["prompts"] == 41 and [row["rule"] for row in saved["rows"]][:3] == [
        "Uniform",
        "Dynamic (DAPO)",
        "SPEED 3+9",
    ]
    assert len(saved["over_training"]["Uniform"]["accepted"]) == 3


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--pass_rates=none.jsonl"], "error: none.jsonl: no such file"),
        (["--n_init=4,x"], "error: n_init must be whole numbers with commas between, got '4,x'"),
        (["more"], "error: unexpected argument 'more'"),
    ],
)
def test_the_command_refuses(launch, tmp_path, arguments, message):
    (tmp_path / "rates.json").write_text('{"rates": [0, 0, 0, 1]}')
    (tmp_path / "epochs.json").write_text('{"a": [0, 0], "b": [1, 1]}')
    for name, file in (("CONSTANT", "rates.json"), ("EPOCHS", "epochs.json")):
        arguments = [text.replace(name, str(tmp_path / file)) for text in arguments]
    done = launch("experiments/simulate.py", *arguments, f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith(message)
    assert not (tmp_path / "out").exists()
