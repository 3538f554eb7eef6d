"""Chains that one block computes one after the other, against what they mean."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_found_plans import prepared_for_h200
from torch import nn

from ladder import knobs
from ladder.frontend.selection import chosen, places
from ladder.ir import GraphBuilder, evaluate
from ladder.lower.chain.sequence import Stage, arguments_of, emit_sequence
from ladder.partition.scatter import written
from ladder.runtime.model.prepared import from_data, to_data
from ladder.runtime.model.sequences import stages_of
from ladder.simulate import simulate_launch
from targets import get_device
from tile_types.arrays import numpy_dtype
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")


class Router(nn.Module):
    """A token's best experts, and what a mixture of experts asks of them: offsets and shares in order."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = x.float().softmax(-1)
        best, ids = chosen(scores, places(scores, True), 4)
        flat, bounds = ids.reshape(-1), torch.arange(x.shape[-1] + 1)
        offsets = (flat < bounds[:, None]).sum(1, dtype=torch.int32)
        shares = best / best.sum(-1, keepdim=True)
        order = places(flat)
        at = torch.arange(4)
        return ids, offsets, torch.where(order == at[:, None], shares.half().reshape(-1), 0).sum(1)


class Heads(nn.Module):
    """Norms of queries and keys, rotary embedding, and a cache that takes the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.RMSNorm(64, eps=1e-6), nn.RMSNorm(64, eps=1e-6)

    def forward(
        self, x: torch.Tensor, inverse: torch.Tensor, cache: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        angles = at.float()[:, None] * inverse[None].float()
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().half(), angles.sin().half()
        q, k = (x[..., a:z].view(1, 1, -1, 64).transpose(1, 2) for a, z in ((0, 512), (512, 640)))
        q, k = self.query(q), self.key(k)
        q, k = (t * cos + torch.cat((-t[..., 32:], t[..., :32]), -1) * sin for t in (q, k))
        cache.index_copy_(2, at, k)
        return q


CASES: dict[str, tuple[Any, Any, int]] = {
    "router": (Router, lambda: [torch.randn(1, 64).half()], 3),
    "heads": (
        Heads,
        lambda: [*(torch.randn(*s).half() for s in ((1, 1, 640), (32,), (1, 2, 8, 64))), torch.tensor([3])],
        3,
    ),
}  # fmt: skip


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", CASES)
def test_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, given, least = CASES[name]
    torch.manual_seed(0)
    model = make().half().eval().requires_grad_(False)
    with knobs.override(cache=False, sequences=True):
        found = prepared_for_h200(model, given(), monkeypatch)
        with knobs.override(sequences=False):
            without = prepared_for_h200(model, given(), monkeypatch)
    assert sum(part.kind == "chain" for part in without.parts) >= least
    kinds = [part.kind for part in found.parts if part.kind != "view"]
    assert kinds.count("sequence") == 1
    assert len(kinds) <= 2
    require_sequence(next(part for part in found.parts if part.kind == "sequence"))
    data = to_data(found)
    assert data is not None
    assert from_data(json.loads(json.dumps(data))) == replace(found, parts=list(found.parts))


def require_sequence(part: Any) -> None:
    """Simulate a part's kernel on random operands and compare with what the part means."""
    rng, stages, values = np.random.default_rng(0), stages_of(part.found), json.loads(part.found)["values"]
    arrays = {
        value: drawn(rng, node.tile) for value, node in zip(part.inputs, part.graph.inputs, strict=True)
    }
    wanted = dict(zip(part.outputs, evaluate(part.graph, list(arrays.values())), strict=True))
    read, made = ([values[number] for number in numbers] for numbers in arguments_of(stages))
    tiles = dict(zip(part.outputs, map(part.graph.tile, part.graph.outputs), strict=True))
    bases = written(part)
    outs = [arrays[bases[v]].copy() if v in bases else poisoned(tiles[v]) for v in made]
    given = [np.atleast_1d(arrays[value]) for value in read]
    outputs = tuple(range(len(given), len(given) + len(outs)))
    for order in ("together", "last warps first"):
        result = simulate_launch(
            emit_sequence(stages, H200, "k"), [*given, *outs], outputs=outputs, order=order
        )
        findings = [found for found in result.findings if found.kind != "unwritten" or not bases]
        assert not findings, findings[:3]
        for value, got in zip(made, outs, strict=True):
            exact = np.asarray(wanted[value])
            require_close(got.reshape(exact.shape), exact)


def drawn(rng: Any, tile: Any) -> Any:
    dtype = np.dtype(numpy_dtype(tile.ttype.name))
    found = rng.integers(0, 3, tile.known_shape) if dtype.kind in "iub" else rng.normal(size=tile.known_shape)
    return np.asarray(found).astype(dtype)


def poisoned(tile: Any) -> Any:
    dtype = np.dtype(numpy_dtype(tile.ttype.name))
    return np.full(tile.known_shape or (1,), 1 if dtype.kind in "iub" else np.nan, dtype)


def require_close(got: Any, exact: Any) -> None:
    if got.dtype.kind in "iub":
        assert np.array_equal(got, exact)
        return
    error = np.linalg.norm(got.astype(np.float64) - exact)
    assert error <= 1e-3 * np.linalg.norm(exact.astype(np.float64))


def test_values_in_other_shapes() -> None:
    """A stage reads what another made as a tensor of another shape; a number passes between stages."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (4, 32))
    first = g.finish(g.add("reduce_sum", x, axis=1, keep=False))
    g = GraphBuilder("chain")
    second = g.finish(g.add("reduce_max", g.input("y", "float32", (2, 2)), axis=1, keep=False))
    stages = [Stage(first, (0,), (1,)), Stage(second, (1,), (2,))]
    assert arguments_of(stages) == ((0,), (1, 2))
    given = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    sums, most = np.full(4, np.nan, np.float32), np.full(2, np.nan, np.float32)
    result = simulate_launch(emit_sequence(stages, H200, "k"), [given, sums, most], outputs=(1, 2))
    assert not result.findings, result.findings[:3]
    assert np.allclose(sums, given.sum(1), atol=1e-5)
    assert np.array_equal(most, sums.reshape(2, 2).max(1))
    with pytest.raises(ScheduleError, match="no kernels"):
        emit_sequence(stages, get_device("rocm/gfx942"), "k")
