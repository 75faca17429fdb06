"""The shape of a policy, and its conversion from and to a Hugging Face config.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """Differences between Hugging Face model families.

    Attributes:
      architecture: name of the class in transformers.
      switches: values of ModelConfig fields that the family's config.json leaves implicit.
      head_dim: transformers' default if config.json has none; None: hidden_size /
        num_attention_heads.
      tied: transformers' default of tie_word_embeddings.
      written: further fields to write to config.json, so that no transformers default applies.
    """

    architecture: str
    switches: Mapping[str, bool]
    head_dim: int | None = None
    tied: bool = False
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# By model_type. README.md of this folder has what a new family needs besides its row here.
FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True, "qk_norm": False},
        written={"use_sliding_window": False, "sliding_window": None},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qkv_bias": False, "qk_norm": True},
        head_dim=128,
        written={"use_sliding_window": False, "sliding_window": None, "attention_bias": False},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        {"qkv_bias": False, "qk_norm": False},
        written={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family("MistralForCausalLM", {"qkv_bias": False, "qk_norm": False}),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"qkv_bias": False, "qk_norm": False},
        tied=True,
        # transformers' default is an id of the 3B model.
        written={"attention_bias": False, "mlp_bias": False, "pad_token_id": None},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "qkv_bias": False,
            "qk_norm": True,
            "post_norms": True,
            "offset_norms": True,
            "scaled_embed": True,
        },
        head_dim=256,
        tied=True,
        written={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"qkv_bias": False, "joint_qk_norm": True, "post_norms": True, "no_input_norms": True},
        # transformers' defaults are ids of the 7B model.
        written={"attention_bias": False, "pad_token_id": None, "eos_token_id": None},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qkv_bias": False, "qk_norm": True},
        written={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
# Families without windows, whatever config.json says.
NO_WINDOWS = ("llama", "olmo2")
# Switches of families; those that a family does not name are off.
SWITCHES = sorted({name for family in FAMILIES.values() for name in family.switches})

# ModelConfig field -> config.json field, for fields that are copied unchanged.
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
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling "llama3": low frequencies are divided by `factor`, high ones are kept, and
    those between are interpolated.

    A frequency is low if it makes fewer than `low_freq_factor` turns in the original context, and
    high if it makes more than `high_freq_factor`.
    Source: Llama 3.1; `rope_type` "llama3" in transformers.

    Attributes:
      original_max_position: tokens of the context before scaling,
        `original_max_position_embeddings`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        _check_factor(self)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be above 0 and below "
                f"rope_scaling.high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )
        if self.original_max_position < 1:
            raise ValueError(
                "rope_scaling.original_max_position_embeddings must be at least 1, got "
                f"{self.original_max_position}"
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Rotary scaling "linear": all frequencies are divided by `factor`.

    Source: Chen et al., arXiv 2306.15595; `rope_type` "linear" in transformers.
    """

    factor: float

    def __post_init__(self):
        _check_factor(self)


def _check_factor(scaling: Any) -> None:
    if not scaling.factor >= 1:
        raise ValueError(f"rope_scaling.factor must be at least 1, got {scaling.factor}")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Rotary scaling "yarn": frequencies that make fewer than `beta_slow` turns in the original
    context are divided by `factor`, those of more than `beta_fast` are kept, and those between are
    interpolated by their index. Rotated queries and keys are multiplied by `attention_factor`.

    Source: Peng et al., arXiv 2309.00071; `rope_type` "yarn" in transformers.

    Attributes:
      truncate: whether the ends of the band are rounded to whole indices.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool

    def __post_init__(self):
        _check_factor(self)
        if not 0 < self.beta_slow < self.beta_fast or self.original_max_position < 1:
            raise ValueError(
                "rope_scaling.beta_slow must be above 0 and below rope_scaling.beta_fast, and "
                f"original_max_position_embeddings at least 1: {self}"
            )


