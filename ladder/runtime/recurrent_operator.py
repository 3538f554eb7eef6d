"""``ladder::recurrent``: recurrent layers of torch as one operator of a graph.

Torch would take them apart into their steps: a graph for each length, with some operators for each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ladder.runtime.operator import library

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions of torch that compute recurrent layers."""


def recurrent(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    name: str,
    biases: bool,
    layers: int,
    both: bool,
    batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the states after each step and the last ones of layers in inference.

    x: ``[steps, batch, inputs]``, or packed ``[elements, inputs]`` with `batch_sizes`.
    states: h ``[layers * directions, batch, hidden]``, and c of an LSTM.
    weights: Of each layer and direction: of x, of h, their biases if there are, the projection if there is.
    name: One of `CELLS`.
    both: Whether there are two directions.
    """
    first = list(states) if name == "lstm" else states[0]
    packed = batch_sizes is not None
    given = (x, batch_sizes, first) if packed else (x, first)
    settings = (biases, layers, 0.0, False, both, *(() if packed else (False,)))
    return list(getattr(torch, name)(*given, list(weights), *settings))


def _results(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], name: str, biases: bool,
    layers: int, both: bool, batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Tell shapes, types and strides of the results."""
    wide = states[0].shape[2] * (2 if both else 1)
    return [x.new_empty((*x.shape[:-1], wide)), *(state.new_empty(state.shape) for state in states)]


library.define(
    "recurrent(Tensor x, Tensor[] states, Tensor[] weights, str name, bool biases, int layers, bool both,"
    " Tensor? batch_sizes=None) -> Tensor[]"
)
for place in ("CPU", "CUDA"):
    library.impl("recurrent", recurrent, place)
torch.library.register_fake("ladder::recurrent", _results, lib=library)
