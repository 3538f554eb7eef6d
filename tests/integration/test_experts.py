"""`GroupedMatmul` on this CPU: both layouts, errors, and the registered operator."""

from __future__ import annotations

import pytest
import torch

import ladder
from ladder.runtime import experts, operator
from tile_types.errors import DTypeError, LadderError, ShapeError, ValueRangeError

pytestmark = pytest.mark.usefixtures("one_schedule")

E, N, K = 3, 40, 72


def weights(ttype: str = "int4") -> list[ladder.QuantizedTensor]:
    generator = torch.Generator().manual_seed(1)
    return [ladder.quantize(torch.randn(N, K, generator=generator), ttype, group_size=24) for _ in range(E)]


def reference(
    x: torch.Tensor,
    matrices: list[ladder.QuantizedTensor],
    offsets: list[int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loop over experts in float64; rows of no expert are NaN."""
    y = torch.full((len(x), N), torch.nan, dtype=torch.float64)
    for e, matrix in enumerate(matrices):
        rows = slice(offsets[e], offsets[e + 1])
        y[rows] = x[rows].double() @ matrix.dequantize("float64").T + (
            0 if bias is None else bias[e].double()
        )
    return y


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    owned = exact.isfinite()
    return float((y.double()[owned] - exact[owned]).norm() / exact[owned].norm())


@pytest.mark.parametrize("offsets", [[0, 2, 2, 7], [0, 0, 0, 7], [0, 7, 7, 7], [1, 3, 4, 6], [-3, 2, 5, 99]])
def test_tokens_of_experts_follow_each_other(offsets: list[int]) -> None:
    matrices = weights()
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24, output="float32", bias=True)
    x, bias = torch.randn(7, K).half(), torch.randn(E, N)
    y = op(x, op.pack(matrices), torch.tensor(offsets, dtype=torch.int32), bias)
    assert relative_error(y, reference(x, matrices, offsets, bias)) <= 5e-4


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_experts_whose_scales_differ_in_width(zero: str, first: int) -> None:
    """float32 beside 16-bit ones; integer zero points are bytes in any case."""
    ttype, generator = "int4" if zero == "none" else "uint4", torch.Generator().manual_seed(2)
    matrices = [
        ladder.quantize(
            torch.randn(N, K, generator=generator), ttype, group_size=24, zero=zero,
            scale_type="float32" if e == first else "bfloat16",
        )
        for e in range(E)
    ]  # fmt: skip
    op = ladder.GroupedMatmul(E, N, K, ttype, group_size=24, zero=zero, output="float32")
    x, offsets = torch.randn(7, K).half(), [0, 2, 4, 7]
    y = op(x, op.pack(matrices), torch.tensor(offsets, dtype=torch.int32))
    assert relative_error(y, reference(x, matrices, offsets)) <= 5e-4


def test_counted_slots() -> None:
    matrices = weights()
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24, output="float32", masked=True)
    x = torch.randn(E, 5, K).half()
    y = op(x, op.pack(matrices), torch.tensor([5, 0, 2], dtype=torch.int32))
    assert y.shape == (E, 5, N)
    for e, count in enumerate((5, 0, 2)):
        exact = x[e, :count].double() @ matrices[e].dequantize("float64").T
        if count:
            assert relative_error(y[e, :count], exact) <= 5e-4


@pytest.mark.parametrize("rows", [1, 3])
def test_slots_name_their_experts(rows: int) -> None:
    matrices = weights()
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24, output="float32", bias=True)
    x, bias, owners = torch.randn(5, rows, K).half(), torch.randn(E, N), [2, 0, E, 2, -1]
    y = op(x, op.pack(matrices), torch.tensor(owners, dtype=torch.int32), bias)
    assert y.shape == (5, rows, N)
    for slot, owner in enumerate(owners):
        if owner in range(E):
            exact = x[slot].double() @ matrices[owner].dequantize("float64").T + bias[owner].double()
            assert relative_error(y[slot], exact) <= 5e-4
    with pytest.raises(ShapeError, match=r"experts must have shape \[5\]"):
        op(x, op.pack(matrices), torch.tensor(owners[1:], dtype=torch.int32), bias)


def test_tokens_are_quantized_on_the_fly() -> None:
    matrices = weights()
    op = ladder.GroupedMatmul(E, N, K, "int4", "int8", group_size=24)
    x, offsets = torch.randn(6, K).bfloat16(), [0, 1, 4, 6]
    ranges = torch.tensor(offsets, dtype=torch.int32)
    packed = op.pack(matrices)
    codes, scale = operator.quantize_tokens(x, "int8")
    exact = reference(codes.double() * scale.double()[:, None], matrices, offsets)
    assert relative_error(op(x, packed, ranges), exact) <= 1e-5
    assert relative_error(op(codes, packed, ranges, token_scale=scale), exact) <= 1e-5


def test_no_tokens_at_all() -> None:
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24)
    y = op(torch.empty(0, K).half(), op.pack(weights()), torch.zeros(E + 1, dtype=torch.int32))
    assert y.shape == (0, N)


def test_registered_operator() -> None:
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24, output="float32")
    x, ranges = torch.randn(6, K).half(), torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    packed = op.pack(weights())
    arguments = (x, packed.tensors, ranges, None, None, 0, op.request.text)
    torch.library.opcheck(experts.grouped_matmul, arguments)
    compiled = torch.compile(lambda x: op(x, packed, ranges), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), op(x, packed, ranges))
    op(x.requires_grad_(), packed, ranges).sum().backward()
    sums = torch.stack([torch.as_tensor(each.dequantize("float32")).sum(0) for each in weights()])
    torch.testing.assert_close(x.grad.float(), sums[[0, 1, 1, 1, 2, 2]], rtol=2e-3, atol=2e-2)
    torch.library.opcheck(
        experts.grouped_gradients, (torch.randn(6, N), packed.tensors, ranges, op.request.text)
    )
    scales = torch.ones(6).requires_grad_()
    narrow = ladder.GroupedMatmul(E, N, K, "int4", "int8", group_size=24)
    y = narrow(torch.ones(6, K, dtype=torch.int8), narrow.pack(weights()), ranges, None, scales)
    with pytest.raises(LadderError, match="no gradient"):
        y.sum().backward()


def test_what_does_not_fit_is_named() -> None:
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=24)
    packed, x = op.pack(weights()), torch.randn(6, K).half()
    ranges = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    with pytest.raises(DTypeError, match=r"offsets must be torch\.int32"):
        op(x, packed, ranges.long())
    with pytest.raises(ValueRangeError, match="offsets must ascend, but expert 1 has rows 4 to 1"):
        op(x, packed, torch.tensor([0, 4, 1, 6], dtype=torch.int32))
    with pytest.raises(DTypeError, match="offsets must be a torch tensor, got list"):
        op(x, packed, [0, 1, 4, 6])
    with pytest.raises(ShapeError, match=r"offsets must have shape \[4\]"):
        op(x, packed, ranges[1:])
    with pytest.raises(ShapeError, match=r"x must be \[T, 72\]"):
        op(x[None, None], packed, ranges)
    with pytest.raises(ShapeError, match="without bias"):
        op(x, packed, ranges, torch.zeros(E, N))
    with pytest.raises(DTypeError, match=r"x must be torch\.float16"):
        op(x.float(), packed, ranges)
    with pytest.raises(ShapeError, match="3 experts, got 2 weights"):
        op.pack(weights()[1:])
    with pytest.raises(ShapeError, match="packed for"):
        ladder.GroupedMatmul(E, N, K, "int4")(x, packed, ranges)
    with pytest.raises(ShapeError, match="masked tokens need experts"):
        ladder.Gemm(8, 8, "int4", masked=True)


@pytest.mark.parametrize("activation", ["float32", "int8"])
def test_no_slots(activation: str) -> None:
    """A batch of none is one too; it was refused as if rows were counted by offsets."""
    op = ladder.GroupedMatmul(E, N, K, "int4", activation, group_size=24)
    named, packed = torch.zeros(0, dtype=torch.int32), op.pack(weights())
    assert op(torch.zeros(0, 3, K), packed, named).shape == (0, 3, N)
    if activation == "float32":
        x = torch.zeros(0, 3, K, requires_grad=True)
        op(x, packed, named).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("activation", ["float32", "int8"])
def test_zeros_without_memory(activation: str) -> None:
    """Derivatives that are zero are such tensors of torch: kernels refused their null pointers."""
    x, bias = torch._efficientzerotensor((5, K)), torch._efficientzerotensor((N,))
    one = ladder.Matmul(N, K, "int4", activation, group_size=24, bias=True)
    packed, given = one.pack(weights()[0]), torch.arange(N, dtype=torch.float32)
    assert torch.equal(one(x, packed, given), given.expand(5, N))
    assert not one(x, packed, bias).any()
    op = ladder.GroupedMatmul(E, N, K, "int4", activation, group_size=24)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert not op(x, op.pack(weights()), offsets).any()
