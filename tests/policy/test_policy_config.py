"""Config: real config.json files, what is refused and why, the way back."""

import dataclasses
import json

import pytest

from rl_speed.policy import ModelConfig

TINY = {"model_type": "qwen2", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu"}


@pytest.mark.parametrize("name, shape", [
    # layers, width, heads, kv_heads, mlp_width, tied: as published on the model cards.
    ("Qwen2.5-0.5B", (24, 896, 14, 2, 4864, True)),
    ("Qwen2.5-1.5B", (28, 1536, 12, 2, 8960, True)),
    ("Qwen2.5-Math-1.5B", (28, 1536, 12, 2, 8960, True)),
    ("Qwen2.5-Math-7B", (28, 3584, 28, 4, 18944, False)),
])
def test_real_qwen2_configs_are_read(real_data, name, shape):
    hf = json.loads((real_data / "configs" / f"{name}.config.json").read_text())
    config = ModelConfig.from_hf(hf)
    assert (config.layers, config.width, config.heads, config.kv_heads, config.mlp_width, config.tie_embeddings) == shape
    assert config.head_dim * config.heads == config.width and config.qkv_bias
    assert config.rope_theta == hf["rope_theta"] and config.norm_eps == hf["rms_norm_eps"]


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B"])
def test_real_configs_of_other_families_are_refused_by_name(real_data, name):
    hf = json.loads((real_data / "configs" / f"{name}.config.json").read_text())
    with pytest.raises(ValueError, match=f"model_type '{hf['model_type']}' is not supported; supported: qwen2"):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_through_config_json(tied):
    config = ModelConfig(vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_width=48, rope_theta=5e5,
                         norm_eps=1e-5, tie_embeddings=tied, max_position=77)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert ModelConfig.from_hf(config.to_hf(), dtype="bfloat16", remat=True) == dataclasses.replace(
        config, dtype="bfloat16", remat=True)


def test_transformers_opens_and_writes_the_same_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_width=48, rope_theta=5e5)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Qwen2Config" and theirs.num_key_value_heads == 2
    theirs.save_pretrained(tmp_path / "again")  # in the installed version's own layout
    assert ModelConfig.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config


def test_defaults_that_config_json_leaves_out():
    without = lambda *names: {name: value for name, value in TINY.items() if name not in names}
    assert ModelConfig.from_hf(TINY).head_dim == 8
    assert ModelConfig.from_hf(without("num_key_value_heads")).kv_heads == 4
    assert ModelConfig.from_hf(without("tie_word_embeddings")).tie_embeddings is False
    theta = {"rope_parameters": {"rope_theta": 123.0, "rope_type": "default"}}
    assert ModelConfig.from_hf({**without("rope_theta"), **theta}).rope_theta == 123.0
    for name in ("hidden_size", "vocab_size", "rms_norm_eps"):
        with pytest.raises(ValueError, match=f"config.json lacks {name}"):
            ModelConfig.from_hf(without(name))
    with pytest.raises(ValueError, match="neither rope_theta"):
        ModelConfig.from_hf(without("rope_theta"))
    with pytest.raises(ValueError, match="has no model_type"):
        ModelConfig.from_hf(without("model_type"))


@pytest.mark.parametrize("harmless", [
    {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 24},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},  # the window starts beyond the last layer
    {"layer_types": ["full_attention", "full_attention"]},
    {"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}, {"quantization_config": None},
])
def test_settings_that_change_nothing_are_accepted(harmless):
    assert ModelConfig.from_hf({**TINY, **harmless}) == ModelConfig.from_hf(TINY)


@pytest.mark.parametrize("change, reason", [
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window attention is in use"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is in use"),
    ({"model_type": "qwen2_moe"}, "mixture-of-experts"),
    ({"num_experts": 8}, "mixture-of-experts"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rotary scaling 'yarn'"),
    ({"rope_scaling": {"rope_type": "of_the_future"}}, "rotary scaling 'of_the_future'"),
    ({"use_mrope": True}, "rotary scaling 'mrope'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple of num_attention_heads"),
])
def test_what_would_be_computed_differently_is_refused_with_the_reason(change, reason):
    with pytest.raises(ValueError, match=reason):
        ModelConfig.from_hf({**TINY, **change})


@pytest.mark.parametrize("change, reason", [
    ({"kv_heads": 3}, "model.heads must be a multiple of model.kv_heads, got 4 and 3"),
    ({"head_dim": 7}, "model.head_dim must be even"),
    ({"layers": 0}, "model.layers must be at least 1, got 0"),
    ({"dtype": "float16"}, "model.dtype must be one of float32, bfloat16, got 'float16'"),
])
def test_impossible_settings_name_the_field(change, reason):
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**{**dict(vocab_size=9, width=8, layers=1, heads=4, kv_heads=2, head_dim=2, mlp_width=8), **change})


def test_switches_of_no_known_family_are_not_written():
    config = dataclasses.replace(ModelConfig.from_hf(TINY), qkv_bias=False)
    with pytest.raises(ValueError, match="no Hugging Face family has the switches"):
        config.to_hf()
