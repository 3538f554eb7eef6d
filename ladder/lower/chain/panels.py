"""Panel layout of float matrices for row kernels on CPUs: panels as wide as a register block."""

from __future__ import annotations

import torch

LANES = 16

ROWS = {4: 6, 3: 8, 2: 12, 1: 14}
"""Vectors of a panel -> rows of a block: 32 registers hold their products, and a row of the panel."""

SLOWER = {4: 1.0, 3: 1.0, 2: 1.1, 1: 1.3}
"""Vectors of a panel -> time of one vector's products: narrow panels load more per product."""


def panel_vectors(columns: int) -> int:
    """Return how many vectors wide the panels of a matrix are: so that least is computed beyond its end."""

    def cost(vectors: int) -> float:
        return -(-columns // (vectors * LANES)) * vectors * SLOWER[vectors]

    return min(ROWS, key=cost)


def panels(matrix: torch.Tensor) -> torch.Tensor:
    """Return a torch matrix ``[N, K]`` in panels: ``[ceil(N / width), K, width]``, zeros beyond N."""
    columns, depth = matrix.shape
    width = panel_vectors(columns) * LANES
    count = -(-columns // width)
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, count * width - columns))
    return padded.reshape(count, width, depth).transpose(1, 2).contiguous()
