"""Forecasts pass rates of prompts that were never sampled from their tokens, and combines them with
the counts of those that were.

`Forecast` learns during training which tokens and token pairs occur in prompts that the policy
solves. Its uncertainty decides which prompts `AdaptiveSpeed` screens, and with how many samples.
Not from a paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import linalg, special

from rl_speed import theory
from rl_speed.data.prompts import Prompt
from rl_speed.estimates.estimator import calibration, check_counts
from rl_speed.sampling import Rule, needs

# Decay of the likelihood of each strength at each visit: about 100 visits are remembered.
FORGET_STRENGTH = 0.99
# Prior precision of the weights; features have mean length 1.
RIDGE = 0.1
# Strengths a forecast may have, in samples, and the center of their prior.
STRENGTHS = np.geomspace(0.25, 64.0, 17)
FIRST_STRENGTH = 1.0
# Newton steps an update (the weights start near), and how often a step may be halved.
NEWTON = 4
HALVINGS = 20
# Prompts whose features are computed at once.
_CHUNK = 4096


def token_features(tokens: Sequence[np.ndarray], buckets: int) -> np.ndarray:
    """f32[P, 2 buckets]: counts of each token and of each pair of neighbours in a prompt.

    Both are hashed into `buckets`. The two ends of a prompt count as neighbours of its first and
    last token. Counts are divided by the mean length of all prompts, so longer prompts have larger
    counts, and centred.
    """

    def mix(x, by):
        return (x.astype(np.uint64) * np.uint64(by) >> np.uint64(33)) % np.uint64(buckets)

    found = np.zeros((len(tokens), 2 * buckets), np.float32)
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        lengths = np.array([len(t) for t in part])
        flat = np.concatenate(part).astype(np.uint64) + np.uint64(1)  # 0: beyond the ends
        row = np.repeat(np.arange(len(part)), lengths)
        ends = np.cumsum(lengths + 1) - 1 - np.arange(len(part))
        left = np.insert(flat, ends, 0)
        right = np.insert(flat, np.concatenate([[0], ends[:-1]]), 0)
        pair_row = np.repeat(np.arange(len(part)), lengths + 1)
        single = row * 2 * buckets + mix(flat, 0x9E3779B97F4A7C15).astype(np.int64)
        pair = mix(left * np.uint64(0xD6E8FEB86659FD93) + right, 0x9E3779B97F4A7C15)
        pair = pair_row * 2 * buckets + buckets + pair.astype(np.int64)
        counts = np.bincount(np.concatenate([single, pair]), minlength=len(part) * 2 * buckets)
        found[start : start + _CHUNK] = counts.reshape(len(part), -1)
    found /= max(1.0, float(np.mean([len(t) for t in tokens])))
    return found - found.mean(axis=0)


class Forecast:
    """Beta(a, b) beliefs about the pass rate of every prompt of a finite data set.

    Three parts, all learnt from training samples:

    - Logistic regression of pass rates on `token_features`, with a Gaussian over its weights. A
      visit sharpens it; time widens it, because the policy changes. The n samples of a visit count
      as fewer, because prompts also differ in ways that features do not show.
    - Strength: how many samples a forecast is worth, by the beta-binomial likelihood of counts that
      came after it. Every visit tests it.
    - Counts of a prompt itself, shifted by the change of its forecast since they were counted.

    A second regression on the same features forecasts lengths of responses.

    Args:
      prompts: the data set, in its order. n: samples of a group, at least 2. n_init: allowed
        numbers of screening samples; values outside [2, n) are left out. buckets: of the features.
        memory: visits that the regressions remember, at least 1. decay: of a prompt's own counts at
        each further visit, in (0, 1].
      power: a group of pass rate p is worth p^power (1-p) a sample, unless all its rewards are
        equal (`theory.group_value`). by_tokens: divide the value by expected tokens, instead of
        counting samples.

    Raises ValueError naming the argument that is out of range, or the id that two prompts share.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        n_init: Sequence[int] = (2, 4, 8),
        buckets: int = 256,
        memory: float = 64.0,
        decay: float = 0.9,
        power: float = 1.0,
        by_tokens: bool = False,
    ):
        for name, value, ok, want in (
            ("n", n, n >= 2, "at least 2"),
            ("buckets", buckets, buckets >= 1, "at least 1"),
            ("memory", memory, memory >= 1, "at least 1"),
            ("decay", decay, 0 < decay <= 1, "in (0, 1]"),
            ("power", power, 0 <= power <= 1, "in [0, 1]"),
        ):
            if not ok:
                raise ValueError(f"Forecast.{name} must be {want}; got {value!r}")
        self.place = {p.id: i for i, p in enumerate(prompts)}
        self._ids = [p.id for p in prompts]
        if len(self.place) < len(prompts):
            twice = next(p.id for i, p in enumerate(prompts) if self.place[p.id] != i)
            raise ValueError(f"forecasts are of prompts by id, and two have the id {twice!r}")
        # Screening comes first: it is chosen if all choices have equal value, as before any visit.
        self._choices = [*(m for m in n_init if 2 <= m < n), n]
        self._keep = 1 - 1 / memory
        self._n = n
        self._decay = decay
        self._power = power
        self._by_tokens = by_tokens
        features = token_features([p.tokens for p in prompts], buckets)
        self._features = np.hstack([features, np.ones((len(prompts), 1), np.float32)])
        width = self._features.shape[1]
        size = len(prompts)
        self._ridge = np.eye(width) * RIDGE
        self._ridge[-1, -1] = 1e-2
        self._weights, self._precision = np.zeros(width), self._ridge.copy()
        self._length_weights, self._length_precision = np.zeros(width), self._ridge.copy()
        self._likelihood = -np.square(np.log(STRENGTHS / FIRST_STRENGTH)) / 2
        # For each prompt: correct samples, all samples, and the forecast's logit when they were
        # counted.
        self._right, self._drawn, self._then = (np.zeros(size) for _ in range(3))
        self._visits = np.zeros(())
        self._latest = {}
        # Cached for all prompts until the next update, because it is read several times a step.
        self._screening: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def readiness(self) -> float:
        """Visits so far divided by the visits that the regressions remember, at most 1."""
        return min(1.0, float(self._visits) * (1 - self._keep))

    @property
    def strength(self) -> float:
        """Number of samples of a prompt that a forecast is worth."""
        return float(STRENGTHS[np.argmax(self._likelihood)])

    def belief(self, index: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """(a, b), f64 of these prompts (default: all)."""
        logits = self._logits(index)
        drawn = self._drawn[index]
        own = special.logit((self._right[index] + 0.5) / (drawn + 1.0))
        own = special.expit(own + logits - self._then[index])
        rate = special.expit(logits)
        return (self.strength * rate + drawn * own, self.strength * (1 - rate) + drawn * (1 - own))

    def screening(self, index: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """(n_init i64, value f64) of these prompts: the best number of screening samples (n: no
        screening), and the value a sample, or a token, at that number.
        """
        if self._screening is None:
            chosen, worth = theory.best_screening(
                *self.belief(), self._n, self._choices, self._power
            )
            self._screening = chosen, worth / self.lengths()
        chosen, worth = self._screening
        return chosen[index], worth[index]

    def lengths(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """f64: expected tokens of a response, or 1 unless `by_tokens`."""
        if not self._by_tokens:
            return np.ones(len(self._ids))[index]
        logs = self._times(index, self._length_weights)
        return np.exp(np.clip(logs, 0.0, 20.0))

    def update(
        self,
        index: Sequence[int],
        correct: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        """Learns one visit of each prompt; prompts without samples are not visited.

        Args:
          correct: correct ones of `total` samples. tokens: mean length of these; NaN if unknown.

        Raises ValueError naming a prompt with impossible counts; nothing is changed then.
        """
        check_counts([self._ids[i] for i in index], correct, total)
        index, k, n = (np.asarray(x, np.float64) for x in (index, correct, total))
        tokens = np.asarray(tokens, np.float64)
        seen = n > 0
        index = index[seen].astype(np.int64)
        k = k[seen]
        n = n[seen]
        tokens = tokens[seen]
        if not len(index):
            return
        a, b = self.belief(index)
        self._latest = calibration(a / (a + b), k, n)
        keep = self._keep ** len(index)
        rate = np.clip(special.expit(self._logits(index)), 1e-4, 1 - 1e-4)
        s = STRENGTHS[:, None]
        likelihood = special.betaln(k + s * rate, n - k + s * (1 - rate)) - special.betaln(
            s * rate, s * (1 - rate)
        )
        self._likelihood = FORGET_STRENGTH ** len(index) * self._likelihood + likelihood.sum(axis=1)
        self._visits = self._visits + len(index)
        self._screening = None
        self._learn_rates(index, k, n, keep)
        self._learn_lengths(index, tokens, keep)
        now = self._logits(index)
        self._remember(index, k, n, now)

    def _learn_rates(self, index: np.ndarray, k: np.ndarray, n: np.ndarray, keep: float) -> None:
        """Newton's method from the current weights, on the new counts and the remembered precision.

        The objective is concave, but flat if forecasts are certain and wrong: a full step from
        there overshoots. So a step is halved until the objective does not fall. Steps are taken in
        one coefficient a visit, which moves the weights along `reach`. Only one factorization, of
        the prior, has the size of the features.
        """
        x = self._features[index].astype(np.float64)
        fewer = (self.strength + 1) / (self.strength + n)  # n_eff / n under a beta-binomial
        k = k * fewer
        n = n * fewer
        prior = keep * self._precision + (1 - keep) * self._ridge
        reach = linalg.cho_solve(linalg.cho_factor(prior), x.T)  # prior^-1 x^T
        start = x @ self._weights
        kernel = x @ reach
        moved = np.zeros(len(index))

        def objective(moved: np.ndarray) -> float:
            logits = start + kernel @ moved
            return k @ logits - n @ np.logaddexp(0, logits) - moved @ kernel @ moved / 2

        for _ in range(NEWTON):
            rate = special.expit(start + kernel @ moved)
            curved = np.eye(len(index)) + (n * rate * (1 - rate))[:, None] * kernel
            step = np.linalg.solve(curved, k - n * rate - moved)
            now = objective(moved)
            for _ in range(HALVINGS):
                if objective(moved + step) >= now:
                    moved = moved + step
                    break
                step = step / 2
        rate = special.expit(start + kernel @ moved)
        self._weights = self._weights + reach @ moved
        self._precision = prior + (x.T * (n * rate * (1 - rate))) @ x

    def _learn_lengths(self, index: np.ndarray, tokens: np.ndarray, keep: float) -> None:
        known = np.isfinite(tokens)
        if not self._by_tokens or not known.any():
            return
        x = self._features[index[known]].astype(np.float64)
        logs = np.log(tokens[known].clip(1.0))
        prior = keep * self._length_precision + (1 - keep) * self._ridge
        # Log lengths vary about their forecast by about a third: precision 10.
        self._length_precision = prior + 10 * x.T @ x
        slope = 10 * x.T @ (logs - x @ self._length_weights)
        step = linalg.cho_solve(linalg.cho_factor(self._length_precision), slope)
        self._length_weights = self._length_weights + step

    def _remember(self, index: np.ndarray, k: np.ndarray, n: np.ndarray, now: np.ndarray) -> None:
        """Adds counts of prompts, after shifting their old counts by the change of the forecast."""
        old = special.logit((self._right[index] + 0.5) / (self._drawn[index] + 1.0))
        moved = special.expit(old + now - self._then[index])
        drawn = self._decay * self._drawn[index]
        self._right[index] = drawn * moved + k
        self._drawn[index] = drawn + n
        self._then[index] = now

    def _logits(self, index: np.ndarray | slice) -> np.ndarray:
        return np.clip(self._times(index, self._weights), -9.0, 9.0)

    def _times(self, index: np.ndarray | slice, weights: np.ndarray) -> np.ndarray:
        """f64: features of these prompts times weights, computed in float32 to avoid copying
        features.
        """
        return (self._features[index] @ weights.astype(np.float32)).astype(np.float64)

    def metrics(self) -> dict[str, float]:
        """Calibration of the latest update's forecasts (`calibration`), their strength, and the
        share of all prompts that would be drawn without screening.
        """
        return {
            **{f"forecast/{name}": x for name, x in self._latest.items()},
            "forecast/strength": self.strength,
            "forecast/unscreened": float(np.mean(self.screening()[0] == self._n)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Both regressions, the likelihood of each strength, and the counts."""
        return {name: getattr(self, f"_{name}").copy() for name in _SAVED} | {
            "latest": dict(self._latest)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state.

        Raises ValueError: the state is of a forecast with other features or prompts.
        """
        for name in _SAVED:
            mine = getattr(self, f"_{name}")
            saved = np.array(state[name], np.float64)
            if saved.shape != mine.shape:
                raise ValueError(
                    f"the saved forecast is another one: {name} is {saved.shape} there, "
                    f"{mine.shape} here. Resume with the data and config.data.forecast_buckets of "
                    "the saved run"
                )
            setattr(self, f"_{name}", saved)
        self._latest = {name: float(x) for name, x in state["latest"].items()}
        self._screening = None


_SAVED = (
    "weights",
    "precision",
    "length_weights",
    "length_precision",
    "likelihood",
    "right",
    "drawn",
    "then",
    "visits",
)


class ForecastScreening:
    """Estimates for `Screening` from the forecast that also orders prompts.

    It also gives each prompt's n_init if the rule asks for it, as `AdaptiveSpeed` does. The order
    updates and saves the forecast.
    """

    def __init__(self, forecast: Forecast, rule: Rule):
        self._forecast = forecast
        self._each = needs(rule, "forecast")

    def allocate(
        self, params: Any, prompts: Sequence[Prompt]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(estimates f64[P], screening samples i64[P] or None if the rule does not ask for
        them).
        """
        del params
        index = np.array([self._forecast.place[p.id] for p in prompts], np.int64)
        a, b = self._forecast.belief(index)
        return a / (a + b), self._forecast.screening(index)[0] if self._each else None

    def observe(self, params: Any, visits: Sequence[Any]) -> None:
        """Does nothing: the order updates the forecast."""

    def metrics(self) -> dict[str, float]:
        """Empty: the order logs them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Empty: the order saves the forecast."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the order restores the forecast."""
