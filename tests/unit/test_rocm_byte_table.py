"""Look-ups by V_PERM: proven in every order of bits, chosen for types of any values, and what they cost."""

from __future__ import annotations

import pytest

from ladder.lower.gpu.proof import prove
from ladder.lower.gpu.proven import packed_order
from ladder.lower.gpu.recipes import Conversion
from ladder.lower.rocm.decode import ORDERS, best_recipe, propose_byte_table, vector_instructions
from schedules.cost_amd import TABLE_OPERATIONS
from schedules.layouts import orders
from targets import get_device
from tests.user_types import user_type
from tile_types import get_type

GPU = get_device("rocm/gfx942")
TYPES = ("int1", "ternary", "int3", "nf4", "fp4_e2m1", "int5", "fp6_e3m2", "int7", "fp8_e4m3", "posit6")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("operand", ["float16", "bfloat16", "int8"])
def test_every_code_in_every_place(name: str, operand: str) -> None:
    ttype = user_type(name)
    if operand == "int8" and not name.startswith("int"):
        pytest.skip("not whole numbers")
    lane = 8 if operand == "int8" else 16
    zeros = ("none", "integer") if name.startswith("int") and name != "int7" else ("none",)
    for order in set(orders(ttype.elem_bits, lane)) & set(ORDERS):
        for zero in zeros:
            conversion = Conversion(ttype, operand, zero, order=order)
            (recipe,) = propose_byte_table(conversion)
            prove(recipe, conversion)


@pytest.mark.parametrize("bits", TABLE_OPERATIONS)
@pytest.mark.parametrize("operand", ["float16", "bfloat16"])
def test_what_the_model_counts(bits: int, operand: str) -> None:
    ttype = user_type(f"random{bits}")
    conversion = Conversion(ttype, operand, order=packed_order(ttype, operand))
    best = best_recipe(conversion, GPU)
    assert best.strategy == "byte table"
    counted = vector_instructions(best.recipe, conversion) / 32
    assert counted == pytest.approx(TABLE_OPERATIONS[bits], rel=0.03)


def test_equal_halves_and_signs_cost_less() -> None:
    """Values that repeat are picked once; those of the other sign take the bit itself."""
    counts = []
    for name in ("random5", "log5"):
        ttype = user_type(name)
        conversion = Conversion(ttype, "float16", order=packed_order(ttype, "float16"))
        counts.append(vector_instructions(best_recipe(conversion, GPU).recipe, conversion))
    assert counts[1] < counts[0]


def test_exact_arithmetic_stays() -> None:
    conversion = Conversion(get_type("int4"), "float16", raw=True)
    assert best_recipe(conversion, GPU).strategy == "placed"
