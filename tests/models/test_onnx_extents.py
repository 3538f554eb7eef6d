"""ONNX results whose extents the standard's rules do not follow, or say otherwise than its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from onnx import parser

import ladder
from tile_types.errors import LadderError

Wanted = Callable[..., torch.Tensor]


def compiled(text: str) -> Callable[..., torch.Tensor]:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]> {text}')
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return ladder.compile(model)


VOLUME = torch.randn(2, 3, 5, 6, 4, generator=torch.Generator().manual_seed(1))

POOLS: dict[str, tuple[str, torch.Tensor, Wanted]] = {
    "a volume": ("AveragePool <kernel_shape = [3, 2, 2]>", VOLUME, lambda x: F.avg_pool3d(x, (3, 2, 2), 1)),
    "a volume within borders": (
        "AveragePool <kernel_shape = [3, 3, 3], pads = [1, 1, 1, 1, 1, 1]>",
        VOLUME,
        lambda x: F.avg_pool3d(x, 3, 1, 1, count_include_pad=False),
    ),
    "the largest": ("MaxPool <kernel_shape = [3, 2, 2]>", VOLUME, lambda x: F.max_pool3d(x, (3, 2, 2), 1)),
    "a line": ("AveragePool <kernel_shape = [3]>", VOLUME[0, 0], lambda x: F.avg_pool1d(x, 3, 1)),
    "four axes": (
        "AveragePool <kernel_shape = [1, 2, 1, 1]>",
        VOLUME[None],
        lambda x: (x[:, :, :, :-1] + x[:, :, :, 1:]) / 2,
    ),
    "none": ("AveragePool <kernel_shape = [3, 2, 2]>", VOLUME[:0], lambda x: x.new_zeros(0, 3, 3, 5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", POOLS)
def test_windows_of_any_number_of_axes(case: str) -> None:
    node, x, wanted = POOLS[case]
    for shape in (list(x.shape), ["n", *x.shape[1:]]):
        fast = compiled(f"g (float[{','.join(map(str, shape))}] x) => (float y) {{ y = {node} (x) }}")
        torch.testing.assert_close(fast(x), wanted(x))


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("bik,bkj->bij", (1, 3, 2), (2, 1, 4)),
        ("bik,bkj->bij", (2, 3, 2), (1, 2, 4)),
        ("bik, bkj -> jb", (2, 3, 2), (1, 1, 4)),
        ("i,i->i", (1,), (0,)),
        ("...k,k->...", (2, 3, 1), (4,)),
        ("ab,bc", (2, 3), (3, 4)),
    ],
)
def test_axes_of_one_element_are_as_long_as_others_of_their_letter(
    equation: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(a, generator=draw), torch.randn(b, generator=draw)
    shapes = [",".join(map(str, shape)) for shape in (a, b)]
    body = f'z = Einsum <equation = "{equation}"> (x, y)'
    fast = compiled(f"g (float[{shapes[0]}] x, float[{shapes[1]}] y) => (float z) {{ {body} }}")
    torch.testing.assert_close(fast(x, y), torch.einsum(equation.replace(" ", ""), x, y))


@pytest.mark.parametrize("parts", [2, 3])
def test_keys_and_values_of_attention_may_be_packed(parts: int) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 5, 2, 4, generator=draw) for _ in range(3))
    wanted = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
    given = (torch.stack([q, k, v], 3),) if parts == 3 else (q.flatten(2), torch.stack([k, v], 3))
    inputs = (
        ["float[n, rows, 2, 3, 4] q"] if parts == 3 else ["float[n, rows, 8] q", "float[n, rows, 2, 2, 4] k"]
    )
    names = ", ".join("qk"[: len(inputs)])
    body = f"y = com.microsoft.MultiHeadAttention <num_heads = 2> ({names}) z = Relu (y)"
    fast = compiled(f"g ({', '.join(inputs)}) => (float[n, rows, 8] z) {{ {body} }}")
    torch.testing.assert_close(fast(*given), wanted.transpose(1, 2).flatten(2).relu())


def test_an_attribute_that_is_missing_is_named() -> None:
    body = "y, k, v = com.microsoft.GroupQueryAttention <kv_num_heads = 1> (q, q, q, , , n, t)"
    with pytest.raises(LadderError, match=r"GroupQueryAttention.*needs the attribute 'num_heads'"):
        compiled(f"g (float[1, 3, 8] q, int32[1] n, int32 t) => (float y, float k, float v) {{ {body} }}")


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    ("node", "axis"),
    [
        ("CumSum <exclusive = 1> (x, a)", 0),
        ("CumSum <exclusive = 1, reverse = 1> (x, a)", -1),
        ("Hardmax <axis = 0> (x)", 0),
        ("Hardmax <axis = 1> (x)", 0),
        ("Hardmax <axis = 2> (x)", 2),
        ("LogSoftmax <axis = 1> (x)", 0),
    ],
)
def test_what_runs_along_an_axis_takes_an_empty_one(node: str, axis: int, opset: int) -> None:
    extents = [2, 3, 4]
    extents[axis] = 0
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[A, B, C] x) => (float[A, B, C] y)'
        f" <int64 a = {{{axis}}}> {{ y = {node} }}"
    )
    assert ladder.compile(model)(torch.empty(extents)).shape == torch.Size(extents)
