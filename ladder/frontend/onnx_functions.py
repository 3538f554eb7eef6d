"""ONNX operators as tile graph rows: functions of one element made of others, attention, reordering."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from ladder.frontend.aten_models import MODEL_ROWS
from ladder.frontend.aten_rows import ROWS as ATEN
from ladder.frontend.onnx_call import Call, Row
from ladder.ir.extents import product
from tile_types.tile import Extent

KNOWN_OF_ATTENTION = frozenset(("is_causal", "scale", "q_num_heads", "kv_num_heads", "softmax_precision"))
"""Attributes of attention that kernels have, or that change nothing."""


def by_aten(call: Call, name: str, *operands: Any, **given: Any) -> Any:
    """Apply a row of ATen's table in the type of the node's first operand."""
    return ATEN[name](call.im, call.out, *operands, **given)


def _real(row: Row) -> Row:
    """Return a row for floating-point operands alone."""
    return lambda call: row(call) if "float" in call.out else None


def hard_sigmoid(call: Call, x: Any, alpha: float = 0.2, beta: float = 0.5) -> Any:
    """Return ``alpha * x + beta`` between 0 and 1."""
    moved = by_aten(call, "add.Tensor", by_aten(call, "mul.Tensor", x, alpha), beta)
    return by_aten(call, "clamp.default", moved, 0.0, 1.0)


def hard_swish(call: Call, x: Any) -> Any:
    """Return x times ``x / 6 + 0.5`` between 0 and 1."""
    moved = by_aten(call, "add.Tensor", by_aten(call, "div.Tensor", x, 6.0), 0.5)
    return by_aten(call, "mul.Tensor", x, by_aten(call, "clamp.default", moved, 0.0, 1.0))


def _hard_sigmoid(call: Call) -> Any:
    given = {name: float(call.given[name]) for name in ("alpha", "beta") if name in call.given}
    return hard_sigmoid(call, call.tensor(0), **given)


def _sloped(call: Call, slope: Any) -> Any:
    x = call.tensor(0)
    positive = ATEN["ge.Tensor"](call.im, "bool", x, 0.0)
    return by_aten(call, "where.self", positive, x, by_aten(call, "mul.Tensor", x, slope))


def _leaky(call: Call) -> Any:
    return _sloped(call, float(call.given.get("alpha", 0.01)))


def _prelu(call: Call) -> Any:
    return _sloped(call, call.operands()[1])


def _thresholded(call: Call) -> Any:
    x = call.tensor(0)
    above = ATEN["gt.Tensor"](call.im, "bool", x, float(call.given.get("alpha", 1.0)))
    return by_aten(call, "where.self", above, x, 0.0)


def _softsign(call: Call) -> Any:
    size = by_aten(call, "add.Tensor", by_aten(call, "abs.default", call.tensor(0)), 1.0)
    return by_aten(call, "div.Tensor", call.tensor(0), size)


def swish(alpha: float) -> Row:
    """Return the row of x times the sigmoid of a multiple of x: ``alpha`` unless the node has its own."""

    def row(call: Call) -> Any:
        scaled = by_aten(call, "mul.Tensor", call.tensor(0), float(call.given.get("alpha", alpha)))
        return by_aten(call, "mul.Tensor", call.tensor(0), by_aten(call, "sigmoid.default", scaled))

    return row


def _summed(call: Call) -> Any:
    return reduce(lambda a, b: by_aten(call, "add.Tensor", a, b), call.operands()[1:], call.tensor(0))


def _averaged(call: Call) -> Any:
    return by_aten(call, "div.Tensor", _summed(call), float(len(call.inputs)))


def _reordered(call: Call, split: list[Extent], order: list[int], shape: list[Extent]) -> Any:
    im = call.im
    return im.reshape(im.permute(im.reshape(call.tensor(0), split), order), shape)


def _depth_to_space(call: Call) -> Any:
    n, c, h, w = call.shape(0)
    b = int(call.given["blocksize"])
    if not isinstance(c, int):
        return None
    rest, shape = c // b**2, [n, c // b**2, product([h, b]), product([w, b])]
    if call.given.get("mode", b"DCR") == b"DCR":
        return _reordered(call, [n, b, b, rest, h, w], [0, 3, 4, 1, 5, 2], shape)
    return _reordered(call, [n, rest, b, b, h, w], [0, 1, 4, 2, 5, 3], shape)


# attention -------------------------------------------------------------------------------------------


def _attention(call: Call) -> Any:
    """Attend without a mask, a cache or a cap: the softmax is rounded once, at the end."""
    if any(call.has(at) for at in range(3, 7)) or not set(call.given) <= KNOWN_OF_ATTENTION:
        return None
    if any(call.node.output[1:]):
        return None
    heads = [int(call.given.get(name, 1)) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    rank = len(call.shape(0))
    q, k, v = (_in_heads(call, at, count) if rank == 3 else call.tensor(at) for at, count in enumerate(heads))
    causal, scale = bool(call.given.get("is_causal", 0)), call.given.get("scale")
    found = MODEL_ROWS["attention.default"](call.im, call.out, q, k, v, None, causal, scale)
    if rank == 4:
        return found
    b, h, s, e = call.im.shape(found)
    return call.im.reshape(call.im.permute(found, (0, 2, 1, 3)), [b, s, product([h, e])])


def _in_heads(call: Call, at: int, heads: int) -> str:
    b, s, width = call.shape(at)
    if not isinstance(width, int):
        raise call.refuse("the width of heads must be known")
    parts = call.im.reshape(call.tensor(at), [b, s, heads, width // heads])
    return call.im.permute(parts, (0, 2, 1, 3))


FUNCTIONS: Mapping[str, Row] = {
    **{
        name: _real(row)
        for name, row in {
            "HardSigmoid": _hard_sigmoid, "HardSwish": lambda call: hard_swish(call, call.tensor(0)),
            "LeakyRelu": _leaky, "PRelu": _prelu,
            "ThresholdedRelu": _thresholded, "Softsign": _softsign, "Swish": swish(1.0),
            "Sum": _summed, "Mean": _averaged, "Attention": _attention,
            "Round": lambda call: by_aten(call, "round.default", call.tensor(0)),
            "Ceil": lambda call: by_aten(call, "ceil.default", call.tensor(0)),
        }.items()
    },
    "DepthToSpace": _depth_to_space,
}  # fmt: skip
"""Operators that are made of others, and attention."""
