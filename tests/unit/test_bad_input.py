"""Values of a wrong kind for public functions: one error of Ladder's own that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ladder
from tile_types.errors import DTypeError

ODD: list[Any] = [
    *("x", 1.5, object(), float("nan"), b"x", 1 << 70),
    *(torch.zeros(0), torch.zeros(3, 3), torch.zeros(2, 2, device="meta")),
]

HELD = ladder.quantize(torch.ones(4, 64), "int4", group_size=64)
CODES = torch.zeros(4, 64, dtype=torch.uint8)
PRODUCT = ladder.Matmul(N=4, K=64, weight="int4", group_size=64)
EXPERTS = ladder.GroupedMatmul(1, N=4, K=64, weight="int4", group_size=64)


GPU = ladder.Matmul(N=4, K=64, weight="int4", group_size=64, target="rocm/gfx942")
ROWS = torch.ones(2, 64).half()
CONV = torch.nn.Conv2d(8, 8, 3)


@cache
def packed() -> Any:
    return GPU.pack(HELD, "cpu")


def _floats(odd: Any) -> Any:
    """Return an odd value, or for a tensor one of real numbers, which are no codes."""
    return odd.float() if isinstance(odd, torch.Tensor) else odd


CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda odd: ladder.quantize(torch.ones(2, 64), "int4", group_size=odd),
    "quantize_tokens": lambda odd: ladder.quantize_tokens(torch.ones(2, 64), "int8", group_size=odd),
    "quantization": lambda odd: ladder.quantization(odd),
    "quantize_": lambda odd: ladder.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), overrides=odd),
    "Matmul N": lambda odd: ladder.Matmul(N=odd, K=64, weight="int4"),
    "Matmul epilogue": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", epilogue=odd),
    "Matmul output": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", output=odd),
    "Matmul activation": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", activation=odd),
    "Matmul plan": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", plan=odd),
    "GroupedMatmul plan": lambda odd: ladder.GroupedMatmul(1, N=64, K=64, weight="int4", plan=odd),
    "GroupedMatmul": lambda odd: ladder.GroupedMatmul(odd, N=64, K=64, weight="int4"),
    "Gemm": lambda odd: ladder.Gemm(n=odd, k=64, weight="int4"),
    "TType decode": lambda odd: ladder.TType("odd", 4, odd),
    "tensor": lambda odd: ladder.tensor("A", odd, "float16"),
    "compute": lambda odd: ladder.compute((4,), odd),
    "compile_expression": lambda odd: ladder.compile_expression(odd),
    "compile": lambda odd: ladder.compile(torch.nn.Linear(2, 2), backend=odd),
    "superoptimize": lambda odd: ladder.superoptimize(odd, [torch.ones(2, 2)]),
    "compile search": lambda odd: ladder.compile(torch.nn.Linear(2, 2), search=[odd]),
    "compile precise": lambda odd: ladder.compile(torch.nn.Linear(2, 2), precise=[odd]),
    "superoptimize seed": lambda odd: ladder.superoptimize(torch.relu, [torch.ones(2, 2)], seed=[odd]),
    "superoptimize reuse": lambda odd: ladder.superoptimize(torch.relu, [torch.ones(2, 2)], reuse=[odd]),
    "from_linear": lambda odd: ladder.Linear.from_linear(odd, "int4"),
    "from_quantized": lambda odd: ladder.Linear.from_quantized(odd),
    "from_quantized bias": lambda odd: ladder.Linear.from_quantized(HELD, odd),
    "from_codes": lambda odd: ladder.QuantizedTensor.from_codes(_floats(odd), "int4", (1, 64)),
    "from_codes block": lambda odd: ladder.QuantizedTensor.from_codes(CODES, "int4", odd),
    "from_codes extent": lambda odd: ladder.QuantizedTensor.from_codes(CODES, "int4", (1, odd)),
    "from_codes scale": lambda odd: ladder.QuantizedTensor.from_codes(CODES, "int4", (1, 64), scale=[odd]),
    "from_codes scale_type": lambda odd: ladder.QuantizedTensor.from_codes(
        CODES, "int4", (1, 64), scale=torch.ones(4, 1), scale_type=odd
    ),
    "from_codes zero_kind": lambda odd: ladder.QuantizedTensor.from_codes(
        CODES, "int4", (1, 64), zero=CODES[:, :1], zero_kind=odd
    ),
    "GroupedMatmul pack": lambda odd: EXPERTS.pack(odd),
    "GroupedMatmul pack of one": lambda odd: EXPERTS.pack([odd]),
    "GroupedMatmul offsets": lambda odd: EXPERTS(torch.ones(2, 64).half(), EXPERTS.pack([HELD]), odd),
    "pack on": lambda odd: PRODUCT.pack(HELD, odd),
    "Conv": lambda odd: ladder.Conv.from_conv(torch.nn.Conv2d(8, 8, 3), "int4")(odd),
}


TEXTS: list[Any] = [np.ones(2), torch.zeros(3), [], {}, 1.5, object()]
"""No names: some have no truth value, some no hash."""

NAMES: dict[str, Callable[[Any], Any]] = {
    "zero": lambda odd: ladder.quantize(torch.ones(2, 64), "int4", zero=odd),
    "scaling": lambda odd: ladder.quantize(torch.ones(2, 64), "int4", scaling=odd),
    "scale_type": lambda odd: ladder.quantize(torch.ones(2, 64), "int4", scale_type=odd),
    "output": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", output=odd),
    "zero of a product": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", group_size=64, zero=odd),
    "masked": lambda odd: ladder.GroupedMatmul(1, N=64, K=64, weight="int4", masked=odd),
    "scale of blocks": lambda odd: ladder.group_scaled("int4", 32, scale=odd),
    "zero of blocks": lambda odd: ladder.group_scaled("int4", 32, zero=odd),
    "metadata": lambda odd: ladder.Metadata(odd, "e8m0"),
    "activation of a layer": lambda odd: ladder.Linear(64, 64, activation=odd),
    "dtype of a layer": lambda odd: ladder.Linear(64, 64, dtype=odd),
    "group_size of a convolution": lambda odd: ladder.Conv.from_conv(CONV, "int4", group_size=odd),
    "group_size of a tensor": lambda odd: ladder.tensor("A", (4, 64), "int4", group_size=odd),
    "reduce": lambda odd: ladder.compute((4,), lambda i: i, reduce=odd),
    "extent of a cache": lambda odd: ladder.KVCache(1, odd, 4, 8),
    "keys": lambda odd: ladder.KVCache(1, 2, 4, 8).append(odd, odd),
    "tokens of experts": lambda odd: EXPERTS(odd, EXPERTS.pack([HELD]), torch.tensor([0, 1])),
    "a quantized matrix": lambda odd: ladder.QuantizedTensor(odd, (4, 64), HELD.storage, (1, 64)),
    "a packed weight": lambda odd: ladder.PackedWeight(odd, "cpu", {}),
    "a tile": lambda odd: ladder.Tile(HELD.ttype, odd),
    "op to simulate": lambda odd: ladder.simulate(odd, torch.ones(2, 64), EXPERTS.pack([HELD])),
    "x to simulate": lambda odd: ladder.simulate(GPU, odd, packed()),
    "blocks to simulate": lambda odd: ladder.simulate(GPU, ROWS, packed(), blocks=odd),
    "stage to simulate": lambda odd: ladder.simulate(GPU, ROWS, packed(), stage=odd),
}


TAKEN: dict[str, Any] = {
    "reduce": dict,
    "a tile": list,
    "keys": torch.Tensor,
    "tokens of experts": torch.Tensor,
    "x to simulate": torch.Tensor,
}
"""What some do take."""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_name_is_refused(name: str) -> None:
    for odd in TEXTS:
        if isinstance(odd, TAKEN.get(name, ())):
            continue
        with pytest.raises(ladder.LadderError) as raised:
            NAMES[name](odd)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("search", [-1, float("nan"), True])
def test_seconds_of_a_search_are_no_less_than_none(search: float) -> None:
    with pytest.raises(ladder.LadderError, match="at least 0"):
        ladder.compile(torch.nn.Linear(2, 2), search=search)
    with pytest.raises(ladder.LadderError, match="seed is a whole number"):
        ladder.superoptimize(torch.relu, [torch.ones(2, 2)], seed=-1)


def test_paths_have_no_null_character(tmp_path: Path) -> None:
    for call in (ladder.load, ladder.load_checkpoint, ladder.KernelCache):
        with pytest.raises(ladder.LadderError, match="null character"):
            call(f"{tmp_path}/a\0b")
    with pytest.raises(ladder.LadderError, match="must be a path"):
        ladder.compile(torch.nn.Linear(2, 2)).export(torch.ones(1, 2))


@pytest.mark.parametrize("name", CALLS)
def test_odd_values_are_refused_by_name(name: str) -> None:
    for odd in ODD:
        with pytest.raises(ladder.LadderError) as raised:
            CALLS[name](odd)
        assert len(str(raised.value)) < 600, odd


@pytest.mark.parametrize("path", [3, 1.5, [], torch.zeros(2)], ids=str)
@pytest.mark.parametrize("taken", [PRODUCT.export, ladder.load, ladder.load_checkpoint, ladder.KernelCache])
def test_what_is_no_path_is_refused(taken: Callable[[Any], Any], path: Any) -> None:
    with pytest.raises(ladder.DTypeError, match="must be a path, got"):
        taken(path)


@pytest.mark.parametrize("options", [{"wieght": "int8"}, {"groupsize": 64}])
def test_options_of_layers_are_known_by_name(options: dict[str, Any]) -> None:
    """Python's own error named a function that nobody had called."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(ladder.UnknownNameError, match="option of a layer"):
        ladder.quantize_(model, "int4", **options)
    with pytest.raises(ladder.UnknownNameError, match="option of a layer"):
        ladder.quantize_(model, "int4", overrides={"0": options})
    assert type(model[0]) is torch.nn.Linear


