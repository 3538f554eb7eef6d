"""ONNX models evaluated in float64 by the standard's own reference: what they compute, but for rounding.

Every float16 and float32 tensor of a model becomes float64. What decides by rounding (codes of 8 bits, whose
scale is the range of what is rounded) is then decided by the exact numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.numpy_helper import from_array, to_array
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

DOUBLE = onnx.TensorProto.DOUBLE
NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)


def exactly(path: Path, given: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    """Return the results of a model in float64; None where the reference lacks an operator."""
    model = onnx.load(str(path))
    old = any(entry.version < 19 for entry in model.opset_import if not entry.domain)
    further = [DynamicQuantizeLinear, DynamicQuantizeLSTM, *([DequantizeLinear] if old else [])]
    _widen(model.graph)
    wide = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in given.items()}
    try:
        return [np.asarray(x) for x in ReferenceEvaluator(model, new_ops=further).run(None, wide)]
    except Exception:  # what it raises has no common class
        return None


def _widen(graph: Any) -> None:
    """Let the tensors of a graph, and of the graphs in it, be float64."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in NARROW:
            info.type.tensor_type.elem_type = DOUBLE
    held = [attribute for node in graph.node for attribute in node.attribute]
    for tensor in (*graph.initializer, *(a.t for a in held if a.HasField("t"))):
        if tensor.data_type in NARROW:
            tensor.CopyFrom(from_array(to_array(tensor).astype(np.float64), tensor.name))
    for attribute in held:
        if attribute.name in ("to", "dtype") and attribute.i in NARROW:
            attribute.i = DOUBLE
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            _widen(inner)


def rounded_by_range(x: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return codes of 8 bits, the scale and the zero point, as DynamicQuantizeLinear makes them."""
    low, high = min(0.0, x.min()), max(0.0, x.max())
    scale = (high - low) / 255 or 1.0
    zero = float(np.clip(np.rint(-low / scale), 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255), scale, zero


class DynamicQuantizeLinear(OpRun):  # type: ignore[misc]
    """Codes whose scale is of float64: the reference rounds it to float32."""

    def _run(self, x: Any) -> tuple[np.ndarray, ...]:
        codes, scale, zero = rounded_by_range(x)
        return codes.astype(np.uint8), np.array(scale), np.array(zero, np.uint8)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


class DynamicQuantizeLSTM(OpRun):  # type: ignore[misc]
    """An LSTM whose inputs and states are rounded by their range; weights are ``[ways, K, 4 hidden]``."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, c: Any = None,
        peepholes: Any = None, w_scale: Any = None, w_zero: Any = None, r_scale: Any = None,
        r_zero: Any = None, hidden_size: int = 0, direction: str = "forward", **others: Any,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        if lengths is not None or peepholes is not None:
            raise NotImplementedError("lengths and peepholes")
        count, batch = len(w), x.shape[1]
        bias = np.zeros((count, 8 * hidden_size)) if b is None else b
        first = [np.zeros((count, batch, hidden_size)) if state is None else state for state in (h, c)]
        codes, scale, zero = rounded_by_range(x)
        found = []
        for at in range(count):
            turned = direction == "reverse" or at == 1
            into = ((codes - zero) @ _centred(w, w_zero, at)) * (scale * w_scale.reshape(count, -1)[at])
            into = into + bias[at, : 4 * hidden_size] + bias[at, 4 * hidden_size :]
            states = first[0][at], first[1][at]
            matrix, own = _centred(r, r_zero, at), r_scale.reshape(count, -1)[at]
            steps = _lstm(into[::-1] if turned else into, matrix, own, states)
            found.append((steps[0][::-1] if turned else steps[0], *steps[1:]))
        y, h, c = zip(*found, strict=True)
        return np.stack(y, 1), np.stack(h), np.stack(c)


def _centred(codes: np.ndarray, zero: np.ndarray, at: int) -> np.ndarray:
    centred: np.ndarray = codes[at].astype(np.float64) - zero.reshape(len(codes), -1)[at].astype(np.float64)
    return centred


def _lstm(
    into: np.ndarray, r: np.ndarray, scale: np.ndarray, states: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run one direction; returns all states, and the last two."""
    (h, c), all_ = states, []
    for row in into:
        codes, own, zero = rounded_by_range(h)
        i, o, f, new = np.split(row + ((codes - zero) @ r) * (own * scale), 4, -1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(new)
        h = _sigmoid(o) * np.tanh(c)
        all_.append(h)
    return np.stack(all_), h, c


class DequantizeLinear(OpRun):  # type: ignore[misc]
    """The version of before 19, which the reference lacks: one scale, or one for each element of an axis."""

    def _run(
        self, x: Any, scale: Any, zero: Any = None, axis: int | None = None, **others: Any
    ) -> tuple[np.ndarray]:
        shape = [1] * x.ndim
        if scale.size > 1:
            shape[1 if axis is None else axis] = -1
        first = 0 if zero is None else zero.astype(np.int64).reshape(shape)
        return ((x.astype(np.int64) - first) * scale.reshape(shape),)
