"""Scalar codebooks of other tools' formats: found by name, not listed.

Sources: ``ggml-common.h`` of llama.cpp (``kvalues_iq4nl``, the levels of the iq1, iq2 and iq3 grids);
bitsandbytes ``functional.get_4bit_type("fp4")``.
"""

from __future__ import annotations

from tile_types.ttype import TType


def _signed(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the levels, then their negatives."""
    return (*levels, *(0.0 - level for level in levels))


CODEBOOKS: dict[str, tuple[tuple[float, ...], str]] = {
    "binary": ((-1.0, 1.0), "-1 and 1 (GGUF Q1_0)"),
    "q2": ((-1.0, 0.0, 1.0, 2.0), "-1 to 2 (GGUF Q2_0)"),
    "iq1": (
        (-1.125, -0.125, 0.875, -0.875, 0.125, 1.125),
        "-1, 0, 1 shifted by an eighth down or up (GGUF IQ1)",
    ),
    "iq2": (_signed((8.0, 25.0, 43.0, 43.0)), "grid levels of GGUF IQ2 with a sign"),
    "iq3": (
        _signed((4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)),
        "grid levels of GGUF IQ3_XXS with a sign",
    ),
    "iq3_s": (_signed((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)), "grid levels of GGUF IQ3_S with a sign"),
    "iq4": (
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
        "levels of GGUF IQ4_NL and IQ4_XS",
    ),
    "bnb_fp4": (
        _signed(
            (
                0.0,
                0.005208333488553762,
                0.6666666865348816,
                1.0,
                0.3333333432674408,
                0.5,
                0.1666666716337204,
                0.25,
            )
        ),
        "4-bit floats of bitsandbytes, not OCP's e2m1",
    ),
}
"""Name -> the value of each code, and what it is. Codes past the last value never occur."""


def codebook_type(name: str) -> TType:
    """Return the type of a codebook of `CODEBOOKS`."""
    values, doc = CODEBOOKS[name]
    bits = max(1, (len(values) - 1).bit_length())
    padded = (*values, *(0.0 for _ in range((1 << bits) - len(values))))
    return TType(
        name,
        bits,
        lambda code, ops: ops.lookup(padded, code),
        finite_codes=None if len(padded) == len(values) else tuple(range(len(values))),
        exact=name != "bnb_fp4",
        doc=doc,
    )
