"""Closed forms behind the methods, in numpy float64: no JAX, no models.

Signal-to-noise of a group's gradient, what SPEED's screening does to the
objective and to the cost, what sequential stopping costs, how to share a
budget, and the KL of the optimal policy.
"""

from rl_speed.theory.allocation import allocate
from rl_speed.theory.kl import kl_optimal
from rl_speed.theory.kl import kl_second_order
from rl_speed.theory.sequential import SequentialCost
from rl_speed.theory.sequential import sequential_cost
from rl_speed.theory.snr import snr_bound
from rl_speed.theory.snr import snr_bound_exact_advantage
from rl_speed.theory.snr import snr_bound_simple
from rl_speed.theory.speed import Expectation
from rl_speed.theory.speed import acceptance
from rl_speed.theory.speed import expected_speedup
from rl_speed.theory.speed import group_moments
from rl_speed.theory.speed import phi
from rl_speed.theory.speed import phi_prime

__all__ = [
    "Expectation",
    "SequentialCost",
    "acceptance",
    "allocate",
    "expected_speedup",
    "group_moments",
    "kl_optimal",
    "kl_second_order",
    "phi",
    "phi_prime",
    "sequential_cost",
    "snr_bound",
    "snr_bound_exact_advantage",
    "snr_bound_simple",
]
