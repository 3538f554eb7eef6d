"""What is computed of parameters alone, by torch: once, in the types that the graph states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ladder.ir.graph import Graph
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.sizes import Now


def computed(graph: Graph, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only result of a graph of `ladder.ir.folding.PURE` operators, contiguous.

    Parameters
    ----------
    graph
        Its shapes are known.
    values
        One per input, in order.
    """
    where = values[0].device
    result: Any = graph_run(graph, Now(()), where)(*values)
    return result.to(where).contiguous()  # type: ignore[no-any-return]
