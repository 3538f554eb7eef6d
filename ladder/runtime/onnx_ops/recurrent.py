"""Recurrent layers: RNN, GRU and LSTM, forward, backward and both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import unknown_name

Function = Callable[[Any], Any]

ACTIVATIONS: Mapping[str, Callable[[float | None, float | None], Function]] = {
    "relu": lambda a, b: torch.relu,
    "tanh": lambda a, b: torch.tanh,
    "sigmoid": lambda a, b: torch.sigmoid,
    "affine": lambda a, b: lambda x: (1.0 if a is None else a) * x + (b or 0.0),
    "leakyrelu": lambda a, b: lambda x: F.leaky_relu(x, 0.01 if a is None else a),
    "thresholdedrelu": lambda a, b: lambda x: torch.where(x > (1.0 if a is None else a), x, 0 * x),
    "scaledtanh": lambda a, b: (
        lambda x: (1.0 if a is None else a) * torch.tanh((1.0 if b is None else b) * x)
    ),
    "hardsigmoid": lambda a, b: (
        lambda x: ((0.2 if a is None else a) * x + (0.5 if b is None else b)).clamp(0, 1)
    ),
    "elu": lambda a, b: lambda x: F.elu(x, 1.0 if a is None else a),
    "softsign": lambda a, b: F.softsign,
    "softplus": lambda a, b: F.softplus,
}
"""ONNX's functions of gates, by their names in lower case."""

TAKES = {"affine": 2, "scaledtanh": 2, "hardsigmoid": 2, "leakyrelu": 1, "thresholdedrelu": 1, "elu": 1}
"""How many of the numbers in ``activation_alpha`` and ``activation_beta`` a function takes."""


def _functions(op: Operation, default: Sequence[str], directions: int) -> list[list[Function]]:
    """Return the functions of the gates of each direction."""
    names = [name.lower() for name in op.get("activations") or list(default) * directions]
    alphas, betas = iter(op.get("activation_alpha") or ()), iter(op.get("activation_beta") or ())
    found = []
    for name in names:
        if name not in ACTIVATIONS:
            raise unknown_name("function of a recurrent layer", name, ACTIVATIONS)
        count = TAKES.get(name, 0)
        found.append(ACTIVATIONS[name](_next(alphas, count > 0), _next(betas, count > 1)))
    each = len(default)
    return [found[at * each : (at + 1) * each] for at in range(directions)]


def _next(numbers: Iterator[float], wanted: bool) -> float | None:
    return next(numbers, None) if wanted else None


Cell = Callable[..., tuple[Any, ...]]
"""``(op, functions, gates of x, state, recurrent weight, recurrent bias, peepholes) -> state``."""


def _clipped(op: Operation, x: Any) -> Any:
    clip = op.get("clip")
    return x if clip is None else x.clamp(-clip, clip)


def dense(op: Operation, x: Any, w: Any, b: Any) -> Any:
    """Multiply rows by a weight; quantised layers have a product of their own."""
    product = op.get("product")
    return F.linear(x, w, b) if product is None else product(x, w) + b


def _rnn_cell(
    op: Operation, f: list[Function], x: Any, state: Any, r: Any, b: Any, p: Any
) -> tuple[Any, ...]:
    return (f[0](_clipped(op, x + dense(op, state[0], r, b))),)


def _gru_cell(
    op: Operation, f: list[Function], x: Any, state: Any, r: Any, b: Any, p: Any
) -> tuple[Any, ...]:
    """Gates are in the order z, r, h."""
    h, size = state[0], state[0].shape[-1]
    gates = x[:, : 2 * size] + dense(op, h, r[: 2 * size], b[: 2 * size])
    z, reset = (f[0](gate) for gate in _clipped(op, gates).chunk(2, 1))
    if op.get("linear_before_reset", 0):
        inner = reset * dense(op, h, r[2 * size :], b[2 * size :])
    else:
        inner = dense(op, reset * h, r[2 * size :], b[2 * size :])
    new = f[1](_clipped(op, x[:, 2 * size :] + inner))
    return ((1 - z) * new + z * h,)


def _lstm_cell(
    op: Operation, f: list[Function], x: Any, state: Any, r: Any, b: Any, p: Any
) -> tuple[Any, ...]:
    """Gates are in the order i, o, f, c."""
    h, c = state
    i, o, forget, new = (x + dense(op, h, r, b)).chunk(4, 1)
    if p is not None:
        i, forget = i + p[0] * c, forget + p[2] * c
    i = f[0](_clipped(op, i))
    keep = 1 - i if op.get("input_forget", 0) else f[0](_clipped(op, forget))
    c = keep * c + i * f[1](_clipped(op, new))
    if p is not None:
        o = o + p[1] * c
    return f[0](_clipped(op, o)) * f[2](c), c


def _recurrent(cell: Cell, gates: int, states: int, default: Sequence[str]) -> Run:
    """Return the row of a layer of cells."""

    def run(op: Operation, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, *rest: Any) -> Any:
        x = x.transpose(0, 1) if op.get("layout", 0) else x
        batch = x.shape[1]
        directions, size = len(w), op.get("hidden_size") or r.shape[2]
        b = x.new_zeros(directions, 2 * gates * size) if b is None else b
        first = [_initial(op, value, directions, batch, size, x) for value in _states(rest, states)]
        peepholes = rest[states] if len(rest) > states else None
        if lengths is None and peepholes is None and x.numel() and _is_of_torch(op, gates, x):
            return _by_torch(op, x, w, r, b, first)
        functions = _functions(op, default, directions)
        all_, last = [], []
        for at in range(directions):
            backward = at == 1 or op.get("direction", "forward") == "reverse"
            inner = dense(op, x, w[at], b[at, : gates * size])
            found, state = _walk(
                *(
                    cell,
                    op,
                    functions[at],
                    inner,
                    [value[at] for value in first],
                    r[at],
                    b[at, gates * size :],
                ),
                None if peepholes is None else peepholes[at].chunk(3),
                lengths,
                backward,
            )
            all_.append(found)
            last.append(state)
        return _arranged(op, all_, last, states)

    return run


