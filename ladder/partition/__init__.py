"""From the tile graph of a model to connected subgraphs, each with what executes it.

`partition` gives `Subgraph` values in an order in which they can run: quantized products with what follows
them (`products`), memory-bound chains (`chains`), library calls and views. A part's graph is a tile graph
of its own, so other compilers take it as it is; `found_graphs` puts graphs that the superoptimizer found in
place of parts. May import ``ladder.superopt``, ``ladder.rewrite`` and what lies below.
"""

from __future__ import annotations

from ladder.partition.partition import partition
from ladder.partition.subgraphs import Subgraph

__all__ = ["Subgraph", "partition"]
