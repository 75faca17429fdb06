"""Dry runs at the papers' scale: real model configurations and tokenizers, no weights. Skipped without the data."""

import json
import shutil
import subprocess
import sys

import jax
import pytest

from rl_speed import presets
from rl_speed.training import build
from rl_speed.training.dry_run import (abstract_state, describe_work, dry_run, generation_parts, reference_parts,
                                       update_parts)

# (parameters, layers, KV heads, head size) of the models' public configurations.
MODELS = {"Qwen2.5-Math-1.5B": (1_543_714_304, 28, 2, 128), "Qwen2.5-Math-7B": (7_615_616_512, 28, 4, 128)}
WEIGHTS, RESPONSES, PROMPTS = "weights (sharded, float32)", "KV of responses", "KV of prompts"


@pytest.fixture(scope="module")
def directory(real_data, tmp_path_factory):
    """model name, changes -> a directory with its config.json and the tokenizer; nothing else is read by a dry run."""
    def make(name, **changes):
        folder = tmp_path_factory.mktemp(name)
        values = json.loads((real_data / "configs" / f"{name}.config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))
        for file in ("vocab.json", "merges.txt"):
            shutil.copy(real_data / "tokenizer" / "qwen2.5" / file, folder)
        shutil.copy(real_data / "tokenizer" / "qwen2.5" / "tokenizer_config.qwen2.5-math-base.json",
                    folder / "tokenizer_config.json")
        return str(folder)

    return make


@pytest.mark.parametrize("name,devices", [("Qwen2.5-Math-1.5B", 1), ("Qwen2.5-Math-7B", 4)])
@pytest.mark.parametrize("paper", ["speed", "ada", "rpo", "band"])
def test_parts_of_a_papers_run(directory, name, devices, paper):
    """Weights, moments, gradients and caches on each device, from shapes alone: against the models' public numbers."""
    count, layers, heads, size = MODELS[name]
    config = getattr(presets, paper)(directory(name), devices=devices).validate()
    before = sum(x.nbytes for x in jax.live_arrays())
    mesh = build.build_mesh(config)
    policy = build.abstract_policy(config, mesh)
    generator, _, _ = build.build_generators(config, policy, mesh)
    length, token = build.context_length(config), 2 * layers * heads * size * 2  # keys and values in bfloat16
    known = generation_parts(policy, generator, mesh, length)
    assert known[WEIGHTS] == pytest.approx(4 * count / devices, rel=0.01)
    assert known["weights for decoding (bfloat16)"] == pytest.approx(2 * count, rel=0.01)
    assert known[RESPONSES] == config.sampler.slots // devices * config.sampler.max_new * token
    contexts = known[PROMPTS] / (length * token) * devices
    assert config.driver.screen_prompts <= contexts <= 2 * config.driver.screen_prompts + 16 * devices
    known = update_parts(abstract_state(policy, build.build_optimizer(config, policy.params), mesh))
    assert sum(known.values()) == pytest.approx(16 * count / devices, rel=0.01)
    assert ("reference policy" in reference_parts(config, policy)) == (paper == "band")
    work = describe_work(config)
    samples, width = {"speed": (384, 4096), "ada": (2048, 2560), "rpo": (576, 4608), "band": (256, 5120)}[paper]
    assert (work["samples a step"], work["tokens a step"]) == (samples, samples * width)
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1e5


@pytest.mark.parametrize("name,family", [("Qwen3-4B", "qwen3"), ("Llama-3.2-3B", "llama")])
def test_models_that_cannot_be_loaded_are_refused_by_name(directory, name, family):
    """As the presets' docstrings say."""
    with pytest.raises(ValueError, match=f"model_type '{family}' is not supported"):
        dry_run(presets.ada(directory(name)))


@pytest.mark.slow
@pytest.mark.parametrize("preset,model,limit", [("speed_qwen2p5_math_1p5b", "Qwen2.5-Math-1.5B", 80),
                                                ("speed_qwen2p5_math_7b", "Qwen2.5-Math-7B", 80)])
def test_command_plans_the_papers_run(repo, directory, preset, model, limit):
    """The whole model on the preset's own mesh: every program below the device that it was written for."""
    done = subprocess.run([sys.executable, "experiments/train.py", f"--config=configs/{preset}.py", "--dry_run",
                           f"--config.model.path={directory(model)}"], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{MODELS[model][0]:,} parameters" in done.stdout
    totals = [float(line.split()[1]) for line in done.stdout.splitlines() if "GiB per device, compiled in" in line]
    assert len(totals) == 2 and all(10 < total < limit for total in totals)
    for part in ("samples a step        384", "tokens a step         1,572,864", "generation: ", "update: ", "optimizer",
                 "gradients", "KV of prompts", "activations, workspace"):
        assert part in done.stdout
