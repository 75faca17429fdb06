"""Fine-tuning a Hugging Face directory on a file: it learns, survives kill -9, and what it saves opens in transformers."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from rl_speed.data import DEFAULT_SPEC, chain
from rl_speed.data.embedded_tokenizer import embedded_directory
from rl_speed.policy import forward, load_hf, num_params
from rl_speed.runtime.metrics import read_lines
from rl_speed.runtime.out_of_memory import size_text
from rl_speed.sft.build import PRESETS, Settings, build, explain_out_of_memory
from rl_speed.sft.data import Layout
from rl_speed.runtime.signals import Stopped

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Questions that the policy mostly fails on, with all partial results as solution, which it never saw."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for item in chain.questions(DEFAULT_SPEC, "train", 0, 160):
            file.write(json.dumps({"question": item.text, "answer": item.answer, "solution": item.answer}) + "\n")
    return path


@pytest.fixture(scope="module")
def settings(rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "policy"
    return Settings(out=str(out), model=str(embedded_directory()), data=str(rows), prompt="{question}=", max_length=64, batch=16,
                    steps=24, warmup_steps=2, learning_rate=2e-3, micro_rows=2, eval_every=8, eval_share=0.2, checkpoint_every=5,
                    mesh_data=2)


@pytest.fixture(scope="module")
def whole(settings):
    """The uninterrupted run, saved."""
    run = build(settings, progress=False)
    run.trainer.run()
    return run, run.save("python experiments/sft.py")


def lines(workdir):
    """metrics.jsonl without what is of the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(workdir / "metrics.jsonl")]


def test_the_held_out_loss_falls_and_rows_are_full(whole):
    run, made = whole
    record = lines(run.trainer.workdir)
    assert [line["step"] for line in record if "eval/loss" in line] == [0, 8, 16, 24]
    assert made["eval_loss"] == record[-1]["eval/loss"] < 0.8 * record[0]["eval/loss"]
    assert run.counts["examples"] + run.counts["held_out"] == 160 and 16 <= run.counts["held_out"] <= 48
    assert np.mean([line["use"] for line in record[1:]]) > 0.6
    assert (run.trainer.workdir / "loss.png").stat().st_size > 5000
    assert json.loads((run.trainer.workdir / "config.json").read_text())["learning_rate"] == 2e-3


def test_what_is_saved_opens_in_transformers_with_the_same_logits(whole):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run, _ = whole
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.settings.out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.settings.out)
    tokens = np.asarray([tokenizer.encode("+1234=")])
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    params, model = load_hf(run.settings.out)
    np.testing.assert_allclose(forward(params, tokens, model), expected, atol=1e-4)
    assert theirs.generation_config.eos_token_id in (1, [1])
    assert json.loads(open(f"{run.settings.out}/made_by.json").read())["steps"] == 24


def flags_of(settings):
    """The command line that gives these settings."""
    default = Settings(out="o", model="m", data="d")
    given = {k: v for k, v in dataclasses.asdict(settings).items() if v != getattr(default, k)}
    return [f"--{k}={v}" for k, v in given.items()]


# The command, killed at step 9 once the checkpoint of step 5 is whole, which may be steps after it was begun.
KILLED = """
import os, pathlib, runpy, signal, time
from rl_speed.runtime.metrics import JsonLines
write = JsonLines.write
def written(self, step, values):
    write(self, step, values)
    while step == 9 and not pathlib.Path({checkpoint!r}).exists():
        time.sleep(0.01)
    if step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
JsonLines.write = written
runpy.run_path({script!r}, run_name="__main__")
"""


