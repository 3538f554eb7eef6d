"""``ladder::recurrent``: recurrent layers of torch as one operator of a graph.

Tracing would take them apart into their steps: a graph for each length, with some operators for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ladder.runtime.registered import define

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions of torch that compute recurrent layers."""

ARGUMENTS = (
    "(Tensor x, Tensor[] states, Tensor[] weights, str name, bool biases, int layers, float dropout,"
    " bool train, bool both, Tensor? batch_sizes=None) -> Tensor[]"
)


def recurrent(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], name: str, biases: bool,
    layers: int, dropout: float, train: bool, both: bool, batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the states after each step and the last ones.

    x: ``[steps, batch, inputs]``, or packed ``[elements, inputs]`` with `batch_sizes`.
    states: h ``[layers * directions, batch, hidden]``, and c of an LSTM.
    weights: Of each layer and direction: of x, of h, their biases if there are, the projection if there is.
    name: One of `CELLS`.
    both: Whether there are two directions.

    Raises RuntimeError while a CUDA graph is recorded if elements are dropped: cuDNN would break it off.
    """
    if x.is_cuda and train and dropout and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a recurrent layer drops elements, which no CUDA graph takes")
    first = list(states) if name == "lstm" else states[0]
    settings = (list(weights), biases, layers, dropout, train, both)
    if batch_sizes is None:
        return list(getattr(torch, name)(x, first, *settings, False))
    return list(getattr(torch, name)(x, batch_sizes, first, *settings))


def _results(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Any, name: str, biases: bool, layers: int,
    dropout: float, train: bool, both: bool, batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Tell shapes, types and strides of the results."""
    wide = states[0].shape[2] * (2 if both else 1)
    return [x.new_empty((*x.shape[:-1], wide)), *(state.new_empty(state.shape) for state in states)]


define(f"recurrent{ARGUMENTS}", recurrent, _results, tags=())
define(f"recurrent_dropout{ARGUMENTS}", recurrent, _results, tags=(torch.Tag.nondeterministic_seeded,))


def _whole(name: str) -> Callable[..., Any]:
    """Return what stands for a function of recurrent layers."""

    def run(x: Any, *given: Any, **options: Any) -> Any:
        if options:
            return getattr(torch, name)(x, *given, **options)
        packed = isinstance(given[0 if name == "lstm" else 1], torch.Tensor)
        sizes, (first, weights, biases, layers, dropout, train, both, *batch_first) = (
            (given[0], given[1:]) if packed else (None, given)
        )
        states, turned = list(first) if name == "lstm" else [first], batch_first == [True]
        operators = torch.ops.ladder
        call = operators.recurrent_dropout if train and dropout else operators.recurrent
        y, *ends = call(
            x.transpose(0, 1) if turned else x,
            *(states, list(weights), name, biases, layers, float(dropout), train, both, sizes),
        )
        return (y.transpose(0, 1) if turned else y, *ends)

    return run


WHOLE: Mapping[Any, Callable[..., Any]] = {getattr(torch, name): _whole(name) for name in CELLS}
"""Function of torch -> the same by one operator, for tracing and for fake tensors of open sizes."""
