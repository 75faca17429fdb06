"""Hugging Face directories: shards, precisions, refusals, damage."""

import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_speed.policy import ModelConfig, init, load_hf, save_hf

MODEL = ModelConfig(vocab_size=24, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=24)


@pytest.fixture(scope="module")
def params():
    return init(MODEL, jax.random.key(0))


@pytest.fixture
def saved(params, tmp_path):
    save_hf(tmp_path / "m", params, MODEL)
    return tmp_path / "m"


def shard(directory, parts=3):
    tensors = load_file(directory / "model.safetensors")
    names, where = sorted(tensors), {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, directory / file)
        where |= {name: file for name in names[i::parts]}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (directory / "model.safetensors").unlink()


def test_three_shards_load_as_one(params, saved):
    shard(saved)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(load_hf(saved)[0]), jax.device_get(params))


def test_half_precision_loads(params, saved):
    import ml_dtypes

    tensors = load_file(saved / "model.safetensors")
    for dtype in (ml_dtypes.bfloat16, np.float16):
        save_file({name: x.astype(dtype) for name, x in tensors.items()}, saved / "model.safetensors")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(dtype).astype(np.float32)),
                     jax.device_get(load_hf(saved)[0]), jax.device_get(params))


def test_missing_shard_is_named(saved):
    shard(saved)
    (saved / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors, which is not there"):
        load_hf(saved)


def test_truncated_file_is_named(saved):
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match="model.safetensors: damaged or truncated"):
        load_hf(saved)


def test_wrong_shape_and_missing_tensor_are_named(saved):
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:5]}, saved / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \(5, 16\); config.json implies \(24, 16\)"):
        load_hf(saved)
    del tensors[name]
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_hf(saved)


@pytest.mark.parametrize("change,message", [
    ({"model_type": "qwen2_moe"}, "mixture-of-experts"),
    ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
])
def test_unsupported_is_refused_with_the_reason(saved, change, message):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load_hf(saved)


def test_interrupted_save_keeps_what_was_there(params, saved, monkeypatch):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    monkeypatch.setattr("rl_speed.policy.hf.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_hf(saved, params, MODEL)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


def test_save_that_cannot_move_into_place_restores_what_was_there(params, saved, monkeypatch):
    before, rename = {p.name: p.read_bytes() for p in saved.iterdir()}, pathlib.Path.rename

    def failing(self, target):
        if pathlib.Path(target) == saved and "-old-" not in self.name:
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", failing)
    with pytest.raises(OSError, match="no space"):
        save_hf(saved, params, MODEL)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


def test_save_replaces_an_existing_directory_whole(params, saved):
    (saved / "stale.txt").write_text("of an earlier save")
    save_hf(saved, jax.tree.map(lambda x: x + 1, params), MODEL, extra={"made_by.json": {"seed": 3}})
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "made_by.json", "model.safetensors"]
    np.testing.assert_array_equal(load_hf(saved)[0]["embed"], params["embed"] + 1)
    assert json.loads((saved / "made_by.json").read_text()) == {"seed": 3}


def test_damaged_indices_and_shards_are_named(saved, tmp_path):
    shard(saved)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    name = "model.norm.weight"
    wrong = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])
    write = lambda value: (saved / "model.safetensors.index.json").write_text(json.dumps(value))
    write({"weight_map": {**index["weight_map"], name: wrong}})
    with pytest.raises(ValueError, match=f"{wrong}: cannot read tensor {name}"):
        load_hf(saved)
    write({"metadata": {}})
    with pytest.raises(ValueError, match="index.json has no weight_map"):
        load_hf(saved)
    write(index)
    data = (saved / wrong).read_bytes()
    (saved / wrong).write_bytes(data[:-7])
    with pytest.raises(ValueError, match=f"{wrong}: damaged or truncated"):
        load_hf(saved)


def test_directories_without_config_or_weights_are_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor"):
        load_hf(saved)
    (saved / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        load_hf(saved)
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_hf(saved)