Scaling = RopeScaling | LinearScaling | YarnScaling
_ORIGINAL = {"original_max_position": "original_max_position_embeddings"}
# rope_type -> (class, its field -> field of config.json's rope_scaling).
HF_SCALING: Mapping[str, tuple[type, Mapping[str, str]]] = {
    "llama3": (
        RopeScaling,
        {n: n for n in ("factor", "low_freq_factor", "high_freq_factor")} | _ORIGINAL,
    ),
    "linear": (LinearScaling, {"factor": "factor"}),
    "yarn": (
        YarnScaling,
        {n: n for n in ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate")}
        | _ORIGINAL,
    ),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: `theta` is the base of the frequencies; `scaling` None means none."""

    theta: float
    scaling: Scaling | None = None


MLPS = ("swiglu", "geglu")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Properties that may differ between the layers of a model. All layers have weights of the same
    shapes.

    Attributes:
      window: number of tokens that a query attends to, itself included; None: all earlier tokens.
      rope: rotary positions; None takes `ModelConfig.rope_theta` and `rope_scaling`.
      rotary: whether queries and keys are rotated at all.
      mlp: kind of MLP, one of MLPS; see `block.mlp`.
    """

    window: int | None = None
    rope: Rope | None = None
    rotary: bool = True
    mlp: str = "swiglu"

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"LayerSpec.window must be at least 1 token, got {self.window}")
        if self.mlp not in MLPS:
            raise ValueError(f"LayerSpec.mlp must be one of {', '.join(MLPS)}, got {self.mlp!r}")


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts of every layer, each a gated MLP; see `block.experts`.

    Attributes:
      count: E, number of experts.
      active: A, number of experts that compute a token.
      normed: whether the router's weights of these are divided by their sum.
    """

    count: int
    active: int
    normed: bool

    def __post_init__(self):
        if not 1 <= self.active <= self.count:
            raise ValueError(
                "num_experts_per_tok must be at least 1 and at most num_experts, got "
                f"{self.active} and {self.count}"
            )


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a matrix W of `targets` acts as W + (alpha / rank) A B, and only A and B
    are trained.

    Source: Hu et al., arXiv 2106.09685. A starts with variance 1 / (3 fan_in), as in PEFT, B with
    zeros.

    Attributes:
      rank: columns of A and rows of B.
      targets: names of weights; matrices of the layers.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        if self.rank < 1 or not self.alpha > 0 or not self.targets:
            raise ValueError(
                f"LoRA needs a rank of at least 1, an alpha above 0 and targets: {self}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters' weights."""
        return tuple(f"{target}_{part}" for target in self.targets for part in "ab")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm before or after each block, rotary positions, grouped
    queries, a gated MLP or experts.

    Frozen and hashable, so it can be a static argument of jit.

    Attributes:
      vocab_size: V, number of embedding rows, padding rows included.
      width: D, width of the residual stream.
      layers: N, number of layers.
      heads: H, number of query heads.
      kv_heads: G, number of key/value heads; G divides H.
      head_dim: K, width of a head; even.
      mlp_width: F, hidden width of the MLP, or of each expert.
      rope_theta: base of the rotary frequencies, for layers whose spec has no `rope`.
      rope_scaling: scaling of these frequencies for longer contexts; None: none.
      norm_eps: epsilon added to the mean square in RMSNorm.
      qkv_bias: whether the query, key and value projections have a bias (Qwen2).
      qk_norm: whether queries and keys are RMS-normed over head_dim before rotation, each with one
        scale for all heads (Qwen3).
      joint_qk_norm: whether queries and keys are RMS-normed over all heads together before rotation
        (OLMo 2).
      post_norms: whether the outputs of attention and MLP are RMS-normed (Gemma 3, OLMo 2).
      no_input_norms: whether attention and MLP read the residual stream without a norm (OLMo 2).
      offset_norms: whether a norm's weight is its scale - 1 (Gemma 3).
      scaled_embed: whether embeddings are multiplied by sqrt(D) (Gemma 3).
      query_scalar: scores are divided by its square root; 0: by that of head_dim.
      experts: the experts of each layer; None: one MLP.
      tie_embeddings: whether the output head is the embedding transposed.
      max_position: context length of the checkpoint in tokens; not enforced here.
      dtype: dtype of activations and matrix products ("float32" or "bfloat16"). Parameters (but
        frozen matrices, with `lora`), norms, rotary angles, softmax and logits are always float32.
      remat: whether the backward pass recomputes each layer instead of keeping its activations;
        "products": all of it but products with weights.
      platform: platform to compile for ("cpu", "gpu" or "tpu"), which selects the kernels. It may
        differ from the platform that traces the program.
      unused_ids: ranges (first, one past the last) of ids that are not tokens, such as embedding
        padding. Their probability is 0, in generation and in training.
      interpret: whether TPU kernels run in interpret mode on any device: slow, for tests.
      specs: properties of the layers of one period. Layer i has `specs[i % len(specs)]`; the last
        period may be incomplete.
      trainable: names of the weights that training changes, such as ("wq", "wv"); None: all.
      lora: low-rank adapters, the only weights that training then changes. The others, but for
        norms, are held in `dtype`.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    joint_qk_norm: bool = False
    post_norms: bool = False
    no_input_norms: bool = False
    offset_norms: bool = False
    scaled_embed: bool = False
    query_scalar: float = 0.0
    experts: Experts | None = None
    tie_embeddings: bool = True
    max_position: int = 32768
    dtype: str = "float32"
    remat: bool | str = False
    platform: str = "cpu"
    unused_ids: tuple[tuple[int, int], ...] = ()
    interpret: bool = False
    specs: tuple[LayerSpec, ...] = (LayerSpec(),)
    trainable: tuple[str, ...] | None = None
    lora: Lora | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "width",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "mlp_width",
            "max_position",
        ):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name} must be a whole number of at least 1, got "
                    f"{getattr(self, name)!r}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads must be a multiple of model.kv_heads, got {self.heads} and "
                f"{self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim must be even for rotary positions, got {self.head_dim}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.platform not in PLATFORMS:
            raise ValueError(
                f"model.platform must be one of {', '.join(PLATFORMS)}, got {self.platform!r}"
            )
        if not 1 <= len(self.specs) <= self.layers:
            raise ValueError(
                f"model.specs must hold between 1 and model.layers ({self.layers}) specs, got "
                f"{len(self.specs)}"
            )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary positions of each of `specs`."""
        own = Rope(self.rope_theta, self.rope_scaling)
        return tuple(spec.rope or own for spec in self.specs)

    @property
    def has_windows(self) -> bool:
        """Whether any layer attends only to a window of the earlier tokens."""
        return any(spec.window is not None for spec in self.specs)

    @property
    def ids(self) -> int:
        """Number of ids up to the last token: `vocab_size` without the padding at its end."""
        padded = self.unused_ids and self.unused_ids[-1][1] == self.vocab_size
        return self.unused_ids[-1][0] if padded else self.vocab_size

    @classmethod
    def from_hf(
        cls,
        hf: Mapping[str, Any],
        dtype: str = "float32",
        remat: bool | str = False,
        platform: str = "cpu",
        lora: Lora | None = None,
    ) -> "ModelConfig":
        """Makes the config with which a policy computes what transformers computes.

        Args:
          hf: the parsed config.json, as transformers 4 or 5 write it.
          dtype, remat, platform, lora: see the class.

        Raises:
          ValueError: config.json is incomplete, or asks for something that this policy does not
            compute; the message gives the field and the reason.
        """
        try:
            return cls._from_hf(hf, dtype=dtype, remat=remat, platform=platform, lora=lora)
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"config.json has a field of an impossible type or value ({error}); compare it "
                "with the original model's"
            ) from None

    @classmethod
    def _from_hf(cls, hf: Mapping[str, Any], **chosen: Any) -> "ModelConfig":
        refuse_unsupported(hf)
        hf = {**hf, **_gemma_ropes(hf)}
        experts = _experts(hf)
        if experts is not None:  # intermediate_size is that of layers without experts
            hf["intermediate_size"] = hf.get("moe_intermediate_size", 768)
        family = FAMILIES[hf["model_type"]]
        missing = [
            name
            for name in HF_FIELDS.values()
            if name not in hf and name not in ("num_key_value_heads", "tie_word_embeddings")
        ]
        if missing:
            raise ValueError(
                f"config.json lacks {', '.join(missing)}; take them from the original model"
            )
        fields = {ours: hf[theirs] for ours, theirs in HF_FIELDS.items() if theirs in hf}
        fields.setdefault("tie_embeddings", family.tied)
        if fields.get("kv_heads") is None:
            fields["kv_heads"] = hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or family.head_dim
        if head_dim is None:
            if hf["hidden_size"] % hf["num_attention_heads"]:
                raise ValueError(
                    f"config.json gives no head_dim, and hidden_size {hf['hidden_size']} is not a "
                    f"multiple of num_attention_heads {hf['num_attention_heads']}: add head_dim"
                )
            head_dim = hf["hidden_size"] // hf["num_attention_heads"]
        return cls(
            **fields,
            head_dim=head_dim,
            rope_theta=rope_theta(hf),
            rope_scaling=rope_scaling(hf),
            specs=layer_specs(hf),
            query_scalar=_query_scalar(hf, head_dim),
            experts=experts,
            **chosen,
            **family.switches,
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Returns a config.json for transformers 4 and 5; `dtype` is that of the stored weights.

        Raises ValueError if no family in FAMILIES has these switches, or layers differ.
        """
        for model_type, family in FAMILIES.items():
            if all(getattr(self, name) == family.switches.get(name, False) for name in SWITCHES):
                if (layers := written_layers(self, model_type)) is not None:
                    break
        else:
            raise ValueError(
                f"no Hugging Face family has the switches and layers of {self}; known families: "
                f"{', '.join(FAMILIES)}"
            )
        # Version 4 does not read rope_parameters. Version 5 reads these fields if there are none.
        scaling = None
        for kind, (cls, fields) in HF_SCALING.items():
            if isinstance(self.rope_scaling, cls):
                values = {
                    theirs: getattr(self.rope_scaling, ours) for ours, theirs in fields.items()
                }
                scaling = {"rope_type": kind, **values}
        return {
            "architectures": [family.architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "torch_dtype": dtype,
            "use_cache": True,
            **family.written,
            **layers,
            **{theirs: getattr(self, ours) for ours, theirs in HF_FIELDS.items()},
        }


def rope_theta(hf: Mapping[str, Any]) -> float:
    """Returns the rotary base: `rope_theta` in transformers 4, `rope_parameters.rope_theta` in
    transformers 5. Raises ValueError if config.json has neither.
    """
    theta = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json gives neither rope_theta nor rope_parameters.rope_theta")
    return float(theta)


def scaling_fields(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json's fields of rotary scaling: `rope_scaling` in transformers 4,
    `rope_parameters` in transformers 5.
    """
    return {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}


def rope_scaling(hf: Mapping[str, Any]) -> RopeScaling | None:
    """Returns the rotary scaling; None for plain rotary positions.

    Raises ValueError that names the field for an unknown type, or a missing or impossible value.
    """
    found = scaling_fields(hf)
    kind = found.get("rope_type", found.get("type")) or "default"
    if hf.get("use_mrope"):
        kind = "mrope"
    if kind == "default":
        return None
    if kind not in HF_SCALING:
        raise ValueError(
            f"rotary scaling {kind!r} (rope_scaling.rope_type) is not supported: positions would "
            "be rotated by other angles than the checkpoint was trained with; known "
            f"are default, {', '.join(HF_SCALING)}"
        )
    cls, fields = HF_SCALING[kind]
    if kind == "yarn":
        found = {**_yarn_defaults(found), **{n: v for n, v in found.items() if v is not None}}
    missing = [name for name in fields.values() if found.get(name) is None]
    if missing:
        raise ValueError(
            f"rotary scaling {kind!r} lacks {', '.join('rope_scaling.' + name for name in missing)}"
        )
    return cls(**{ours: found[theirs] for ours, theirs in fields.items()})


def _yarn_defaults(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what transformers takes for fields of "yarn" that config.json leaves out."""
    factor = found.get("factor") or 1.0

    def attention(scale):
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scales = found.get("mscale"), found.get("mscale_all_dim")
    ratio = attention(scales[0]) / attention(scales[1]) if all(scales) else attention(1.0)
    return {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": ratio, "truncate": True}


def _gemma_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Gemma 3's rotary fields: those of layers without a window under the names of other
    families, and `rope_local_base_freq` of layers with one. {} for other families.

    Raises ValueError if the rotation of layers with a window is scaled.
    """
    if hf["model_type"] != "gemma3_text":
        return {}
    each = hf.get("rope_parameters") or {}
    whole, local = each.get("full_attention") or {}, each.get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise ValueError(f"rotary scaling {kind!r} of layers with a window is not supported")
    scaling = {"rope_theta": hf.get("rope_theta") or 1e6, **(hf.get("rope_scaling") or {}), **whole}
    base = local.get("rope_theta") or hf.get("rope_local_base_freq") or 1e4
    return {"rope_parameters": scaling, "rope_scaling": None, "rope_local_base_freq": base}


def _query_scalar(hf: Mapping[str, Any], head_dim: int) -> float:
    if hf["model_type"] != "gemma3_text":
        return 0.0
    scalar = float(hf.get("query_pre_attn_scalar", 256))
    return 0.0 if scalar == head_dim else scalar


def _experts(hf: Mapping[str, Any]) -> Experts | None:
    if hf["model_type"] != "qwen3_moe":
        return None
    count = hf.get("num_experts", hf.get("num_local_experts", 128))  # transformers 4, 5
    return Experts(count, hf.get("num_experts_per_tok", 8), bool(hf.get("norm_topk_prob")))


def layer_specs(hf: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Returns the properties of one period of layers: windows, and layers without rotation.

    Raises ValueError if config.json has a kind of attention that is not known.
    """
    kind, count = hf["model_type"], hf["num_hidden_layers"]
    gemma = kind == "gemma3_text"
    rotary, windowed = [True] * count, [False] * count
    window = hf.get("sliding_window")
    if kind == "mistral":
        window = hf.get("sliding_window", 4096)
        windowed = [window is not None] * count
    elif kind == "smollm3":
        every = hf.get("no_rope_layer_interval", 4)
        listed = hf.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
        rotary = [bool(x) for x in listed[:count]]
        windowed = [not x for x in rotary]
    elif gemma:
        window = hf.get("sliding_window", 4096)
        windowed = [(i + 1) % hf.get("sliding_window_pattern", 6) > 0 for i in range(count)]
    elif kind == "qwen3_moe":
        window = hf.get("sliding_window", 4096)
        windowed = [True] * count
    elif kind not in NO_WINDOWS:
        windowed = [i >= hf.get("max_window_layers", 28) for i in range(count)]
    if kind not in (*NO_WINDOWS, "mistral"):
        types = hf.get("layer_types") or []
        if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
            raise ValueError(
                f"layer_types has {', '.join(others)}, which is not supported: layers attend to "
                "all earlier tokens, or to a window of them (sliding_attention)"
            )
        if types:
            windowed = [name == "sliding_attention" for name in types[:count]]
        used = (gemma or bool(hf.get("use_sliding_window"))) and window is not None
        if "sliding_attention" in types and not used:
            raise ValueError(
                "layer_types has sliding_attention, but there is no window: set use_sliding_window "
                "and sliding_window"
            )
        windowed = [used and x for x in windowed]
    if len(rotary) < count or len(windowed) < count:
        raise ValueError(f"no_rope_layers or layer_types has fewer than {count} entries")
    specs = [LayerSpec(window if w else None, rotary=r) for w, r in zip(windowed, rotary)]
    if gemma:
        local = Rope(float(hf["rope_local_base_freq"]))
        specs = [LayerSpec(s.window, local if s.window else None, mlp="geglu") for s in specs]
    periods = (n for n in range(1, count + 1) if specs == (specs[:n] * count)[:count])
    return tuple(specs[: next(periods)])


def written_layers(config: ModelConfig, model_type: str) -> dict[str, Any] | None:
    """Returns the fields of a family's config.json that say how layers differ; None if the family
    has no such layers.
    """
    experts = config.experts
    if (experts is not None) != (model_type == "qwen3_moe"):
        return None
    specs = [config.specs[i % len(config.specs)] for i in range(config.layers)]
    names = {True: "sliding_attention", False: "full_attention"}
    types = [names[spec.window is not None] for spec in specs]
    windows = {spec.window for spec in specs} - {None}
    if model_type == "gemma3_text":
        locals_ = {spec.rope for spec in specs if spec.window is not None}
        if len(windows) != 1 or len(locals_) != 1 or {spec.mlp for spec in specs} != {"geglu"}:
            return None
        return {
            "sliding_window": windows.pop(),
            "layer_types": types,
            "rope_local_base_freq": locals_.pop().theta,
            "query_pre_attn_scalar": int(config.query_scalar or config.head_dim),
        }
    known = all(spec == LayerSpec(spec.window, rotary=spec.rotary) for spec in specs)
    rotary = all(spec.rotary for spec in specs)
    if not known or len(windows) > 1 or not (rotary or model_type == "smollm3"):
        return None
    window = next(iter(windows), None)
    if model_type in NO_WINDOWS:
        return {} if window is None else None
    same = all(spec.window == window for spec in specs)
    if model_type == "mistral":
        return {"sliding_window": window} if same else None
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    if experts is not None:
        fields |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.active,
            "norm_topk_prob": experts.normed,
            "moe_intermediate_size": config.mlp_width,
        }
        return fields if same else None
    fields["layer_types"] = types
    if model_type == "smollm3":
        fields["no_rope_layers"] = [int(spec.rotary) for spec in specs]
    return fields if window is not None or model_type == "smollm3" else {}


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises ValueError, with the field and the reason, if config.json asks for something that this
    policy does not compute.
    """
    model_type = hf.get("model_type")
    if model_type is None:
        raise ValueError(
            "config.json has no model_type: give the config.json of a Hugging Face model; "
            f"supported types: {', '.join(FAMILIES)}"
        )
    experts = [
        name for name in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(name)
    ]
    if model_type == "qwen3_moe":
        plain = {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])}
        if dense := [f"{name} {hf[name]}" for name in plain if hf.get(name) not in plain[name]]:
            raise ValueError(
                f"layers without experts are not supported ({', '.join(dense)}): all layers here "
                "have weights of the same shapes"
            )
    elif "moe" in model_type or experts:
        raise ValueError(
            "mixture-of-experts models are not supported "
            f"({', '.join([f'model_type {model_type!r}', *experts])}), but for qwen3_moe"
        )
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(
            f"quantised weights ({method}) are not supported (quantization_config); use the "
            "bfloat16 or float32 checkpoint"
        )
    if scaling_fields(hf).get(
        "partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)
    ) not in (None, 1, 1.0):
        raise ValueError(
            "partial_rotary_factor other than 1 is not supported: every head "
            "dimension is rotated here"
        )
    if model_type == "gemma3_text":
        activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
        capped = [n for n in ("attn", "final") if hf.get(f"{n}_logit_softcapping")]
        if activation != "gelu_pytorch_tanh" or capped or hf.get("use_bidirectional_attention"):
            raise ValueError(
                "Gemma 3 is supported only with hidden_activation gelu_pytorch_tanh, and without "
                "attn_logit_softcapping, final_logit_softcapping and use_bidirectional_attention"
            )
    elif hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("attention_bias") and not FAMILIES[model_type].switches["qkv_bias"]:
        raise ValueError(
            f"attention_bias is not supported for model_type {model_type!r}: its "
            "projections have no bias here"
        )
    if hf.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported: the MLP projections here have no bias")
