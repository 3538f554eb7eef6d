"""Recurrent layers of torch as operators of a graph, see `ladder.runtime.recurrent_operator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ladder.runtime.recurrent_operator import CELLS


def recurrent(target: Any) -> Callable[..., Any] | None:
    """Return what stands for a function of torch in a graph; None if it is no recurrent layer."""
    return FUNCTIONS.get(target)


def _whole(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a function of recurrent layers; training with dropout is left to torch."""

    def run(x: Any, *given: Any, **options: Any) -> Any:
        packed = isinstance(given[0 if name == "lstm" else 1], torch.Tensor)
        sizes, (first, weights, biases, layers, dropout, train, both, *batch_first) = (
            (given[0], given[1:]) if packed else (None, given)
        )
        if options or (train and dropout):
            return function(x, *given, **options)
        states = list(first) if name == "lstm" else [first]
        steps_first = x.transpose(0, 1) if batch_first == [True] else x
        y, *ends = _layers(steps_first, states, list(weights), (name, biases, layers, both), sizes)
        return (y.transpose(0, 1) if batch_first == [True] else y, *ends)

    return run


def _layers(x: Any, states: list[Any], weights: list[Any], form: tuple[Any, ...], sizes: Any) -> list[Any]:
    """Return the results of layers: of one operator each on CPUs, where kernels of ours compute one layer.

    Layers on GPUs stay together for their library, as do those of packed sequences and with projections.
    """
    name, biases, layers, both = form
    each = len(weights) // layers
    apart = x.device.type == "cpu" and sizes is None and each == (1 + both) * (4 if biases else 2)
    if layers == 1 or not apart:
        return torch.ops.ladder.recurrent(x, states, weights, name, biases, layers, both, sizes)
    ends = []
    for at in range(layers):
        mine = [state[at * (1 + both) : (at + 1) * (1 + both)] for state in states]
        layer = weights[at * each : (at + 1) * each]
        x, *end = torch.ops.ladder.recurrent(x, mine, layer, name, biases, 1, both, None)
        ends.append(end)
    return [x, *(torch.cat(several) for several in zip(*ends, strict=True))]


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    getattr(torch, name): _whole(name, getattr(torch, name)) for name in CELLS
}
"""Function of torch -> what stands for it in a graph."""
