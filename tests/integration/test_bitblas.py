"""The drop-in for BitBLAS: every kind of operand against float64, layouts against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ladder.integrations.bitblas as bitblas
from ladder.integrations.bitblas.config import ELEMENTS
from ladder.integrations.bitblas.layouts import Layout, interleaving, tile_order
from tile_types.errors import LadderError

pytestmark = pytest.mark.usefixtures("one_schedule")

N, K, GROUP = 32, 128, 32


def config(**fields) -> bitblas.MatmulConfig:
    return bitblas.MatmulConfig(**{"M": 4, "N": N, "K": K, **fields})


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-3) -> bool:
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= bound * expected.double().norm())


def random_values(name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `transform_weight` takes, and the values."""
    source, bits = ELEMENTS[name].source, ELEMENTS[name].bits
    codes = torch.randint(0, 1 << bits, shape)
    tables = {
        "nf4": bitblas.Matmul(config(W_dtype="nf4")).lut,
        "fp4_e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    }
    if name in tables:
        return codes.char(), tables[name].double()[codes]
    if name == "int1":
        return (codes * 2 - 1).char(), (codes * 2 - 1).double()
    values = codes - (1 << (bits - 1)) if source == "int" else codes
    return values.char(), values.double()


@pytest.mark.parametrize("fast", [None, False])
@pytest.mark.parametrize("tiles", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "name", ["int4", "uint4", "int2", "uint2", "int1", "uint1", "nf4", "fp4_e2m1", "int8"]
)
def test_stored_weights_read_back(name: str, tiles: int, fast: bool | None) -> None:
    op = bitblas.Matmul(config(W_dtype=name, propagate_b=tiles, fast_decoding=fast))
    weight, values = random_values(name, (N, K))
    stored = op.transform_weight(weight)
    assert stored.numel() == np.prod(op.retrieve_weight_shape())
    for form in (stored, stored.view(op.retrieve_weight_shape())):
        assert torch.equal(op.quantized(form).dequantize().to(torch.float16), values.to(torch.float16))


@pytest.mark.costly
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["original", "rescale", "quantized"])
def test_zeros(mode: str, bias: bool) -> None:
    torch.manual_seed(0)
    op = bitblas.Matmul(
        config(
            W_dtype="uint4",
            group_size=GROUP,
            with_scaling=True,
            with_zeros=True,
            zeros_mode=mode,
            with_bias=bias,
        )
    )
    codes, points = torch.randint(0, 16, (N, K)), torch.randint(0, 16, (N, K // GROUP))
    scale, x = torch.rand(N, K // GROUP).half() + 0.5, torch.randn(5, K).half()
    real = points.half()
    zeros = {"original": real, "rescale": real * scale}.get(mode)
    if zeros is None:
        zeros = torch.from_numpy(bitblas.quantization.general_compress(points.t().contiguous().numpy(), 4))
    wide = [part.double().repeat_interleave(GROUP, 1) for part in (scale, real, real * scale)]
    values = codes * wide[0] - wide[2] if mode == "rescale" else (codes - wide[1]) * wide[0]
    vectors = [torch.randn(N).half()] * bias
    expected = x.double() @ values.T + sum(vectors)
    assert close(op(x, op.transform_weight(codes), scale, zeros, *vectors), expected)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("activation", "weight", "output"),
    [
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "uint4", "float32"),
        ("float32", "float32", "float32"),
        ("e4m3_float8", "e4m3_float8", "float32"),
        ("float16", "e4m3_float8", "float16"),
        ("int8", "int2", "float32"),
    ],
)  # fmt: skip
def test_types(activation: str, weight: str, output: str) -> None:
    torch.manual_seed(0)
    op = bitblas.Matmul(config(A_dtype=activation, W_dtype=weight, out_dtype=output))
    x = torch.randint(-4, 5, (3, K)).to(ELEMENTS[activation].dtype)
    values = torch.randint(0, 2, (N, K)).to(ELEMENTS[weight].dtype or torch.int8)
    y = op(x, op.transform_weight(values))
    assert y.dtype == ELEMENTS[output].dtype
    assert close(y, x.double() @ values.double().T)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("activation", "weight"), [("int8", "int8"), ("int8", "uint4"), ("int4", "int4"), ("uint4", "int2")]
)
def test_sums_of_integers_are_exact(activation: str, weight: str) -> None:
    k = 4096
    op = bitblas.Matmul(
        bitblas.MatmulConfig(M=1, N=16, K=k, A_dtype=activation, W_dtype=weight, out_dtype="int32")
    )
    half = 1 << (ELEMENTS[activation].bits - 1)
    low, high = (0, 2 * half) if activation[0] == "u" else (-half, half)
    x = torch.randint(low, high, (3, k)).to(torch.int8)
    x[0], values = high - 1, random_values(weight, (16, k))[1].long()
    values[0] = values.max()
    given = x if half > 8 else (x[:, ::2] & 15) + ((x[:, 1::2] & 15) << 4)
    small = weight == activation or half <= 8
    stored = torch.from_numpy(bitblas.quantization.general_compress(values.numpy(), ELEMENTS[weight].bits))
    stored = stored if small and ELEMENTS[weight].bits < 8 else op.transform_weight(values.to(torch.int8))
    if op.config.fast_decoding and small:
        stored = op._store(values.to(torch.int8))
    y = op(given, stored)
    assert y.dtype == torch.int32
    assert torch.equal(y.long(), x.long() @ values.T)


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_layouts_of_operands(layout: str) -> None:
    torch.manual_seed(0)
    op = bitblas.Matmul(config(layout=layout, propagate_b=False))
    x, weight = torch.randn(6, K).half(), torch.randn(N, K).half()
    given = x.t().contiguous() if layout[0] == "t" else x
    stored = op.transform_weight(weight.t().contiguous() if layout[1] == "n" else weight)
    assert close(op(given, stored), x.double() @ weight.double().T)