ORDERS = {4: (0, 2, 3, 1), 3: (1, 0, 2)}
"""Number of gates -> in which order torch has them: input, forget, cell, output; reset, update, new."""


def _is_of_torch(op: Operation, gates: int, x: Any) -> bool:
    """Tell whether torch has such a layer on CPUs: the usual functions, forward or both ways."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    unusual = ("clip", "input_forget", "activations", "activation_alpha", "activation_beta", "product")
    forward = op.get("direction", "forward") in ("forward", "bidirectional")
    reset = gates == 4 or bool(op.get("linear_before_reset", 0))
    return gates in ORDERS and forward and reset and not any(op.get(name) for name in unusual)


def _by_torch(op: Operation, x: Any, w: Any, r: Any, b: Any, first: list[Any]) -> tuple[Any, ...]:
    """Compute an LSTM or a GRU by torch's layer."""
    order = ORDERS[4 if len(first) == 2 else 3]
    parts = (w, r, *b.chunk(2, 1))
    weights = [_ordered(part[at], order) for at in range(len(w)) for part in parts]
    function: Any = torch.lstm if len(first) == 2 else torch.gru
    given = first if len(first) == 2 else first[0]
    y, *ends = function(x, given, weights, True, 1, 0.0, False, len(w) == 2, False)
    y = y.reshape(*y.shape[:2], len(w), r.shape[2])
    if op.get("layout", 0):
        return y.transpose(0, 1), *(end.transpose(0, 1) for end in ends)
    return y.transpose(1, 2), *ends


def _ordered(part: Any, order: Sequence[int]) -> Any:
    """Return rows of gates in another order."""
    gates = part.chunk(len(order))
    return torch.cat([gates[at] for at in order])


def _states(rest: Sequence[Any], states: int) -> list[Any]:
    return [rest[at] if at < len(rest) else None for at in range(states)]


def _initial(op: Operation, value: Any, directions: int, batch: int, size: int, x: Any) -> Any:
    if value is None:
        return x.new_zeros(directions, batch, size)
    return value.transpose(0, 1) if op.get("layout", 0) else value


def _walk(
    cell: Cell, op: Operation, f: list[Function], x: Any, state: list[Any], r: Any, b: Any, p: Any,
    lengths: Any, backward: bool,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Return the state after each step, and the last one; sequences end at their lengths.

    The last state of a sequence of no elements is 0, as in onnxruntime; the standard does not say it.
    What quantised layers round together are the states of sequences that go on, or ended one step before.
    """
    steps = x.shape[0]
    found: list[Any] = []
    now: tuple[Any, ...] = tuple(state)
    x = _turned(x, lengths) if backward else x
    for at in range(steps):
        shown = now
        if lengths is not None and op.get("product") is not None:
            shown = (torch.where((at <= lengths).reshape(-1, 1), now[0], torch.zeros_like(now[0])), *now[1:])
        new = cell(op, f, x[at], shown, r, b, p)
        if lengths is None:
            now = new
            found.append(new[0])
            continue
        inside = (at < lengths).reshape(-1, 1)
        now = tuple(torch.where(inside, after, before) for after, before in zip(new, now, strict=True))
        found.append(torch.where(inside, new[0], torch.zeros_like(new[0])))
    if lengths is not None:
        now = tuple(torch.where((lengths > 0).reshape(-1, 1), part, torch.zeros_like(part)) for part in now)
    if not found:
        return x.new_zeros(0, *state[0].shape), now
    return _turned(torch.stack(found), lengths) if backward else torch.stack(found), now


def _turned(x: Any, lengths: Any) -> Any:
    """Return the steps of each sequence in the opposite order; what lies behind its end stays there."""
    if lengths is None:
        return x.flip(0)
    steps, ends = torch.arange(x.shape[0], device=x.device).unsqueeze(1), lengths.clamp(max=x.shape[0])
    places = torch.where(steps < ends, ends - 1 - steps, steps).unsqueeze(2)
    return x.gather(0, places.expand(x.shape))


def _arranged(op: Operation, all_: list[Any], last: list[tuple[Any, ...]], states: int) -> tuple[Any, ...]:
    """Return ``Y[steps, directions, batch, size]`` and the last states, or with the batch first."""
    y = torch.stack(all_, 1)
    ends = [torch.stack([state[at] for state in last]) for at in range(states)]
    if op.get("layout", 0):
        return y.permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in ends)
    return y, *ends


RECURRENT: Mapping[str, Run] = {
    "RNN": _recurrent(_rnn_cell, 1, 1, ("Tanh",)),
    "GRU": _recurrent(_gru_cell, 3, 1, ("Sigmoid", "Tanh")),
    "LSTM": _recurrent(_lstm_cell, 4, 2, ("Sigmoid", "Tanh", "Tanh")),
}
"""Recurrent layers."""
