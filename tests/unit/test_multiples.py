"""Types that a product holds as a power of two times their values."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import ladder
from tile_types import TType, get_type, list_types, register_type
from tile_types.errors import ConversionError, ShapeError, ValueRangeError
from tile_types.identity import own_values, own_values_named
from tile_types.multiples import held_multiple

ROUNDED = 1e-2
"""Relative error of rows that are rounded to 8 bits."""


def table(name: str, values: Sequence[float], *, exact: bool = True) -> TType:
    held = tuple(map(float, values))
    bits = (len(held) - 1).bit_length()
    return register_type(TType(name, bits, lambda code, ops: ops.lookup(held, code), exact=exact))


STEPS = np.arange(16) - 8
FIBONACCI = [0, 1, 2, 3, 5, 8, 13, 21, -1, -2, -3, -5, -8, -13, -21, -31]
HELD = {
    "quarters4": (STEPS / 4, ("int8",)),
    "fibonacci4": (np.array(FIBONACCI) / 4, ("int8",)),
    "thousands4": (STEPS * 1024.0, ("int8",)),
    "faint4": (STEPS * 2.0**-40, ("int8", "fp8_e4m3", "float16")),
    "small4": (STEPS * 2.0**-18, ("float16",)),
}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("name", "core"), [(name, core) for name in HELD for core in HELD[name][1]])
def test_held_values_are_a_power_of_two_times_them(name: str, core: str) -> None:
    own = table(name, HELD[name][0])
    held = held_multiple(own, (core,))
    ratio = held.values()[own.values() != 0] / own.values()[own.values() != 0]
    assert held.multiple_of is not None
    assert np.unique(ratio).tolist() == [2.0 ** held.multiple_of[1]]


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_types_that_fit_or_ship_are_held_as_they_are(zero: str) -> None:
    whole = table("whole4", STEPS)
    for ttype in (whole, *(each for each in list_types() if own_values(each) == {})):
        assert held_multiple(ttype, ("int8",), zero) is ttype.element_type
    assert held_multiple(whole, ("float16",), zero) is whole


def test_values_that_no_multiple_fits_are_refused_by_their_own_name() -> None:
    table("thirds4", np.append(STEPS[:-1] / 3, 100))
    with pytest.raises(ConversionError, match="thirds4 does not fit in int8"):
        ladder.Matmul(8, 64, "thirds4", "int8")


@pytest.mark.parametrize("group", [None, 16, 48])
@pytest.mark.parametrize("name", ["quarters4", "fibonacci4", "thousands4", "faint4"])
def test_products_of_bytes(name: str, group: int | None) -> None:
    table(name, HELD[name][0])
    weight = ladder.quantize(torch.randn(40, 96), name, group_size=group, scale_type="float32")
    op = ladder.Matmul(40, 96, name, "int8", group_size=group)
    x, scale = torch.randint(-127, 128, (5, 96), dtype=torch.int8), torch.rand(5) + 0.5
    exact = scale.double()[:, None] * (x.double() @ weight.dequantize("float64").T)
    assert relative(op(x, op.pack(weight), token_scale=scale), exact) < 1e-6


def test_layers_keep_the_own_type(tmp_path: Path) -> None:
    table("quarters4", HELD["quarters4"][0])
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).eval()
    x = torch.randn(3, 64)
    ladder.quantize_(model, "quarters4", group_size=16, activation="int8")
    dense = x.double()
    for layer in model:
        dense = dense @ layer.weight.double().T + layer.bias.double()
    y = model(x)
    assert relative(y, dense) < 2 * ROUNDED
    assert "quarters4_g16 x int8" in str(ladder.quantization(model))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    other = ladder.Linear(64, 32, weight="quarters4", group_size=16, activation="int8")
    other.load_state_dict(model[0].state_dict())
    assert torch.equal(other(x), model[0](x))
    path = ladder.compile(model).export(tmp_path / "model.ladder", x)
    assert relative(ladder.load(path)(x), y.double()) < ROUNDED


def test_expressions_multiply_what_is_written() -> None:
    table("quarters4", HELD["quarters4"][0])
    a = ladder.tensor("A", ("M", 64), "int8")
    b = ladder.tensor("B", (32, 64), "quarters4", group_size=16)
    c = ladder.compute(("M", 32), lambda m, n, k: a[m, k] * b[n, k], reduce={"k": 64}, output="float32")
    weight = ladder.quantize(torch.randn(32, 64), "quarters4", group_size=16)
    op, x = ladder.compile_expression(c), torch.randint(-127, 128, (5, 64), dtype=torch.int8)
    assert relative(op(x, op.pack(weight)), x.double() @ weight.dequantize("float64").T) < 1e-6


def test_expressions_keep_small_values() -> None:
    table("small4", HELD["small4"][0])
    a = ladder.tensor("A", ("M", 64), "float16")
    b = ladder.tensor("B", (64, 64), "small4", group_size=16)
    c = ladder.compute(("M", 64), lambda m, n, k: a[m, k] * b[n, k], reduce={"k": 64}, output="float16")
    weight = ladder.quantize(torch.randn(64, 64), "small4", group_size=16, scale_type="float32")
    op, x = ladder.compile_expression(c, "cuda/sm_80"), torch.randn(5, 64).half()
    y = torch.as_tensor(ladder.simulate(op, x, op.pack(weight, "cpu")).y)
    assert relative(y, x.double() @ weight.dequantize("float64").T) < 6e-4


@pytest.mark.parametrize("zero", ["none", "float"])
@pytest.mark.parametrize("target", ["cuda/sm_80", "cuda/sm_90a", "rocm/gfx942"])
def test_small_values_keep_their_bits_in_halves(target: str, zero: str) -> None:
    table("small4", HELD["small4"][0])
    table("smallcodes3", np.array([-1, -0.61, -0.3, -0.1, 0, 0.2, 0.5, 0.95]) * 1e-5, exact=False)
    for name in ("small4", "smallcodes3"):
        options = {"group_size": 32, "zero": zero}
        weight = ladder.quantize(torch.randn(64, 128), name, scale_type="float32", **options)
        op = ladder.Matmul(64, 128, name, target=target, **options)
        x = torch.randn(5, 128).half()
        result = ladder.simulate(op, x, op.pack(weight, "cpu"))
        assert not result.findings
        assert relative(torch.as_tensor(result.y), x.double() @ weight.dequantize("float64").T) < 6e-4


def test_large_values_less_their_zero_points_are_finite_in_halves() -> None:
    table("skewed3", [0, 1, 2, 3, 4, 5, 6, 60000])
    weight = ladder.quantize(
        torch.randn(64, 64), "skewed3", group_size=32, zero="float", scale_type="float32"
    )
    op = ladder.Matmul(64, 64, "skewed3", group_size=32, zero="float", target="cuda/sm_80")
    x = torch.randn(5, 64).half()
    y = torch.as_tensor(ladder.simulate(op, x, op.pack(weight, "cpu")).y)
    assert relative(y, x.double() @ weight.dequantize("float64").T) < 6e-4


def test_wrong_weights_are_named_by_their_own_types() -> None:
    table("quarters4", HELD["quarters4"][0])
    op = ladder.Matmul(8, 64, "quarters4", "int8")
    with pytest.raises(ShapeError, match=r"type is int4, expected quarters4$"):
        op.pack(ladder.quantize(torch.randn(8, 64), "int4"))


def test_multiples_are_told_apart_by_the_values_of_their_base() -> None:
    own = table("quarters4", HELD["quarters4"][0])
    held = held_multiple(own, ("int8",))
    assert own_values(held) == own_values(own) == own_values_named(f"x {held.name}_g32 y")
    assert get_type(f"{held.name}_g32").element_type is held


def test_a_type_with_the_name_of_a_multiple_is_refused() -> None:
    table("halves4", STEPS / 2)
    table("halves4_times_2p1", STEPS)
    with pytest.raises(ValueRangeError, match="choose another name"):
        ladder.Matmul(8, 64, "halves4", "int8")
