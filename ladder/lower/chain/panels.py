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
