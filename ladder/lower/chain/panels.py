"""Panel layout of float matrices for row kernels on CPUs: panels as wide as a register block."""

from __future__ import annotations

import torch

from schedules.row_panels import Registers


def panels(matrix: torch.Tensor, registers: Registers) -> torch.Tensor:
    """Return a torch matrix ``[N, K]`` in panels: ``[ceil(N / width), K, width]``, zeros beyond N."""
    columns, depth = matrix.shape
    width = registers.panel_vectors(columns) * registers.lanes
    count = -(-columns // width)
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, count * width - columns))
    return padded.reshape(count, width, depth).transpose(1, 2).contiguous()


TURN = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
"""``G`` of Winograd's products."""


def with_winograd(matrix: torch.Tensor) -> torch.Tensor:
    """Return kernels ``[N, 9 C]``, points first, with those of Winograd's products: ``[N, 25 C]``."""
    turn = torch.tensor(TURN, dtype=torch.float64)
    points = matrix.double().reshape(len(matrix), 3, 3, -1)
    turned = torch.einsum("ir,js,nrsc->nijc", turn, turn, points)
    return torch.cat([matrix, turned.reshape(len(matrix), -1).to(matrix.dtype)], 1)
