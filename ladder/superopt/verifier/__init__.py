r"""Equality of tile-graph programs, by finite fields, with a proved bound on the error.

`verify_equal` decides whether a program may replace another: whether it is defined, and has the same values,
for all inputs for which all values of the other are finite real numbers. It returns a `Certificate` with a
bound ``delta`` on the probability that it accepts what may not: an exact fraction, added up over all tests
that were made. The verifier draws its seeds, of 128 bits; a seed that the caller gives replays the draws of a
certificate and proves nothing.

What is tested
--------------
LAX programs (Mirage, OSDI'25, §5) consist of multilinear operators, division, at most one exponential
on a path, square roots, and maxima that cancel. One *draw* takes a random prime p from the family of
`ladder.ir.modular.draw_prime` (p = 2q + 1, q prime, p = q = 3 mod 4, 31 bits), independent uniform
inputs x over Z_p and, for use in exponents, y over Z_q, and evaluates both programs K times, the k-th
time (k = 1 ... K) with exp(h) read as ``omega**(k h(y))``, omega = 4 of order q. A draw in which some
division or root is undefined is thrown away; one in which an output differs rejects; R defined draws
in which all outputs agree at all K points accept, each within A attempts.

Why it is right
---------------
An output element of the two programs is ``N_A / D_A`` and ``N_B / D_B``, polynomials in x, in square
roots s_1 ... s_m of m distinct radicands, and in exponentials. Let
``P = N_A D_B - N_B D_A = sum_j f_j exp(H_j)``, with pairwise different exponents ``H_j = u_j / v_j`` and
coefficients f_j that are not zero; at most K of them. Equal programs give P = 0 and agree in every
defined draw: they are never rejected. Suppose the programs differ as real functions somewhere; then
P is not empty. Let d bound all degrees of f_j, u_j and v_j.

1. *Exponentials.* If the draw is defined and all outputs agree, then
   ``sum_j f_j(x) z_j**k = 0`` for k = 1 ... K, with ``z_j = omega**H_j(y)`` not 0. Merge equal z_j; the
   distinct ones have a Vandermonde matrix that is invertible over Z_p, so every merged coefficient is 0,
   also that of z_1. Hence either ``f_1(x) = 0`` or ``H_j(y) = H_1(y)`` for some j > 1 (omega has order q).
   This is why one evaluation is not enough: for fixed coefficients a sum of K powers of omega can vanish
   at all but few of the characters. Points 1 ... K serve as well as 0 ... K-1, and a denominator such as
   1 - exp(h) does not vanish at all of them.
2. *Schwartz-Zippel.* f_1 is not 0 and of degree <= d: it vanishes at a random x with probability
   <= d / p. ``u_j v_1 - u_1 v_j`` is not 0 and of degree <= 2d: <= 2d / q for each j, and <= d / q for each
   v_j. The sum is at most the bound that the certificate states,
   ``(K (K - 1) d + K d) / q + 2 d / p``.
3. *Square roots.* The m radicands are rational functions of the inputs without roots or exponentials
   (others are refused by name). If no product of a non-empty subset of them is a square, then adjoining
   their roots to the rational functions gives a field of degree 2**m; an element of it that is not 0 has
   a norm, the product of its 2**m conjugates, that is a rational function, not 0, and of at most 2**m times
   its degree (a root counts half of its radicand). A draw where ``f_1`` vanishes is a zero of the norm.
   So step 2 holds with ``2**m d`` for d. Independence is *proved*, not assumed: if such a product were a
   square, it would be a quadratic residue wherever it is defined. So the residue characters of the
   radicands in any draw are a vector over GF(2), and m linearly independent vectors refute all subsets at
   once. Draws that are thrown away for a non-residue provide them. In Z_q likewise, if there are
   exponentials. Without such a proof, e.g. for ``sqrt(x * x)``, which is x or -x, or for sqrt(a), sqrt(b)
   and sqrt(a b) in one pair, the pair is refused: the test would pass in half of the draws.
   Roots count as of one radicand if their values agree in every one of T such draws; two different ones
   do with probability at most ``C(64, T) (4 d / p + ...)**T`` (`Bound.confusion`): T is chosen so that this
   is below delta / 4 over all pairs, and it is added to delta.
4. *Coefficients.* Steps 2 and 3 need f_1 and ``u_j v_1 - u_1 v_j`` to be nonzero modulo p and q, but
   constants of a program may be multiples of any fixed prime. The integer coefficients are at most
   2**b (b computed; constants are dyadic), so fewer than b / 30 primes p >= 2**30 divide all coefficients
   of f_1's norm, and fewer than b / 29 primes q >= 2**29 those of a difference of exponents. p is drawn from
   `SAFE_PRIMES` = 817344 primes, so the probability of a bad one is at most that many of 817344. Published
   verifiers use one prime and do not count this.
5. *Draws thrown away.* Let eps be the sum of 2 to 4: the probability that a draw is defined and agrees.
   A round takes the first defined one of at most A independent draws, so it accepts unequal programs with
   probability <= A eps, whatever the probability of being defined; R rounds with ``(A eps)**R = delta``.
   No estimate of how often denominators vanish is needed.

6. *Unknowns.* A maximum has no meaning in a field. It is taken as a variable of its own, a different one
   for each maximum of each program (the same for maxima of the same elements of the same values):
   programs accepted are equal whatever the maxima are, as softmax is. Roots are first taken as values of
   an unknown function, the same in both programs, drawn for each value of the radicand: that treats roots
   under roots, of squares and any number of them, and no draw is thrown away. What is tested are then
   polynomials in these variables, too, unless different radicands have the same value: with probability
   at most (D / p + bad primes) for each of the pairs, D the degree of their difference, which
   `Bound.merged` adds to eps. Accepted programs are equal for every function in place of the root. If
   they are not, nothing is decided: steps 2 to 4 are tried then.

Modes
-----
The test is made with more and more of the programs interpreted, until they agree. First all functions are
unknown: exponentials, roots, maxima, roundings, comparisons, conversions that lose something (`values`) are
variables, the same for equal operands. That treats functions of functions and integers, of which
nothing else is known. Then exponentials are interpreted as above, then roots, at last roots as products
of others (`relations`): ``sqrt(s) sqrt(t) = sqrt(s t)`` where s and t are not negative. Each mode has its
share of delta. Where the programs are defined is decided apart (`domains`): by signs, and by what the first
divides by and takes roots of.

K, d and b are computed by `forms` from both programs, element by element, in float64 below 2**50, where it is
exact; larger ones are refused. Rounding to the types in which the programs compute is the business of
`stability`. Programs must also store every
output element exactly once, see `coverage`.

Sizes. The test holds for the extents it is run with. `shrink` states when small ones suffice.
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
