"""A whole decoder layer as it is divided for AMD GPUs: every chain of the plan runs on the simulator.

Products are what torch (or a GEMM kernel, simulated elsewhere) computes; here the reference does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ladder.frontend.torch_fx import import_fx
from ladder.ir import evaluate
from ladder.lower.chain import emit_chain
from ladder.partition import partition
from ladder.partition.subgraphs import Subgraph
from ladder.rewrite import simplify
from ladder.simulate import simulate_launch
from targets import TileDevice, get_device

TOKENS, WIDTH, HEADS, HIDDEN = 12, 64, 4, 96
HALF = WIDTH // HEADS // 2


def norm(x: Any, weight: Any) -> Any:
    return F.rms_norm(x, (WIDTH,), weight, 1e-5)


def heads(x: Any) -> Any:
    return x.view(1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.cat([-x[..., HALF:], x[..., :HALF]], -1) * sin


def layer(x: Any, n1: Any, n2: Any, qkv: Any, out: Any, up: Any, down: Any, cos: Any, sin: Any) -> Any:
    """Return a pre-norm decoder layer: rotary attention and a gated feed-forward part."""
    q, k, v = (heads(part) for part in F.linear(norm(x, n1), qkv).chunk(3, -1))
    scores = turned(q, cos, sin) @ turned(k, cos, sin).transpose(-1, -2) * (2 * HALF) ** -0.5
    mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(1, TOKENS, WIDTH)
    x = x + F.linear(mixed, out)
    gate, value = F.linear(norm(x, n2), up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * value, down)


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, TOKENS, WIDTH), (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * HIDDEN, WIDTH)]
    shapes += [(WIDTH, HIDDEN), (TOKENS, 2 * HALF), (TOKENS, 2 * HALF)]
    return [(torch.randn(s) * (0.125 if len(s) == 2 else 1)).to(torch.float16) for s in shapes]


def simulated(part: Subgraph, arrays: list[Any], device: TileDevice) -> list[Any]:
    """Return the results of a chain's kernel."""
    tiles = [part.graph.tile(value) for value in part.graph.outputs]
    results = [np.full(tile.known_shape, np.nan, np.dtype(tile.ttype.name)) for tile in tiles]
    places = range(len(arrays), len(arrays) + len(results))
    function = emit_chain(part.graph, device, "chain")
    found = simulate_launch(function, [*arrays, *results], target=device, outputs=tuple(places))
    assert not found.findings, found.report()
    assert not found.bank_conflicts
    return results


@pytest.mark.costly
@pytest.mark.parametrize("target", ["rocm/gfx90a", "rocm/gfx942"])
def test_a_decoder_layer(target: str) -> None:
    device, given = get_device(target), operands()
    graph = simplify(import_fx(make_fx(layer)(*given), given).graph, device)
    parts = partition(graph, side_by_side=True, device=device)
    values = dict(zip((node.name for node in graph.inputs), (x.numpy() for x in given), strict=True))
    chains = 0
    for part in parts:
        arrays = [np.ascontiguousarray(values[name]) for name in part.inputs]
        if part.kind == "chain":
            chains += 1
            results = simulated(part, arrays, device)
        else:
            exact = evaluate(part.graph, arrays)
            pairs = zip(exact if isinstance(exact, tuple) else (exact,), part.graph.outputs, strict=True)
            results = [np.asarray(a).astype(part.graph.tile(value).ttype.name) for a, value in pairs]
        values.update(zip(part.outputs, results, strict=True))
    assert chains >= 5
    exact = layer(*(x.double() for x in given)).numpy()
    error = np.linalg.norm(values[graph.outputs[0]].astype(np.float64) - exact) / np.linalg.norm(exact)
    assert error < 1e-3
