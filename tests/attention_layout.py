"""Programs that write through views of attention's result: what they give depends on its strides."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import ladder

CASES = ("plain", "mask", "grouped", "half", "one key", "heads first")


def check_strides(case: str, device: str, dtype: torch.dtype) -> None:
    """Compare a compiled program with eager for several numbers of tokens."""

    def written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if case != "heads first":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None
        if case == "mask":
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=case == "grouped")
        flat = out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)
        flat += 1
        return out * 2, out.transpose(1, 2).contiguous().view(flat.shape)

    fast = ladder.compile(written)
    heads, keys = 2 if case == "grouped" else 4, 1 if case == "one key" else None
    with torch.no_grad():
        for tokens in (5, 5, 7, 9, 1):
            shapes = [(2, tokens, 4, 16), *[(2, keys or tokens, heads, 16)] * 2]
            if case == "heads first":
                shapes = [(a, c, b, d) for a, b, c, d in shapes]
            operands = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            for found, wanted in zip(fast(*operands), written(*operands), strict=True):
                torch.testing.assert_close(found, wanted, atol=4 * torch.finfo(dtype).eps, rtol=1e-3)
                assert tokens == 1 or found.stride() == wanted.stride()
    assert fast.outcome == "whole"
    assert not fast.refused