def test_interleaving_is_what_numpy_gives() -> None:
    # Two half words take codes in turns: a mask and a shift give the halves of a pair of float16.
    assert interleaving(4, "float16", 16) == (0, 4, 1, 5, 2, 6, 3, 7)
    packed = np.array([[0x10, 0x32, 0x54, 0x76]], np.uint8).view(np.int8)  # codes 0 to 7
    assert bitblas.quantization.interleave_weight(packed).view(np.uint32)[0, 0] == 0x75316420
    for bits, name, width in ((1, "float16", 16), (2, "float16", 16), (1, "int8", 8), (2, "int8", 8)):
        assert sorted(interleaving(bits, name, width)) == list(range(32 // bits))


@pytest.mark.parametrize(("columns", "quarter"), [(16, 2), (32, 4)])
def test_tiles_are_what_tensor_cores_hold(columns: int, quarter: int) -> None:
    # Lane t of mma.m16n8k(2 * columns bytes) holds, of operand B, `quarter` neighbours of row t // 4, from
    # column t % 4 * quarter on, of each 8 x half matrix; the four matrices follow each other.
    half = columns // 2
    order = tile_order(columns, 3).view(32, 4, quarter)
    for lane in range(32):
        for matrix in range(4):
            row = lane // 4 + 8 * (matrix // 2)
            column = lane % 4 * quarter + half * (matrix % 2)
            expected = row * columns + column + torch.arange(quarter)
            assert torch.equal(order[lane, matrix], expected)


@pytest.mark.costly
def test_layers_of_gptq() -> None:
    torch.manual_seed(0)
    codes, points = torch.randint(0, 16, (K, N)), torch.randint(1, 17, (K // GROUP, N))
    scale = torch.rand(K // GROUP, N).half()

    def words(rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(bitblas.quantization.general_compress(rows.contiguous().numpy(), 4)).view(
            torch.int32
        )

    source = torch.nn.Module()
    source.qweight, source.qzeros = words(codes.t()).t(), words(points - 1)
    source.scales, source.bias = scale, torch.randn(N).half()
    x = torch.randn(3, K).half()
    spread = [part.repeat_interleave(GROUP, 0) for part in (points % 16, scale.double())]
    expected = x.double() @ ((codes - spread[0]) * spread[1]) + source.bias
    for mode in ("original", "rescale", "quantized"):
        options = {
            "W_dtype": "uint4",
            "group_size": GROUP,
            "with_scaling": True,
            "with_zeros": True,
            "zeros_mode": mode,
        }
        layer = bitblas.Linear(K, N, True, opt_M=1, **options)
        layer.repack_from_gptq(source)
        assert close(layer(x), expected)
        other = bitblas.Linear(K, N, True, opt_M=1, **options)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
    source.g_idx = torch.randperm(K) // GROUP
    with pytest.raises(LadderError, match="desc_act"):
        layer.repack_from_gptq(source)


@pytest.mark.costly
def test_a_changed_weight_is_packed_again() -> None:
    op = bitblas.Matmul(config(W_dtype="uint4", with_scaling=True))
    x, stored = torch.ones(1, K).half(), op.transform_weight(torch.ones(N, K))
    scale = torch.ones(N, 1).half()
    assert op(x, stored, scale)[0, 0] == K
    scale *= 2
    assert op(x, stored, scale)[0, 0] == 2 * K
    stored.copy_(op.transform_weight(torch.full((N, K), 3)))
    assert op(x, stored, scale)[0, 0] == 6 * K
    output = torch.empty(1, N).half()
    assert op(x, stored, scale, output=output) is output


def test_refusals() -> None:
    for fields, text in (
        ({"A_dtype": "uint8"}, "A_dtype"),
        ({"W_dtype": "int3"}, "W_dtype"),
        ({"group_size": 48}, "does not divide"),
        ({"W_dtype": "uint4", "layout": "nn"}, "packed along K"),
        ({"W_dtype": "float32"}, "weights of float32 need"),
        ({"N": 24, "propagate_b": 3}, "do not cover"),
    ):
        with pytest.raises(LadderError, match=text):
            config(**fields)
    op = bitblas.Matmul(config(W_dtype="uint4", with_bias=True))
    with pytest.raises(LadderError, match=r"come \['bias'\], got 0"):
        op(torch.ones(1, K).half(), op.transform_weight(torch.ones(N, K)))
    with pytest.raises(LadderError, match="is expected"):
        op(torch.ones(1, K).half(), torch.ones(N, K).char(), torch.ones(N).half())


def test_a_weight_takes_its_place_in_tiles_once() -> None:
    assert Layout(32, 64, 8, None, 3, 32).shape == [2, 2, 16, 32]


@pytest.mark.costly
def test_source_and_latency() -> None:
    op = bitblas.Matmul(config(W_dtype="uint4", with_scaling=True, group_size=GROUP))
    assert ("__global__" if torch.cuda.is_available() else "prim_func") in op.get_source()
    assert op.profile_latency({"m": 2}) > 0
    assert hash(op.config) == hash(config(W_dtype="uint4", with_scaling=True, group_size=GROUP))