def assert_same(run, whole):
    assert lines(run.trainer.workdir) == lines(whole.trainer.workdir)
    for a, b in zip(jax.tree.leaves(run.trainer.params), jax.tree.leaves(whole.trainer.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_killed_and_resumed_it_is_bit_for_bit_the_uninterrupted_run(whole, settings, repo, launch, tmp_path):
    mine = dataclasses.replace(settings, out=str(tmp_path / "policy"))
    checkpoint, script = tmp_path / "policy.run" / "checkpoints" / "5", tmp_path / "killed.py"
    script.write_text(KILLED.format(script=str(repo / "experiments" / "sft.py"), checkpoint=str(checkpoint)))
    done = launch(script, *flags_of(mine))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (tmp_path / "policy").exists()
    run = build(mine, progress=False)
    assert run.trainer.step == 5

    def ask(record):
        if record["step"] == 21:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM after step 21"):
        run.trainer.run(ask)
    run = build(mine, progress=False)
    assert run.trainer.step == 21
    run.trainer.run()
    assert_same(run, whole[0])
    # The same command on a run that is over makes no update, and knows what it came to.
    again = build(mine, progress=False).trainer
    assert again.step == 24 and again.last["eval/loss"] == whole[1]["eval_loss"]
    again.run()


def test_other_settings_are_refused(whole, settings):
    for change, message in (({"learning_rate": 1e-3}, "holds a run with learning_rate = 0.002, not 0.001"),
                            ({"eval_share": 0.1}, "holds a run with eval_share"),):
        with pytest.raises(ValueError, match=message):
            build(dataclasses.replace(settings, **change))


def test_bad_settings_and_bad_data_end_with_one_line(settings, tmp_path):
    for change, message in (
            ({"epochs": 2}, "--steps or --epochs, not both"), ({"model": ""}, "--model and --data together"),
            ({"data": "", "model": "", "eval_samples": 1}, "need --data"),
            ({"workdir": str(tmp_path / "policy" / "run")}, "must not be --out"),
            ({"eval_samples": 1, "eval_share": 0.0}, "needs held-out rows"),
            ({"max_length": 4}, "longer than max_length = 4 tokens"), ({"prompt": None}, "no chat template"),
            ({"warmup_steps": 24}, "leaves none of 24 updates"), ({"micro_rows": 3}, "--micro_rows=3 rows cannot be split"),
            ({"data": str(tmp_path / "no.jsonl")}, "no such file")):
        with pytest.raises((ValueError, OSError), match=message) as caught:
            build(dataclasses.replace(settings, **({"out": str(tmp_path / "policy")} | change)))
        assert "\n" not in str(caught.value)


def test_a_paper_preset_sets_what_the_paper_says():
    band = Settings(out="o", model="m", data="d", **PRESETS["band"])
    optimizer = band.optimizer(steps=-(-1100 * band.epochs // band.batch))
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.total_steps, band.batch) == (5e-6, 25, 262, 21)


@pytest.mark.slow
def test_the_command_names_file_and_line_and_exits_with_2(rows, launch, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(rows.read_text().splitlines()[0] + '\n{"question": "+12", "answer": "3"}\n')
    done = launch("experiments/sft.py", f"--model={embedded_directory()}", f"--data={bad}", "--prompt={question}=",
                  "--preset=band", f"--out={tmp_path / 'policy'}")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {bad}:2: no \"solution\"") and done.stderr.count("\n") == 1
    assert not (tmp_path / "policy.run").exists()


@pytest.mark.slow
def test_accuracy_of_sampled_answers(whole, settings, tmp_path):
    """Judged by math-verify: what the policy has learned to answer counts, what it has not does not."""
    run = build(dataclasses.replace(settings, out=str(tmp_path / "policy"), eval_samples=2, eval_temperature=1.0, steps=1,
                                    warmup_steps=0), progress=False)
    try:
        found = run.trainer.evaluate()
        run.trainer.params = whole[0].trainer.params
        after = run.trainer.evaluate()
    finally:
        run.close()
    assert 0 < found["eval/accuracy"] < after["eval/accuracy"] <= 1


def test_out_of_memory_names_the_flags_of_this_command(settings):
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes\nmore")
    text = explain_out_of_memory(dataclasses.replace(settings, eval_samples=4), error, Layout(64, 12, 3, True))
    assert text.startswith("a device ran out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes\n")
    for part in ("--micro_rows (2, now 4 of 64 tokens)", "--max_length (64)", "--head_chunk (0)", "--remat (now False)",
                 "--dtype=bfloat16 (now float32)", "--mesh_fsdp (1)", "weights (sharded, float32)", "optimizer", "gradients",
                 "--eval_samples (4; 0 samples none)", "goes on from there"):
        assert part in text
    assert "config." not in text and "more" not in text.splitlines()[1]
    model = load_hf(settings.model)[1]
    weights = size_text(4 * num_params(model))
    assert text.count(weights) == 4 and size_text(8 * num_params(model) + 8) in text  # both moments, and two counts
    embedded = explain_out_of_memory(Settings(out="o"), error)
    assert "--micro_rows (0)" in embedded and "sampling answers" not in embedded and "goes on" not in embedded


OUT_OF_MEMORY = """
import runpy, sys
from jax.errors import JaxRuntimeError
from rl_speed.sft import build as sft_build
def build(settings):
    raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")
sft_build.build = build
runpy.run_path("experiments/sft.py", run_name="__main__")
"""


def test_the_command_ends_with_them(launch, tmp_path):
    (tmp_path / "sft.py").write_text(OUT_OF_MEMORY)
    done = launch(tmp_path / "sft.py", "--out=o")
    assert done.returncode == 1 and done.stderr.startswith("error: a device ran out of memory: RESOURCE_EXHAUSTED"), done.stderr
    assert "--micro_rows" in done.stderr and "Traceback" not in done.stderr
