"""Attention whose kernel makes q and the new rows of its caches, on a GPU: as by kernels of their own."""

from __future__ import annotations

from typing import Any

import pytest

import ladder
from ladder import knobs

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

SIZE, KEYS = 64, 1200


class Step(nn.Module):
    """One token: norms of heads, rotary positions, rows of caches, attention."""

    def __init__(self, heads: int, kv_heads: int, kind: Any) -> None:
        super().__init__()
        self.counts = heads, kv_heads, kv_heads
        self.norm, self.inner = nn.RMSNorm(SIZE), nn.Linear(SIZE * sum(self.counts), SIZE * sum(self.counts))
        self.to(kind)

    def forward(self, x: Any, cos: Any, sin: Any, k: Any, v: Any, position: Any) -> Any:
        parts = self.inner(x).split([SIZE * count for count in self.counts], -1)
        q, key, value = (part.view(len(x), 1, -1, SIZE) for part in parts)
        q, key = (
            y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin
            for y in (self.norm(q).transpose(1, 2), self.norm(key).transpose(1, 2))
        )
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value.transpose(1, 2))
        mask = (torch.arange(KEYS, device=x.device) <= position[:, None])[None, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        position += 1
        return out


def decoded(model: Any, given: list[Any], steps: int, **given_knobs: bool) -> tuple[set[str], list[Any]]:
    """Return the kinds of a plan's steps, and results of several tokens with the caches at the end."""
    given, results = [x.clone(memory_format=torch.preserve_format) for x in given], []
    with knobs.override(found_graphs=False, **given_knobs), torch.no_grad():
        fast = ladder.compile(model)
        for _ in range(steps):
            results.append(fast(*given).clone())
    kinds = {step.part.kind for step in fast.models[-1].executable.plan.steps}
    return kinds, [*results, *given[3:]]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 8, 2), (3, 4, 4), (1, 16, 1)])
@pytest.mark.parametrize("token_major", [False, True])
def test_rows(batch: int, heads: int, kv_heads: int, kind: str, token_major: bool) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, kind)
    model = Step(heads, kv_heads, dtype).eval().cuda().requires_grad_(False)
    caches = torch.full((2, batch, kv_heads, KEYS, SIZE), torch.nan, device="cuda", dtype=dtype)
    caches[..., :1030, :] = torch.randn(2, batch, kv_heads, 1030, SIZE, device="cuda").to(dtype)
    if token_major:
        caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
    x = torch.randn(batch, SIZE * (heads + 2 * kv_heads), device="cuda").to(dtype)
    angles = torch.rand(1, SIZE // 2, device="cuda").repeat(1, 2) * 6
    given = [x, angles.cos().to(dtype), angles.sin().to(dtype), *caches, torch.tensor([1030], device="cuda")]
    kinds, found = decoded(model, given, 6)
    others, apart = decoded(model, given, 6, prologues=False)
    assert "cached_attention" in kinds
    assert "cached_attention" not in others
    for got, wanted in zip(found, apart, strict=True):
        unset = wanted.isnan()
        assert torch.equal(got.isnan(), unset)
        got, wanted = got.double().masked_fill(unset, 0), wanted.double().masked_fill(unset, 0)
        assert (got - wanted).norm() <= 4e-3 * wanted.norm()
