"""The shape of a policy, and its translation from and to a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# What sets one Hugging Face family apart from another: the switches of ModelConfig that its config.json leaves implicit.
# A new family is a row here, the switch in ModelConfig, and (if it has new tensors) rows in hf.TENSORS.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"architecture": "Qwen2ForCausalLM", "switches": {"qkv_bias": True}},
}

# ModelConfig field -> config.json field, where the two are plain copies.
HF_FIELDS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_position": "max_position_embeddings",
}

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm before each block, rotary positions, grouped queries, SwiGLU.

    Frozen and hashable, so that it is a static argument of jit.

    Attributes:
      vocab_size: V, rows of the embedding, padding rows included.
      width: D, the residual stream.
      layers: N.
      heads: H, query heads. kv_heads: G, key/value heads; G divides H.
      head_dim: K, even.
      mlp_width: F.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      qkv_bias: whether the query, key and value projections have a bias (Qwen2: yes).
      tie_embeddings: whether the output head is the embedding transposed.
      max_position: positions the checkpoint was made for, in tokens; not enforced here.
      dtype: of activations and of matrix products ("float32" or "bfloat16"). Parameters are kept in float32; norms,
        rotary angles, softmax and logits are float32 either way.
      remat: recompute each layer in the backward pass instead of keeping its activations.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    tie_embeddings: bool = True
    max_position: int = 32768
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for rotary positions, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32", remat: bool = False) -> "ModelConfig":
        """The config that computes what transformers computes for this config.json.

        Args:
          hf: the parsed config.json, as transformers 4 or 5 write it.
          dtype, remat: as in the class.

        Raises:
          ValueError: for anything this policy would compute differently, with the reason.
        """
        refuse_unsupported(hf)
        missing = [name for name in HF_FIELDS.values() if name not in hf and name not in ("num_key_value_heads",
                                                                                         "tie_word_embeddings")]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        fields = {ours: hf[theirs] for ours, theirs in HF_FIELDS.items() if theirs in hf}
        fields.setdefault("tie_embeddings", False)
        if fields.get("kv_heads") is None:
            fields["kv_heads"] = hf["num_attention_heads"]
        head_dim = hf.get("head_dim")
        if head_dim is None:
            if hf["hidden_size"] % hf["num_attention_heads"]:
                raise ValueError(f"config.json gives no head_dim, and hidden_size {hf['hidden_size']} is not a multiple "
                                 f"of num_attention_heads {hf['num_attention_heads']}")
            head_dim = hf["hidden_size"] // hf["num_attention_heads"]
        return cls(**fields, head_dim=head_dim, rope_theta=rope_theta(hf), dtype=dtype, remat=remat,
                   **FAMILIES[hf["model_type"]]["switches"])

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 open. Raises ValueError if no known family has these switches."""
        for model_type, family in FAMILIES.items():
            if all(getattr(self, name) == value for name, value in family["switches"].items()):
                break
        else:
            raise ValueError(f"no Hugging Face family has the switches of {self}; known families: "
                             f"{', '.join(FAMILIES)}")
        hf = {"architectures": [family["architecture"]], "model_type": model_type, "hidden_act": "silu",
              "attention_dropout": 0.0, "head_dim": self.head_dim, "rope_theta": self.rope_theta, "rope_scaling": None,
              "use_sliding_window": False, "sliding_window": None, "torch_dtype": "float32", "use_cache": True}
        return hf | {theirs: getattr(self, ours) for ours, theirs in HF_FIELDS.items()}


def rope_theta(hf: Mapping[str, Any]) -> float:
    """The rotary base: `rope_theta` in transformers 4, `rope_parameters.rope_theta` in transformers 5."""
    theta = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json gives neither rope_theta nor rope_parameters.rope_theta")
    return float(theta)


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raise ValueError, with the reason, where this policy would silently compute something else."""
    model_type = hf.get("model_type")
    if model_type is None:
        raise ValueError("config.json has no model_type: is this a Hugging Face model directory?")
    if "moe" in model_type or hf.get("num_experts") or hf.get("num_local_experts"):
        raise ValueError(f"mixture-of-experts models are not supported (model_type {model_type!r}): every layer here has "
                         "one dense MLP")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(f"quantised weights ({method}) are not supported; use the bfloat16 or float32 checkpoint")
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" or hf.get("use_mrope"):
        raise ValueError(f"rotary scaling {('mrope' if hf.get('use_mrope') else kind)!r} is not supported: positions "
                         "would be rotated by other angles than the checkpoint was trained with")
    if scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported: every head dimension is rotated here")
    window = hf.get("use_sliding_window") and hf.get("sliding_window") is not None
    windowed = window and hf.get("max_window_layers", 0) < hf.get("num_hidden_layers", 0)
    if windowed or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError(f"sliding-window attention is in use (sliding_window {hf.get('sliding_window')}) and not "
                         "supported: every layer here attends to all earlier tokens")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported: the MLP projections here have no bias")
