"""Settings: flags before presets before the run's own, the papers' numbers, refusals in one line; the command itself."""

import json

import pytest

from rl_speed.evaluation.benchmarks import parse_specs
from rl_speed.evaluation.settings import PRESETS, Settings, capacities, of_config, parse_k, parse_mesh, resolve
from rl_speed.policy.prompt_formats import prompt_format
from rl_speed.config.presets import embedded


def test_flags_go_before_presets_before_the_run():
    base = of_config(embedded())
    assert (base["verifier"], base["max_new"], base["prompt"]) == ("exact", 16, "{question}=")
    plain = resolve(base, "", {})
    assert plain.max_new == 16 and plain.samples == 32 and plain.k == (1, 8, 32)
    band = resolve(base, "band", {"top_p": 0.9, "samples": 8, "k": (2,)})
    assert (band.temperature, band.top_p, band.max_new, band.samples, band.k, band.verifier) == (0.6, 0.9, 8192, 8, (2,), "math")
    assert band.slots == base["slots"]  # the machine's, not the paper's


@pytest.mark.parametrize("preset,temperature,top_p,max_new", [("speed", 1.0, 1.0, 3072), ("band", 0.6, 0.95, 8192),
                                                              ("ada", 1.0, 1.0, 4096), ("rpo", 0.7, 1.0, 4096)])
def test_the_papers_settings(preset, temperature, top_p, max_new):
    s = resolve({}, preset, {})
    assert (s.temperature, s.top_p, s.max_new, s.samples, s.verifier) == (temperature, top_p, max_new, 32, "math")
    form = prompt_format(s.prompt)
    assert "boxed" in form.user + (form.system or "") and s.instruction == "" and set(PRESETS) == {"speed", "band", "ada", "rpo"}


@pytest.mark.parametrize("given,message", [
    (dict(samples=0), "--samples must be at least 1; got 0"),
    (dict(samples=4, k=(1, 8)), r"--k must be at most --samples \(4\): pass@k needs k responses to a question; got 1,8"),
    (dict(k=(0,)), "--k must be numbers of at least 1; got 0"),
    (dict(temperature=-1.0), r"--temperature must be 0 \(greedy\) or more; got -1.0"),
    (dict(top_p=0.0), r"--top_p must be in \(0, 1\]; got 0.0"),
    (dict(verifier="maths"), "--verifier must be one of math, integer, exact, or a function of your own, module:fun"),
    (dict(mode="box"), "--mode must be one of boxed, free; got 'box'"),
    (dict(compute_dtype="int8"), "--compute_dtype must be one of float32, bfloat16; got 'int8'"),
    (dict(fsdp=0), r"--mesh must be axes of at least 1; got \(1, 0, 1\)"),
    (dict(slots=0), "--slots must be at least 1"), (dict(limit=-1), "--limit must be 0"), (dict(workers=0), "--workers must be"),
])
def test_what_cannot_be_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        resolve({}, "", given)


def test_texts_of_flags():
    assert parse_mesh("data=2,tensor=4") == {"data": 2, "tensor": 4} and parse_k(["8", "1", "8"]) == (1, 8)
    for text in ("data", "data=x", "rows=2", "data=1,data=2"):
        with pytest.raises(ValueError, match="--mesh is written data=N"):
            parse_mesh(text)
    with pytest.raises(ValueError, match="--k must be numbers with commas between them; got 'a'"):
        parse_k(["1", "a"])
    with pytest.raises(ValueError, match="--preset must be one of speed, band, ada, rpo; got 'sped'"):
        resolve({}, "sped", {})


def test_names_of_benchmarks(tmp_path):
    for name in ("math500.jsonl.gz", "a.jsonl", "x=y.jsonl"):
        (tmp_path / name).write_text("")
    found = parse_specs([f"{tmp_path}/math500.jsonl.gz,b={tmp_path}/a.jsonl", f"{tmp_path}/x=y.jsonl"])
    files = {name: path.rpartition("/")[2] for name, path in found.items()}
    assert files == {"math500": "math500.jsonl.gz", "b": "a.jsonl", "x=y": "x=y.jsonl"}
    with pytest.raises(ValueError, match="two benchmarks 'a' .*: call one of them NAME=FILE"):
        parse_specs([f"{tmp_path}/a.jsonl", f"a={tmp_path}/math500.jsonl.gz"])
    with pytest.raises(ValueError, match="--data: /no/file.jsonl: no such file"):
        parse_specs(["/no/file.jsonl"])
    with pytest.raises(ValueError, match="--data is FILE or NAME=FILE; got 'a='"):
        parse_specs(["a="])


@pytest.mark.parametrize("samples,slots,questions,pieces,piece", [(32, 128, 500, 32, 32), (1, 128, 5000, 256, 1),
                                                                  (32, 128, 30, 30, 32), (500, 16, 10, 1, 128), (4, 2, 3, 3, 4)])
def test_capacities(samples, slots, questions, pieces, piece):
    assert capacities(Settings(samples=samples, slots=slots), questions) == (pieces, piece)


def test_a_flag_that_does_not_parse_is_one_line(launch):
    done = launch("experiments/evaluate.py", "--samples=many")
    assert done.returncode == 2 and done.stderr.strip().splitlines() == [
        "error: flag --samples=many: invalid literal for int() with base 10: 'many'"]


@pytest.mark.slow
def test_the_command(launch, tmp_path):
    command = ["experiments/evaluate.py", "--limit=40", "--samples=4", f"--out={tmp_path / 'out'}"]
    done = launch(*command)
    assert done.returncode == 0, done.stderr
    assert "| chain     | 40 " in done.stdout and {p.name for p in (tmp_path / "out").iterdir()} == {
        "responses.jsonl", "evaluation.json", "summary.json", "table.md", "plot.png"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["benchmarks"]["chain"]["questions"] == 40 and summary["command"].startswith("python experiments/evaluate.py")
    refused = launch(*command, "--seed=1")
    assert refused.returncode == 2 and "settings.seed: 0 there, 1 here" in refused.stderr.splitlines()[-1]
