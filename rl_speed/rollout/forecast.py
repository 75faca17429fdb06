"""Pass rates of prompts that nobody has sampled yet, from what the prompts say; with what was
counted of those that somebody has.

`Forecast` learns while training goes on: which tokens, and pairs of tokens, stand in questions that
the policy solves. It says how sure it is, which decides whom `AdaptiveSpeed` screens, and with how
many samples. Not from a paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import linalg, special

from rl_speed import theory
from rl_speed.data.prompts import Prompt
from rl_speed.rollout.counted import check_counts
from rl_speed.rollout.estimators import calibration
from rl_speed.sampling import AdaptiveSpeed, Rule

# Of how forecasts fared, kept at each visit: about 100 visits.
FORGET_STRENGTH = 0.99
# Precision of the weights before anything is seen, in features of mean length 1.
RIDGE = 0.1
# How many samples a forecast may be worth; and the belief in each before there are any.
STRENGTHS = np.geomspace(0.25, 64.0, 17)
FIRST_STRENGTH = 1.0
# Newton steps at each update, since the weights are near; and how often one may be halved.
NEWTON = 4
HALVINGS = 20
# Prompts whose features are made at once.
_CHUNK = 4096


def prompt_features(tokens: Sequence[np.ndarray], buckets: int) -> np.ndarray:
    """f32[P, 2 buckets]: how often each token, and each pair of neighbours, stands in a prompt.

    Both are hashed into `buckets`; ends of the prompt are neighbours, too. Counts are over the mean
    length of all prompts, so that a longer prompt has more of them, and centred.
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
    """A belief about the pass rate of every prompt of a finite data set, Beta(a, b) each.

    Three parts, all learnt from the samples that training draws anyway:

    - what prompts say: a logistic regression of pass rates on `prompt_features`, one Gaussian over
      its weights that each visit sharpens and time blurs, since the policy moves. A visit's samples
      are of one prompt, and count as fewer by what prompts differ beyond their features.
    - how far that is to be trusted: the number of samples that a forecast is worth, by the
      beta-binomial likelihood of what came in after it was made. Forecasts for prompts that were
      not visited are tested by every visit.
    - what was counted of a prompt itself, moved as the forecast for it has moved since then.

    A second regression on the same features says how long responses are.

    Args:
      prompts: the data set, in its order. n: samples of a group, at least 2. n_init: how many
        samples a prompt may be screened with; what is not in [2, n) is left out. buckets: of the
        features. memory: visits that the regressions remember, at least 1. decay: of a prompt's
        own counts, at each further visit, in (0, 1].
        power: a group of a prompt of pass rate p is worth p^power (1-p) a sample, if not all of
        them are alike (`theory.group_value`). by_tokens: whether worth is that of a token, or of a
        sample.

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
        # Where all choices are worth the same, as before anything is known, prompts are screened.
        self._choices = [*(m for m in n_init if 2 <= m < n), n]
        self._keep = 1 - 1 / memory
        self._n = n
        self._decay = decay
        self._power = power
        self._by_tokens = by_tokens
        features = prompt_features([p.tokens for p in prompts], buckets)
        self._features = np.hstack([features, np.ones((len(prompts), 1), np.float32)])
        width = self._features.shape[1]
        size = len(prompts)
        self._ridge = np.eye(width) * RIDGE
        self._ridge[-1, -1] = 1e-2
        self._weights, self._precision = np.zeros(width), self._ridge.copy()
        self._length_weights, self._length_precision = np.zeros(width), self._ridge.copy()
        self._likelihood = -np.square(np.log(STRENGTHS / FIRST_STRENGTH)) / 2
        # Of each prompt: right and all samples, and the forecast's logit when they were counted.
        self._right, self._drawn, self._then = (np.zeros(size) for _ in range(3))
        self._visits = np.zeros(())
        self._latest = {}
        # Of all prompts, until something is learnt: it is asked for several times a step.
        self._screening: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def readiness(self) -> float:
        """Visits so far as a share of those that the regressions remember, at most 1."""
        return min(1.0, float(self._visits) * (1 - self._keep))

    @property
    def strength(self) -> float:
        """How many samples of a prompt a forecast for it is worth."""
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
        """(n_init i64, worth f64): with how many samples each prompt should be screened (as many as
        a group has: with none), and what a sample, or a token, of it is worth then.
        """
        if self._screening is None:
            chosen, worth = theory.best_screening(
                *self.belief(), self._n, self._choices, self._power
            )
            self._screening = chosen, worth / self.lengths()
        chosen, worth = self._screening
        return chosen[index], worth[index]

    def lengths(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """f64: expected tokens of a response, or 1 where worth is by samples."""
        if not self._by_tokens:
            return np.ones(len(self._ids))[index]
        logs = self._times(index, self._length_weights)
        return np.exp(np.clip(logs, 0.0, 20.0))

    def update(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        """One visit of each prompt; those without samples are not visited.

        Args:
          positive: right ones of `total` samples. tokens: mean length of these; NaN: not known.

        Raises ValueError naming a prompt whose counts cannot be; nothing is changed then.
        """
        check_counts([self._ids[i] for i in index], positive, total)
        index, k, n = (np.asarray(x, np.float64) for x in (index, positive, total))
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
        """Newton's method from where the weights are, on what came in and what is remembered.

        The objective is concave, but flat where forecasts are sure and wrong: a whole step from
        there lands as far on the other side. So a step is halved until it climbs. The weights move
        by `reach` times a number for each visit, and steps are taken in these: one factorization,
        of what is remembered, is all that is as large as the features.
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
        # Lengths scatter about their forecast by a third or so: ten times the weight of a sample.
        self._length_precision = prior + 10 * x.T @ x
        slope = 10 * x.T @ (logs - x @ self._length_weights)
        step = linalg.cho_solve(linalg.cho_factor(self._length_precision), slope)
        self._length_weights = self._length_weights + step

    def _remember(self, index: np.ndarray, k: np.ndarray, n: np.ndarray, now: np.ndarray) -> None:
        """Add to the prompts' own counts, after moving what they had to where the forecast is."""
        old = special.logit((self._right[index] + 0.5) / (self._drawn[index] + 1.0))
        moved = special.expit(old + now - self._then[index])
        drawn = self._decay * self._drawn[index]
        self._right[index] = drawn * moved + k
        self._drawn[index] = drawn + n
        self._then[index] = now

    def _logits(self, index: np.ndarray | slice) -> np.ndarray:
        return np.clip(self._times(index, self._weights), -9.0, 9.0)

    def _times(self, index: np.ndarray | slice, weights: np.ndarray) -> np.ndarray:
        """f64: features of these prompts times weights, in float32: no copy of all features."""
        return (self._features[index] @ weights.astype(np.float32)).astype(np.float64)

    def metrics(self) -> dict[str, float]:
        """How the latest update's forecasts fared (`calibration`), their strength, and the share of
        all prompts that would be drawn without screening.
        """
        return {
            **{f"forecast/{name}": x for name, x in self._latest.items()},
            "forecast/strength": self.strength,
            "forecast/unscreened": float(np.mean(self.screening()[0] == self._n)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Both regressions, the likelihood of each strength, and what was counted."""
        return {name: getattr(self, f"_{name}").copy() for name in _SAVED} | {
            "latest": dict(self._latest)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken.

        Raises ValueError: it is of a forecast with other features or prompts.
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
    """What `Screening` asks before a visit, answered by the forecast that also orders prompts: the
    estimate and, where the rule is `AdaptiveSpeed`, the prompt's own n_init. The order tells the
    forecast what came back, and saves it.
    """

    def __init__(self, forecast: Forecast, rule: Rule):
        self._forecast = forecast
        self._each = isinstance(rule, AdaptiveSpeed)

    def allocate(
        self, params: Any, prompts: Sequence[Prompt]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(estimates f64[P], samples to screen with i64[P], or None where the rule takes none)."""
        del params
        index = np.array([self._forecast.place[p.id] for p in prompts], np.int64)
        a, b = self._forecast.belief(index)
        return a / (a + b), self._forecast.screening(index)[0] if self._each else None

    def observe(self, params: Any, visits: Sequence[Any]) -> None:
        """Nothing: the order does."""

    def metrics(self) -> dict[str, float]:
        """The order has them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The order has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The order does."""
