"""Calibration: products of inputs like the examples err less than with codes rounded to nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.api.calibration import Moments, calibrated, observe
from tile_types.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("one_schedule")

K, N = 96, 24


def inputs(rows: int, seed: int) -> Tensor:
    """Return inputs as layers get them: correlated, a few directions large."""
    mixing = torch.randn(K, K, generator=torch.Generator().manual_seed(7)) / K**0.5
    size = torch.logspace(-1, 1, K)
    return (torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * size) @ mixing


WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) ** 3
EXAMPLES, OTHERS = inputs(600, 0), inputs(600, 1)


def moments_of(x: Tensor) -> Moments:
    moments = Moments(torch.zeros(K, K))
    moments.add(x)
    return moments


def product_error(quantized: QuantizedTensor, x: Tensor) -> Tensor:
    """Return the error of each row's products."""
    error = torch.as_tensor(quantized.dequantize("float64")) - WEIGHT.double()
    return (x.double() @ error.T).square().sum(0)


FORMS = {
    "int4": {"group_size": 32},
    "int4 by row": {},
    "int3": {"group_size": 40},
    "int2": {"group_size": 32},
    "int8": {},
    "uint4": {"group_size": 32, "zero": "float"},
    "uint4 integer": {"group_size": 32, "zero": "integer"},
    "nf4": {"group_size": 32},
    "mxfp4": {},
    "mxfp8_e4m3": {},
    "nvfp4": {},
    "fp4_e2m1": {"group_size": 16},
    "ternary": {"group_size": 32},
    "int4 in blocks": {"block": (8, 32)},
}


@pytest.mark.parametrize("name", FORMS)
def test_products_err_less(name: str) -> None:
    options, ttype = FORMS[name], name.split()[0]
    plain = ladder.quantize(WEIGHT, ttype, **options)
    found = calibrated(WEIGHT, moments_of(EXAMPLES), ttype, **options)
    assert (found.ttype, found.block, found.scale_type) == (plain.ttype, plain.block, plain.scale_type)
    assert (found.zero_kind, found.tensor_scale, found.type_name) == (
        plain.zero_kind, plain.tensor_scale, plain.type_name,
    )  # fmt: skip
    seen, before = (product_error(q, EXAMPLES) for q in (found, plain))
    if plain.block[0] == 1:
        assert (seen <= before * (1 + 1e-5)).all()
    assert seen.sum() < 0.7 * before.sum()
    assert product_error(found, OTHERS).sum() < 0.8 * product_error(plain, OTHERS).sum()


def test_what_two_complement_reaches_on_one_side_is_used() -> None:
    """A group whose largest magnitude is positive takes a negative scale, so that -8 serves it."""
    found = calibrated(WEIGHT, moments_of(EXAMPLES), "int4", group_size=32)
    assert (found.scale < 0).any()
    assert (found.codes() == 8).any()  # -8


def test_inputs_that_say_nothing() -> None:
    """Channels that are always 0, and values that are not finite, leave the others right."""
    x = EXAMPLES.clone()
    x[:, ::3] = 0
    x[5, 1] = torch.inf
    found = calibrated(WEIGHT, moments_of(x), "int4", group_size=32)
    assert torch.isfinite(torch.as_tensor(found.dequantize("float32"))).all()
    plain = ladder.quantize(WEIGHT, "int4", group_size=32)
    x = x[x.isfinite().all(1)]
    assert product_error(found, x).sum() < product_error(plain, x).sum()


def test_wide_types_are_left_alone() -> None:
    found = calibrated(WEIGHT, moments_of(EXAMPLES), "float16")
    assert torch.equal(
        torch.as_tensor(found.codes()).int(),
        torch.as_tensor(ladder.quantize(WEIGHT, "float16").codes()).int(),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.idle = nn.Linear(K, 64), nn.Linear(64, 32), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


@pytest.mark.parametrize(
    "batches", [[EXAMPLES], [(EXAMPLES, 2.0)], [{"x": EXAMPLES[:300]}, [EXAMPLES[300:]]]]
)
def test_models_are_calibrated_by_rule(batches: list[object]) -> None:
    plain = ladder.quantize(Net(), weight="int3", group_size=32, skip=["idle"])
    model = ladder.quantize(Net(), weight="int3", group_size=32, skip=["idle"], calibration=batches)
    with torch.no_grad():
        exact = Net()(OTHERS)
        errors = [float((m(OTHERS) - exact).norm() / exact.norm()) for m in (model, plain)]
    assert errors[0] < 0.8 * errors[1]
    rows = {row.name: row.observed for row in ladder.quantization(model).rows}
    assert rows == {"first": 600, "second": 600, "idle": 0}


def test_layers_that_no_example_reaches() -> None:
    model = ladder.quantize_(Net(), "int4", group_size=8, calibration=[EXAMPLES])
    rows = {row.name: row for row in ladder.quantization(model).rows}
    assert rows["idle"].observed == 0
    assert not rows["idle"].reason


def test_calibration_needs_examples() -> None:
    with pytest.raises(ladder.LadderError, match="at least one batch"):
        ladder.quantize_(Net(), "int4", calibration=[])
    assert not observe(Net(), [], [EXAMPLES])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_examples_without_a_finite_row_are_refused(value: float) -> None:
    """They calibrated nothing and said nothing."""
    with pytest.raises(ladder.LadderError, match="all 600 rows that first got"):
        ladder.quantize_(Net(), "int4", group_size=8, calibration=[EXAMPLES * value])


def test_layers_that_are_called_by_keyword_are_observed() -> None:
    class Named(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(input=self.first(input=x).relu())

    model = ladder.quantize_(Named(), "int8", group_size=8, calibration=[EXAMPLES])
    assert {row.name: row.observed for row in ladder.quantization(model).rows}["second"] == 600
    with torch.no_grad():
        assert (model(OTHERS) - Named()(OTHERS)).norm() < 0.02 * Named()(OTHERS).norm()
