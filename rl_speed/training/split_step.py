"""The split step: generation calls with the rule between them, on the host;
then one update on complete groups, or several.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rl_speed.config import Config
from rl_speed.data.rollouts import Rollouts
from rl_speed.mesh import batch_sharding, gathered, place
from rl_speed.rollout.host_driver import HostDriver
from rl_speed.rollout.screening import Screening
from rl_speed.runtime.metrics import PhaseTimer
from rl_speed.training.steps import StepResult
from rl_speed.update.batch import build_batch
from rl_speed.update.pools import PoolSelector
from rl_speed.update.reference import Reference
from rl_speed.update.shaping import shape_rewards
from rl_speed.update.state import TrainState


class SplitStep:
    """The `Step` of two parts.

    Args:
      driver: generates, scores and decides. select: which samples of a group are trained
        on; None: all.
      update, advantages, score: as `update_step` makes them, on the mesh. reference: of a KL
        penalty, if there is one.
    """

    def __init__(
        self,
        config: Config,
        driver: HostDriver,
        select: PoolSelector | None,
        update: Callable,
        advantages: Callable,
        score: Callable,
        mesh: Mesh,
        reference: Reference | None = None,
    ):
        self._config, self.driver, self.reference = config, driver, reference
        self._mesh, self._rows = mesh, batch_sharding(mesh)
        self._select, self._update, self._advantages, self._score = (
            select,
            update,
            advantages,
            score,
        )

    @property
    def screening(self) -> Screening:
        return self.driver.screening

    def __call__(
        self,
        state: TrainState,
        version: int,
        timer: PhaseTimer,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[TrainState, StepResult]:
        """See `Step`.

        With `driver.depth`, calls are being generated while the groups are scored. The update would
        run behind them on the devices and donates the weights they read; so they are waited for, as
        generation, and nothing is left to run during evaluation and checkpoints, which are excluded
        from the step's seconds.
        """
        rollouts, report = self.driver.next_groups(state.params, version, stop)
        if rollouts is None:
            return state, StepResult(None, report)
        timer.add("generate", report.generate_s)
        timer.add("score", report.score_s)
        with timer.phase("generate"):
            self.driver.wait()
        if rollouts.nonfinite.all():
            return state, StepResult(rollouts, report)
        with timer.phase("update"):
            rollouts = shape_rewards(rollouts, self._config)
            state, metrics = self.update(state, rollouts)

        def finish() -> dict[str, float]:
            with timer.phase("update"):
                return {name: float(value) for name, value in jax.device_get(metrics).items()}

        return state, StepResult(rollouts, report, finish)

    def start_next(self, state: TrainState, version: int, timer: PhaseTimer) -> None:
        """The first generation call, which then waits for the update on the devices, not for what
        the host does with the numbers of this one. Its seconds are the update's, which runs
        meanwhile: a CPU may get to what the host asks for when the update has ended.
        """
        with timer.phase("update"):
            self.driver.start_next(state.params, version)

    def update(self, state: TrainState, rollouts: Rollouts) -> tuple[TrainState, dict[str, Any]]:
        """All optimizer steps of one RL step on these groups; metrics are the mean over them.

        Samples that non-finite logits ended are left out: what the policy computes of them would
        likely spoil the whole update, and no reward of theirs says anything about the
        tokens before.
        """
        c, o, parts = self._config, self._config.objective, self._config.training.minibatches
        if rollouts.nonfinite.any():
            rollouts = rollouts.take(np.flatnonzero(~rollouts.nonfinite))
        rollouts, advantages = (rollouts, None) if self._select is None else self._select(rollouts)
        batch = build_batch(
            rollouts,
            c.driver.groups * c.rule.n,
            c.data.max_prompt_length + c.sampler.max_new,
            c.replay.mask_prefix,
        )
        batch = place(batch, self._rows)
        uses_old, trains_prefix = uses_old_logprobs(c), trains_on_prefixes(c)
        old = (
            self._score(state.params, batch.tokens, batch.mask)
            if uses_old or trains_prefix
            else None
        )
        if trains_prefix:
            sampled = batch.behaviour_logprobs
            batch = batch.replace(behaviour_logprobs=jnp.where(jnp.isnan(sampled), old, sampled))
            old = old if uses_old else None
        ref = (
            None
            if self.reference is None
            else self._score(self.reference.params, batch.tokens, batch.mask)
        )
        in_reward = ref is not None and o.kl_in == "reward"
        if advantages is None:
            advantages = self._advantages(
                batch, batch.behaviour_logprobs - ref if in_reward else None
            )
        else:
            advantages = np.pad(advantages, (0, len(batch.rewards) - len(advantages)))
            advantages = place(advantages, self._rows)
        if in_reward:
            ref = None
        if parts == 1:
            return self._update(state, batch, advantages, old, ref)
        whole = jax.device_get(gathered((batch, advantages, old, ref), self._mesh))
        padding, rows, history = (
            np.flatnonzero(whole[0].group_ids < 0),
            len(whole[0].group_ids) // parts,
            [],
        )
        # Groups in turn, so that no mini-batch is empty before another has two more.
        for part in range(parts):
            ids = whole[0].group_ids
            index = np.flatnonzero((ids >= 0) & (ids % parts == part))
            spare, padding = padding[: rows - len(index)], padding[rows - len(index) :]
            index = np.concatenate([index, spare])
            mine = place(jax.tree.map(lambda x: x[index], whole), self._rows)
            state, metrics = self._update(state, *mine)
            history.append(metrics)
        return state, jax.tree.map(lambda *values: sum(values) / parts, *history)

    def metrics(self, version: int) -> dict[str, float]:
        """Those of the driver."""
        return self.driver.metrics(version)

    def state_dict(self) -> dict[str, Any]:
        """The driver's."""
        return self.driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        self.driver.load_state_dict(state)


def trains_on_prefixes(config: Config) -> bool:
    """Whether replayed tokens are trained on, too.

    Nobody sampled them: their behaviour policy is taken to be the present one.
    """
    return config.replay.window != "none" and not config.replay.mask_prefix


def uses_old_logprobs(config: Config) -> bool:
    """Whether the step recomputes the log-probs of its batch first."""
    o = config.objective
    # Plain policy gradient has no ratio, so that nothing needs to be recomputed for it.
    return o.old_logprobs != "behaviour" and not (o.loss == "pg" and o.old_logprobs == "recompute")
