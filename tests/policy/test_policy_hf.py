"""Hugging Face directories: shards, precisions, refusals, damage."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_speed.policy import ModelConfig, encode_prompt, end_token_ids, init, load_hf, load_tokenizer, save_hf

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


@pytest.fixture(scope="module")
def qwen(real_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(real_data / "tokenizer" / "qwen2.5" / name, directory)
    shutil.copy(real_data / "tokenizer" / "qwen2.5" / "tokenizer_config.qwen2.5-0.5b-instruct.json",
                directory / "tokenizer_config.json")
    return directory


def test_real_tokenizer_encodes_every_reference_text(real_data, qwen):
    tokenizer, checked = load_tokenizer(qwen), 0
    for line in (real_data / "tokenizer" / "reference_encodings.jsonl").read_text().splitlines():
        row = json.loads(line)
        if any(tag in row["text"] for tag in ("<think>", "</think>", "<tool_response>")) or "qwen3" not in row:
            continue
        assert tokenizer.encode(row["text"]) == row["qwen3"], row["text"]
        checked += 1
    assert checked > 100


def test_chat_prompt_has_each_special_token_once(qwen):
    tokenizer = load_tokenizer(qwen)
    ids = encode_prompt(tokenizer, "What is 1+1?", "chat")
    text = tokenizer.decode(ids)
    assert text.count("<|im_start|>user") == 1 and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3 and text.count("<|im_end|>") == 2  # system, user, and the open assistant turn
    assert encode_prompt(tokenizer, "x", "Q: {question}") == tokenizer.encode("Q: x")
    with pytest.raises(ValueError, match="no {question}"):
        encode_prompt(tokenizer, "x", "Q:")


def test_end_tokens_come_from_generation_config_and_tokenizer(qwen, tmp_path):
    tokenizer = load_tokenizer(qwen)
    shutil.copytree(qwen, tmp_path / "t")
    assert end_token_ids(tmp_path / "t", tokenizer) == (151645,)
    for value, want in ((151643, (151643, 151645)), ([151645, 151643], (151645, 151643))):
        (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert end_token_ids(tmp_path / "t", tokenizer) == want


def test_missing_tokenizer_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
