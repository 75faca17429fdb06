"""A value head on the policy's hidden state. It also estimates prompts that were never visited.

Source: Reinforce-Ada (Xiong et al.), section 3.1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from rl_speed.data.prompts import Prompt
from rl_speed.estimates.estimator import Account, check_counts
from rl_speed.mesh import (
    ROWS,
    TRAIN_RULES,
    batch_sharding,
    place,
    replicated,
    row_shards,
    spans_processes,
)
from rl_speed.policy import ModelConfig, hidden_states, param_shardings
from rl_speed.policy.split import SplitWeights
from rl_speed.policy.transformer import Weights

Array = jax.Array


def prompt_features(
    params: Any,
    tokens_BxT: Array,
    lengths_B: Array,
    model: ModelConfig,
    weights: Weights = Weights(),
) -> Array:
    """Computes the input of the value head, f32[B, D]: the policy's final hidden state at the last
    prompt token, scaled to length 1. No gradient flows to `params`.

    Args:
      tokens_BxT: i32[B, T], right-padded. lengths_B: i32[B], at least 1. model: static.
      weights: how layers read `params`.
    """
    still = jax.lax.stop_gradient(params)
    hidden_BxTxD = hidden_states(still, tokens_BxT, model, weights=weights)
    last_BxD = jnp.take_along_axis(hidden_BxTxD, (lengths_B - 1)[:, None, None], axis=1)[
        :, 0
    ].astype(jnp.float32)
    return last_BxD * jax.lax.rsqrt(jnp.sum(jnp.square(last_BxD), axis=1, keepdims=True) + 1e-12)


def head_logits(head: dict[str, Array], features_BxD: Array) -> Array:
    """Computes the logits of the pass rates, f32[B]. A head with `w_in` has a hidden layer; others
    are linear.
    """
    with jax.named_scope("value_head"), jax.default_matmul_precision("highest"):
        x = features_BxD
        if "w_in" in head:
            x = jax.nn.silu(x @ head["w_in"] + head["b_in"])
        return x @ head["w"] + head["b"]


def count_loss(
    head: dict[str, Array], features_BxD: Array, positive_B: Array, total_B: Array
) -> Array:
    """Computes the binary cross-entropy of the counts in nats, f32[], summed over samples. Rows
    with total 0 add nothing.
    """
    logits_B = head_logits(head, features_BxD)
    nats_B = positive_B * jax.nn.log_sigmoid(logits_B) + (
        total_B - positive_B
    ) * jax.nn.log_sigmoid(-logits_B)
    return -jnp.sum(nats_B)


@struct.dataclass
class HeadState:
    """State of the value head.

    Attributes:
      head: weights, float32. moments: Adam's state. steps: i32[], optimizer steps made.
        skipped: i32[], optimizer steps skipped because the gradient was not finite.
    """

    head: dict[str, Array]
    moments: Any
    steps: Array
    skipped: Array


class ValueEstimator:
    """Estimates pass rates with a small head on the policy's hidden state at the last prompt token,
    trained on the counts of each step.

    Each update computes the features with the current weights, and makes `steps` Adam steps on the
    binary cross-entropy of the new samples only. The last layer starts at zero, so before the first
    update every estimate is 1/2 and budgets are equal.

    Args:
      model: configuration of the policy. mesh: mesh of its weights, which are placed by
        TRAIN_RULES.
      prompt_length: most tokens of a prompt. rows: prompts computed at once, a multiple of the
        mesh's row shards; changes only rounding.
      learning_rate: Adam's. It need not change with the width of the policy, because features have
        length 1.
      hidden: units of the hidden layer; 0: a linear head.
      steps: Adam steps per update. floor: estimates are clipped to [floor, 1 - floor], so that no
        prompt gets the whole budget.
      seed: of the hidden layer's initial weights.

    Raises ValueError naming the argument that is out of range.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        prompt_length: int,
        rows: int,
        learning_rate: float = 1e-2,
        hidden: int = 32,
        steps: int = 4,
        floor: float = 1e-2,
        seed: int = 0,
    ):
        for name, value, ok, want in (
            ("prompt_length", prompt_length, prompt_length >= 1, "at least 1"),
            (
                "rows",
                rows,
                rows >= 1 and rows % row_shards(mesh) == 0,
                f"a positive multiple of {row_shards(mesh)} row shards",
            ),
            ("learning_rate", learning_rate, learning_rate > 0, "positive"),
            ("hidden", hidden, hidden >= 0, "at least 0"),
            ("steps", steps, steps >= 1, "at least 1"),
            ("floor", floor, 0 < floor < 0.5, "in (0, 1/2)"),
        ):
            if not ok:
                raise ValueError(f"ValueEstimator.{name} must be {want}; got {value!r}")
        self.prompt_length = prompt_length
        self.rows = rows
        self.steps = steps
        self.floor = floor
        self._account = Account()
        self._nonfinite = 0
        whole = replicated(mesh)
        split = batch_sharding(mesh)
        adam = optax.adam(learning_rate)

        def add(state: HeadState, features, correct, total, carry):
            return jax.tree.map(
                jnp.add, carry, jax.value_and_grad(count_loss)(state.head, features, correct, total)
            )

        def apply(state: HeadState, summed, samples):
            loss, grads = jax.tree.map(lambda x: x / samples, summed)
            finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
            updates, moments = adam.update(grads, state.moments, state.head)
            new = HeadState(
                optax.apply_updates(state.head, updates), moments, state.steps + 1, state.skipped
            )
            old = state.replace(skipped=state.skipped + 1)
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        def on_mesh(f):
            return jax.jit(f, in_shardings=whole, out_shardings=whole)

        weights = SplitWeights(model, mesh)

        def features(params, *prompts):
            shards = [x.reshape(row_shards(mesh), -1, *x.shape[1:]) for x in prompts]

            def mine(params, *prompts):
                return prompt_features(params, *prompts, model, weights)[None]

            found = weights.run(mine, PartitionSpec(ROWS), params, *shards)
            return found.reshape(-1, found.shape[-1])

        self._features = jax.jit(
            features,
            in_shardings=(param_shardings(model, mesh, TRAIN_RULES), split, split),
            out_shardings=whole,
        )
        self._logits = on_mesh(lambda state, x: head_logits(state.head, x))
        self._add = on_mesh(add)
        self._apply = on_mesh(apply)
        head = init_head(model.width, hidden, seed)
        put = place if spans_processes(mesh) else jax.device_put

        def on_all_devices(tree):
            return put(tree, whole)

        self._place = on_all_devices
        self._split = split
        self._state = self._place(HeadState(head, adam.init(head), np.int32(0), np.int32(0)))
        self._nothing = self._place((np.float32(0), jax.tree.map(np.zeros_like, head)))

    def estimate(self, params: Any, prompts: Sequence[Prompt]) -> np.ndarray:
        """Returns the estimates, f64[n] in [floor, 1 - floor]. If a logit is not finite, its
        estimate is 1/2 and is counted as `estimate/nonfinite`.

        Raises ValueError naming a prompt that is empty or longer than `prompt_length`.
        """
        with self._account.timed():
            return self._ask(self._read(params, prompts), len(prompts))

    def update(
        self, params: Any, prompts: Sequence[Prompt], correct: Sequence[int], total: Sequence[int]
    ) -> None:
        """Trains the head on counts; see the class. Ignores prompts without samples. Skips and
        counts an Adam step with a non-finite gradient.

        Raises ValueError as `estimate` does, or naming a prompt with impossible counts; the head
        does not change then.
        """
        with self._account.timed():
            check_counts([p.id for p in prompts], correct, total)
            if not (samples := np.float32(np.sum(total))):
                return
            features = self._read(params, prompts)
            self._account.see(self._ask(features, len(prompts)), correct, total)
            counts = list(zip(self._chunks(correct), self._chunks(total)))
            for _ in range(self.steps):
                summed = self._nothing
                for x, (right, drawn) in zip(features, counts):
                    summed = self._add(self._state, x, right, drawn, summed)
                self._state = self._apply(self._state, summed, samples)
            jax.block_until_ready(self._state)  # the timer includes it

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `Estimator`, and counts since the start of the run: Adam steps
        made, Adam steps skipped, estimates that were not finite.
        """
        return {
            **self._account.metrics(),
            "estimate/steps": float(self._state.steps),
            "estimate/skipped": float(self._state.skipped),
            "estimate/nonfinite": float(self._nonfinite),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns head, moments and counters, as arrays by their path in `HeadState`, and the
        metrics so far.
        """
        return {
            "head": _by_path(jax.device_get(self._state)),
            "nonfinite": self._nonfinite,
            "account": self._account.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state on this mesh.

        Raises ValueError: the saved head has other layers or widths.
        """
        mine = _by_path(self._state)
        saved = {name: np.asarray(x) for name, x in state["head"].items()}

        def shapes(tree):
            return {name: x.shape for name, x in tree.items()}

        if shapes(mine) != shapes(saved):
            name = next(n for n in {**mine, **saved} if shapes(mine).get(n) != shapes(saved).get(n))
            raise ValueError(
                f"the saved value head has another shape: {name} is "
                f"{shapes(saved).get(name, 'absent')} there, {shapes(mine).get(name, 'absent')} "
                "here. Resume with the policy and config.estimate.hidden of the saved run"
            )
        treedef = jax.tree.structure(self._state)
        self._state = self._place(
            jax.tree.unflatten(treedef, [saved[name].astype(x.dtype) for name, x in mine.items()])
        )
        self._nonfinite = int(state["nonfinite"])
        self._account.load_state_dict(state["account"])

    def _read(self, params: Any, prompts: Sequence[Prompt]) -> list[Array]:
        """Computes the features f32[rows, D] of each chunk of prompts."""
        size = -(-len(prompts) // self.rows) * self.rows
        tokens = np.zeros((size, self.prompt_length), np.int32)
        lengths = np.ones(size, np.int32)
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt.tokens) <= self.prompt_length:
                raise ValueError(
                    f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens; an estimate needs 1 to "
                    f"{self.prompt_length} (config.data.max_prompt_length)"
                )
            tokens[i, : len(prompt.tokens)], lengths[i] = prompt.tokens, len(prompt.tokens)

        def part(x, at):
            return place(x[at : at + self.rows], self._split)

        return [
            self._features(params, part(tokens, at), part(lengths, at))
            for at in range(0, size, self.rows)
        ]

    def _ask(self, features: list[Array], count: int) -> np.ndarray:
        # Dispatches all chunks before waiting for the first result.
        logits = [self._logits(self._state, x) for x in features]
        logits = np.concatenate([np.zeros(0), *map(np.asarray, logits)])[:count].astype(np.float64)
        finite = np.isfinite(logits)
        self._nonfinite += int((~finite).sum())
        edge = np.log1p(-self.floor) - np.log(self.floor)
        return 1 / (1 + np.exp(-np.clip(np.where(finite, logits, 0.0), -edge, edge)))

    def _chunks(self, counts: Sequence[int]) -> list[np.ndarray]:
        padded = np.zeros(-(-len(counts) // self.rows) * self.rows, np.float32)
        padded[: len(counts)] = counts
        return list(padded.reshape(-1, self.rows))


def init_head(width: int, hidden: int, seed: int) -> dict[str, np.ndarray]:
    """Makes the initial weights for `head_logits`, float32. The output layer is 0, so that every
    estimate starts at 1/2.

    Features have length 1, so standard normal weights give the inputs of the hidden units' SiLU a
    variance of 1. Without hidden units (`hidden` = 0) the head is linear.
    """
    if not hidden:
        return {"w": np.zeros(width, np.float32), "b": np.float32(0)}
    w_in = np.random.default_rng(seed).standard_normal((width, hidden)).astype(np.float32)
    return {
        "w_in": w_in,
        "b_in": np.zeros(hidden, np.float32),
        "w": np.zeros(hidden, np.float32),
        "b": np.float32(0),
    }


def _by_path(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
