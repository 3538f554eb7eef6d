"""Outputs that begin as NaN, so that an element that no kernel stores shows."""

from __future__ import annotations

import pytest
import torch


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators that are bound from now on allocate results full of NaN."""

    def allocator(where: torch.device):
        return lambda sizes, _strides, dtype: torch.full(sizes, float("nan"), dtype=dtype, device=where)

    monkeypatch.setattr("ladder.runtime.kernel.allocator", allocator)
