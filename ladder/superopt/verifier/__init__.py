"""Equality of tile-graph programs, by finite fields, with a proved bound on the error.

`verify_equal` decides whether a program may replace another, and `verify_for_all_extents` whether at
all extents. What is tested, and the proofs, are in `README.md`.
"""

from __future__ import annotations

from ladder.superopt.verifier.bound import Bound, rounded_up
from ladder.superopt.verifier.certificate import DELTA, Certificate
from ladder.superopt.verifier.equivalence import agree_at_once, refusal, verify_equal
from ladder.superopt.verifier.shrink import verify_for_all_extents
from ladder.superopt.verifier.stability import SLACK, SUBTRACTS, Stability, check_stability, subtracted_degree

__all__ = [
    "DELTA",
    "SLACK",
    "SUBTRACTS",
    "Bound",
    "Certificate",
    "Stability",
    "agree_at_once",
    "check_stability",
    "refusal",
    "rounded_up",
    "subtracted_degree",
    "verify_equal",
    "verify_for_all_extents",
]
