"""Closed forms behind the methods, in numpy float64: no JAX, no models.

Signal-to-noise of a group's gradient, what SPEED's screening does to the
objective and to the cost, what sequential stopping costs and which objective
it climbs, how to share a budget, and the KL of the optimal policy.
"""

from rl_speed.theory.allocation import allocate
from rl_speed.theory.budget import Shares, best_shares, progress
from rl_speed.theory.kl import kl_optimal, kl_second_order
from rl_speed.theory.sequential import Exit, SequentialCost, sequential_cost, sequential_exits
from rl_speed.theory.snr import snr_bound, snr_bound_exact_advantage, snr_bound_simple
from rl_speed.theory.speed import (
    Expectation,
    acceptance,
    expected_speedup,
    group_moments,
    phi,
    phi_prime,
)
from rl_speed.theory.weights import (
    allocated_weight,
    balanced_weight,
    kept_classes,
    objective,
    objective_weight,
    screened_weight,
    sequential_weight,
    uniform_weight,
)

__all__ = [
    "Exit",
    "Expectation",
    "SequentialCost",
    "Shares",
    "acceptance",
    "allocate",
    "allocated_weight",
    "balanced_weight",
    "best_shares",
    "expected_speedup",
    "group_moments",
    "kept_classes",
    "kl_optimal",
    "kl_second_order",
    "objective",
    "objective_weight",
    "phi",
    "phi_prime",
    "progress",
    "screened_weight",
    "sequential_cost",
    "sequential_exits",
    "sequential_weight",
    "snr_bound",
    "snr_bound_exact_advantage",
    "snr_bound_simple",
    "uniform_weight",
]
