"""Transforms of signals, random numbers, and products by subscripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import DTYPES, narrow, wide


def _complex(x: Any) -> Any:
    """Return numbers whose last axis holds real and imaginary parts, or real ones alone."""
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0].to(_complex_type(x))


def _complex_type(x: Any) -> Any:
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64


def _dft(op: Operation, x: Any, length: Any = None, axis: Any = None) -> Any:
    """Transform along an axis; its last axis holds parts of complex numbers."""
    place = int(axis.item()) if axis is not None else op.get("axis", 1 if op.version < 20 else -2)
    place = place % x.ndim
    count = None if length is None else int(length.item())
    if op.get("inverse", 0) and op.get("onesided", 0):
        return torch.fft.irfft(_complex(x), count, place).unsqueeze(-1)
    if op.get("onesided", 0) and x.shape[-1] == 1:
        return torch.view_as_real(torch.fft.rfft(x[..., 0], count, place))
    function = torch.fft.ifft if op.get("inverse", 0) else torch.fft.fft
    found = function(_complex(x), count, place)
    if op.get("onesided", 0):
        found = found.narrow(place, 0, found.shape[place] // 2 + 1)
    return torch.view_as_real(found)


def _stft(op: Operation, x: Any, step: Any, window: Any = None, length: Any = None) -> Any:
    """Transform frames of a signal."""
    count = int(length.item()) if length is not None else window.shape[0]
    if (x.ndim == 2 or x.shape[-1] == 1) and op.get("onesided", 1):
        parts = (x if x.ndim == 2 else x[..., 0]).unfold(1, count, int(step.item()))
        return torch.view_as_real(torch.fft.rfft(parts if window is None else parts * window))
    signal = x if x.ndim == 3 else x.unsqueeze(-1)
    frames = signal.unfold(1, count, int(step.item())).movedim(-1, 2)  # [batch, frames, count, parts]
    values = _complex(frames)
    if window is not None:
        values = values * window
    found = torch.fft.fft(values, dim=-1)  # of each frame
    if op.get("onesided", 1):
        found = found[..., : count // 2 + 1]
    return torch.view_as_real(found)


def _wider(run: Run) -> Run:
    """Return a transform that computes in float32 what torch does not transform in 16 bits."""

    def wide(op: Operation, x: Any, *others: Any) -> Any:
        if x.element_size() > 2:
            return run(op, x, *others)
        operands = [y.float() if y is not None and y.is_floating_point() else y for y in (x, *others)]
        return run(op, *operands).to(x.dtype)

    return wide


def _windowed(coefficients: tuple[float, ...]) -> Run:
    """Return the row of a window that is a sum of cosines."""

    def run(op: Operation, size: Any) -> Any:
        count = int(size.reshape(()))
        steps = torch.arange(count, dtype=torch.float64)
        turn = 2 * torch.pi * steps / (count if op.get("periodic", 1) else count - 1)
        found = sum(a * torch.cos(k * turn) for k, a in enumerate(coefficients))
        return torch.as_tensor(found).to(DTYPES[op.get("output_datatype", 1)])

    return run


def _mel(op: Operation, bins: Any, length: Any, rate: Any, low: Any, high: Any) -> Any:
    """Return triangles of the mel scale ``[length / 2 + 1, bins]``."""
    count = int(bins)
    edges = torch.arange(count + 2, dtype=torch.float64)
    first, last = (2595 * torch.log10(1 + torch.as_tensor(float(f)) / 700) for f in (low, high))
    hertz = 700 * (10 ** ((edges * (last - first) / (count + 2) + first) / 2595) - 1)
    places = torch.floor((int(length) + 1) * hertz / int(rate)).long()
    found = torch.zeros(int(length) // 2 + 1, count, dtype=torch.float32)
    for at in range(count):
        begin, middle, end = (int(place) for place in places[at : at + 3])
        if begin == middle:
            found[middle, at] = 1
        for row in range(begin, middle + 1 if begin < middle else begin):
            found[row, at] = (row - begin) / (middle - begin)
        for row in range(middle, end):
            found[row, at] = (end - row) / (end - middle)
    return found.to(DTYPES[op.get("output_datatype", 1)])


def _einsum(op: Operation, *values: Any) -> Any:
    found = torch.einsum(op.get("equation").replace(" ", ""), *map(wide, values))
    return narrow(found, values[0].dtype)


def _gemm(op: Operation, a: Any, b: Any, c: Any = None) -> Any:
    a, b = (wide(v).mT if op.get(name, 0) else wide(v) for v, name in ((a, "transA"), (b, "transB")))
    found = _scaled(torch.matmul(a, b), op.get("alpha", 1.0))
    if c is not None:
        found = found + _scaled(wide(c), op.get("beta", 1.0))
    return found


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1 else (x * factor).to(x.dtype)


# random numbers --------------------------------------------------------------------------------------


def _random(function: Callable[[Operation, np.random.RandomState, list[int]], Any]) -> Run:
    """Return the row of an operator that draws numbers, of a stated shape or of that of its operand."""

    def run(op: Operation, x: Any = None) -> Any:
        shape = list(x.shape) if x is not None else list(op.get("shape"))
        code = op.get("dtype")
        dtype = DTYPES[code] if code else x.dtype if x is not None else torch.float32
        found = torch.as_tensor(np.asarray(function(op, generator(op), shape))).to(dtype)
        return found if x is None else found.to(x.device)

    return run


def generator(op: Operation) -> np.random.RandomState:
    """Return the generator of a node: that of the standard's reference, which a seed decides if one is given.

    Without a seed it is drawn from torch's generator, so that ``torch.manual_seed`` decides.
    """
    seed = op.get("seed")
    if seed is None or seed != seed:
        return np.random.RandomState(int(torch.randint(1 << 31, ())))
    return np.random.RandomState(int(seed))


def _uniform(op: Operation, draw: np.random.RandomState, shape: list[int]) -> Any:
    low, high = op.get("low", 0.0), op.get("high", 1.0)
    return draw.rand(*shape) * (high - low) + low


def _normal(op: Operation, draw: np.random.RandomState, shape: list[int]) -> Any:
    return draw.randn(*shape) * op.get("scale", 1.0) + op.get("mean", 0.0)


def _bernoulli(op: Operation, x: Any) -> Any:
    """Draw ones with given chances; those above 1 are 1, and those below 0 or no numbers 0."""
    code = op.get("dtype")
    chances = torch.nan_to_num(x.double()).clamp(0, 1).cpu().numpy()
    found = torch.from_numpy(np.asarray(generator(op).binomial(1, p=chances)))
    return found.to(x.device, DTYPES[code] if code else x.dtype)


def _multinomial(op: Operation, x: Any) -> Any:
    chances, draw = torch.softmax(x.double(), -1).cpu().numpy(), generator(op)
    rows = [draw.choice(x.shape[1], op.get("sample_size", 1), p=row) for row in chances]
    return torch.from_numpy(np.stack(rows)).to(x.device, DTYPES[op.get("dtype", 6)])


def _dropout(op: Operation, x: Any, ratio: Any = None, training: Any = None) -> Any:
    """Drop elements in training only, as new versions ask for by an operand; masks were numbers before 10."""
    share = float(ratio) if ratio is not None else op.get("ratio", 0.5)
    if training is None or not bool(training) or share == 0:
        return x, torch.ones_like(x, dtype=x.dtype if op.version < 10 else torch.bool)
    kept = torch.from_numpy(generator(op).uniform(0, 1, tuple(x.shape)) >= share).to(x.device)
    return x * kept / (1 - share), kept


SIGNALS: Mapping[str, Run] = {
    "DFT": _wider(_dft),
    "STFT": _wider(_stft),
    "BlackmanWindow": _windowed((0.42, -0.5, 0.08)),
    "HannWindow": _windowed((0.5, -0.5)),
    "HammingWindow": _windowed((25 / 46, -21 / 46)),
    "MelWeightMatrix": _mel,
    "Einsum": _einsum,
    "MatMul": lambda op, a, b: narrow(torch.matmul(wide(a), wide(b)), a.dtype),
    "Gemm": _gemm,
    "Det": lambda op, x: torch.linalg.det(x.float() if x.element_size() == 2 else x).to(x.dtype),
    "RandomUniform": _random(_uniform),
    "RandomUniformLike": _random(_uniform),
    "RandomNormal": _random(_normal),
    "RandomNormalLike": _random(_normal),
    "Dropout": _dropout,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
"""Transforms, products by subscripts, random numbers."""

DRAWS = frozenset(
    {"RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial"}
)
"""Operators that draw random numbers."""
