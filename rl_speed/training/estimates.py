"""How long the parts of a step take on a chip that is not here: what its limits leave, and what its
compiler says, where it says anything. Nothing of it is measured.
"""

import dataclasses
from collections.abc import Mapping

from rl_speed.config import Config
from rl_speed.hlo import Phases
from rl_speed.policy import DecodeAttention, ModelConfig, num_params
from rl_speed.policy.splash import BLOCK
from rl_speed.policy.transformer import attention_kernel
from rl_speed.targets import Chip
from rl_speed.update.ragged import LOOP, PieceShape

# What kernels are assumed to reach of a chip's limits, since no compiler estimates them: of its
# operations where they multiply, of its bandwidth where they read.
KERNEL_FLOPS = 0.6
KERNEL_BANDWIDTH = 0.8


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds.

    Attributes:
      bound: what the chip's limits leave. compiler: by its cycles, without kernels; None where it
        gives none. kernels: at the efficiency assumed above.
    """

    bound: float
    compiler: float | None = None
    kernels: float = 0.0

    def __add__(self, other: "Estimate") -> "Estimate":
        known = self.compiler is not None and other.compiler is not None
        compiler = self.compiler + other.compiler if known else None
        return Estimate(self.bound + other.bound, compiler, self.kernels + other.kernels)

    def times(self, factor: float) -> "Estimate":
        """Of so many of it."""
        compiler = None if self.compiler is None else factor * self.compiler
        return Estimate(factor * self.bound, compiler, factor * self.kernels)

    def seconds(self, reached: float) -> float:
        """The compiler's and the kernels'; else the bound, of whose limit `reached` is reached."""
        return self.bound / reached if self.compiler is None else self.compiler + self.kernels

    def text(self) -> str:
        """One line."""
        least = f"at least {1e3 * self.bound:,.1f} ms by the chip's limits"
        if self.compiler is None:
            return f"{least}; not measured"
        total = self.compiler + self.kernels
        return (
            f"{1e3 * total:,.1f} ms, of which {1e3 * self.kernels:,.1f} ms kernels; {least}, "
            f"{total / self.bound:.2f} times; estimated, not measured"
        )


@dataclasses.dataclass(frozen=True)
class Units:
    """What a step is made of.

    Attributes:
      call: a generation call, before it draws: weights are made ready for decoding. prefill: so
        many contexts as are read at once. decode: one token in every slot of a shard, but for what
        the tokens that they hold cost. held: reading the keys and values of one of these, once.
      optimizer: an optimizer step, but for its gradients. piece: gradients of one piece of rows.
        score: log-probs of one piece, without gradients.
    """

    call: Estimate
    prefill: Estimate
    decode: Estimate
    held: Estimate
    optimizer: Estimate
    piece: Estimate
    score: Estimate


# Which of a chip's limits bounds each.
LIMIT = {
    "call": "bandwidth",
    "prefill": "operations",
    "decode": "bandwidth",
    "held": "bandwidth",
    "optimizer": "bandwidth",
    "piece": "operations",
    "score": "operations",
}


def units(
    config: Config,
    model: ModelConfig,
    known: Mapping[str, Mapping[str, int]],
    found: Mapping[str, Phases],
    pieces: PieceShape,
    chip: Chip,
    row: float = 0.0,
) -> Units:
    """What each takes a device.

    Args:
      known, found: by program, what `dry_run.Program` calls `known` and `phases`; of the latter
        those that have any.
      row: tokens of a row, on which attention in an update depends; 0: the longest.
    """
    mesh = config.mesh
    prompt = config.data.max_prompt_length
    row = row or prompt + config.sampler.max_new
    fused = "fused step" in known
    makes, trains = ("fused step", "fused step") if fused else ("generation", "update")
    draw = known[makes]
    update = known[trains]
    # A product costs two operations a weight and token, its gradients twice that; what is computed
    # anew is our choice. Of attention, scores and sums are products over half of the pairs.
    per_pair = model.layers * model.heads * model.head_dim
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.width
    weights = num_params(model) - looked_up
    head = model.vocab_size * model.width

    def forward(tokens, length, weights):
        return 2 * tokens * (weights + length * per_pair) / (chip.flops * mesh.tensor)

    copy = draw[f"weights for decoding ({model.dtype})"]
    whole = draw["weights (sharded, float32)"]
    shards = mesh.data * mesh.fsdp
    slots = max(1, config.sampler.slots // shards)
    contexts = config.sampler.prefill_chunk or config.driver.screen_prompts // shards or 1
    of_token = draw["KV of responses"] / (slots * config.sampler.max_new)
    state = whole + update["optimizer"] + update["gradients"]
    least = {
        "call": (whole + copy) / chip.bandwidth,
        "prefill": forward(contexts * prompt, prompt, weights - head),
        "decode": copy / chip.bandwidth,
        "held": of_token / chip.bandwidth,
        "optimizer": 2 * state / chip.bandwidth,
        "piece": 3 * forward(pieces.tokens, row, weights),
        "score": forward(pieces.tokens, row, weights),
    }
    if not {makes, trains} <= set(found):
        return Units(**{name: Estimate(seconds) for name, seconds in least.items()})
    loops = found[makes].loops
    once = found[makes].once
    scoring = [p for name, p in found.items() if name.startswith("scoring")]
    cycles = {
        # What a fused step does once is told apart no further.
        "call": once,
        "prefill": loops.get("prefill", 0),
        # A fused step reads contexts inside of its loop, in few of its iterations; of branches the
        # longest is counted.
        "decode": loops["adaptive_loop"] - loops.get("prefill", 0)
        if fused
        else loops["decode_loop"],
        "held": 0,
        "optimizer": 0 if fused else found[trains].once,
        "piece": found[trains].loops[LOOP],
        # No program scores where no method asks for it: a third of what gradients cost then.
        "score": scoring[0].loops[LOOP] if scoring else found[trains].loops[LOOP] / 3,
    }
    kernels = dict.fromkeys(least, 0.0)
    if attention_kernel(model) == "splash":
        # Two products a pair of query and key forward, again where a layer is computed anew, three
        # and four in the kernels of gradients; blocks on the diagonal are computed whole.
        split = mesh.tensor if model.kv_heads % mesh.tensor == 0 else 1

        def pairs(tokens, row):
            return tokens * (row + BLOCK) / 2 * per_pair / split

        def product(tokens, row):
            return 2 * pairs(tokens, row) / chip.flops / KERNEL_FLOPS

        kernels["piece"] = (2 * (1 + model.remat) + 3 + 4) * product(pieces.tokens, row)
        kernels["score"] = 2 * product(pieces.tokens, row)
        kernels["prefill"] = 2 * product(contexts * prompt, prompt)
    if DecodeAttention(config.sampler.attention).on_tpu(model):
        kernels["held"] = least["held"] / KERNEL_BANDWIDTH
    return Units(**{n: Estimate(least[n], cycles[n] / chip.clock, kernels[n]) for n in least})


def summary(config: Config, pieces: PieceShape, each: Units) -> dict[str, Estimate]:
    """Of an update of full-length rows, and of a decode step with half of the room for responses
    held.

    The bound of the update is that of its operations.
    """
    shards = config.mesh.data * config.mesh.fsdp
    width = config.data.max_prompt_length + config.sampler.max_new
    tokens = config.driver.groups * config.rule.n * width / shards
    slots = max(1, config.sampler.slots // shards)
    update = each.piece.times(tokens / pieces.tokens)
    if update.compiler is not None:
        update = dataclasses.replace(update, compiler=update.compiler + each.optimizer.compiler)
    return {
        "update": update,
        "decode step": each.decode + each.held.times(slots * config.sampler.max_new / 2),
    }