TAKERS: dict[str, Callable[..., Any]] = {
    "quantize": partial(ladder.quantize, torch.zeros(64, 64), "int4"),
    "layer": partial(ladder.Linear.from_linear, torch.nn.Linear(64, 64)),
    "convolution": partial(ladder.Conv.from_conv, torch.nn.Conv2d(3, 4, 3)),
    "experts": partial(ladder.GroupedMatmul, 2, 64, 64, "int4"),
    "scaled": partial(ladder.Matmul, 64, 64, "mxfp4", "mxfp4"),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_options_that_nobody_takes_are_refused_with_those_known(taker: str) -> None:
    """Python's own error named a function that nobody had called, and no option that there is."""
    with pytest.raises(ladder.UnknownNameError, match=r"unknown option of .* 'foo'; known: .*group_size"):
        TAKERS[taker](foo=1)


def test_experts_take_no_option_of_windows() -> None:
    with pytest.raises(ladder.UnknownNameError, match="unknown option of GroupedMatmul 'residual'"):
        ladder.GroupedMatmul(2, 64, 64, "int4", residual=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_packing_for_a_gpu_that_is_not_there_says_so() -> None:
    with pytest.raises(ladder.DeviceError, match="no GPU here"):
        PRODUCT.pack(HELD, "cuda")


@pytest.mark.parametrize("rows", [torch.zeros(0), torch.tensor(1.0), torch.ones(2, 4).to_sparse()], ids=str)
def test_tokens_are_dense_rows(rows: torch.Tensor) -> None:
    with pytest.raises(ladder.LadderError, match="dense rows"):
        ladder.quantize_tokens(rows, "int8")


def test_a_cache_may_be_named_by_text(tmp_path: Any) -> None:
    assert ladder.KernelCache(str(tmp_path)).kernels == tmp_path / "kernels"


@pytest.mark.parametrize("codes", [[[0, 16]], [[-9, 0]], [[255, 1]]])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_codes_have_the_bits_of_their_type(codes: list[list[int]], dtype: torch.dtype) -> None:
    with pytest.raises(ladder.LadderError, match="have 4 bits"):
        ladder.QuantizedTensor.from_codes(torch.tensor(codes, dtype=dtype), "int4", (1, 2))
    held = ladder.QuantizedTensor.from_codes(torch.tensor([[-8, 15]], dtype=dtype), "int4", (1, 2))
    assert held.codes().tolist() == [[8, 15]]


@pytest.mark.parametrize("shape", [(8, 9, 7), (0, 8, 9, 7)], ids=["one image", "no image"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_quantized_convolutions_take_what_torch_takes(shape: tuple[int, ...], kernel: int) -> None:
    conv = torch.nn.Conv2d(8, 4, kernel, stride=2)
    x = torch.randn(shape)
    y = ladder.Conv.from_conv(conv, "int8")(x)
    torch.testing.assert_close(y, conv(x), rtol=0.02, atol=0.02)


def test_channels_that_a_quantized_convolution_does_not_take_are_named() -> None:
    with pytest.raises(ladder.ShapeError, match="x has 7 channels, the convolution takes 8"):
        ladder.Conv.from_conv(CONV, "int8")(torch.ones(1, 7, 9, 9))


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(4, 1), torch.ones(5)], ids=str)
def test_a_bias_is_one_number_per_output(bias: torch.Tensor) -> None:
    with pytest.raises(ladder.ShapeError, match=r"bias must have shape \[4\]"):
        ladder.Linear.from_quantized(HELD, bias)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Embedding(4, 64), nn.LayerNorm(64), nn.Conv1d(4, 4, 1)])
def test_a_module_without_a_matrix_and_a_bias_is_no_linear_layer(module: nn.Module) -> None:
    with pytest.raises(DTypeError, match=f"takes a linear layer, .* got {type(module).__name__}; "):
        ladder.Linear.from_linear(module, "int4")


@pytest.mark.parametrize("target", ["cpu", "cuda/sm_90a", "rocm/gfx942"])
def test_a_weight_without_scales_is_refused_where_groups_have_them(target: str) -> None:
    weight = ladder.QuantizedTensor.from_codes(
        torch.ones(16, 64, dtype=torch.uint8), "int4", (1, 16), scale_type="none"
    )
    op = ladder.Matmul(16, 64, "int4", group_size=16, target=None if target == "cpu" else target)
    with pytest.raises(ladder.ShapeError, match="the weight has none"):
        op.pack(weight, "cpu")
