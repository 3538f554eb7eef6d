"""Subgraphs of parameters alone, computed once by torch in the types of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ladder.ir.graph import Graph
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.sizes import CallSizes


def computed(graph: Graph, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only result of a graph of `ladder.ir.folding.PURE` operators, contiguous.

    graph: Its shapes are known.
    values: One per input, in order.
    """
    where = values[0].device
    result: Any = graph_run(graph, CallSizes(()), where)(*values)
    return result.to(where).contiguous()  # type: ignore[no-any-return]
