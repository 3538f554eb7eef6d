"""Rows of a few elements are one thread's on GPUs, by vectors: four rows of three where no row fills them.

On simulators of both vendors, beside torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_targets import run_chain

from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph
from ladder.lower.chain import emit_chain
from ladder.movement import whole_rows
from ladder.movement.choose import machine_of, ranked
from ladder.partition import partition
from ladder.runtime.model.prepared import simplified
from targets import get_device

HOPPER = get_device("cuda/sm_90a")


def graph_of(program: Callable[..., Any], *inputs: torch.Tensor) -> Graph:
    """Return the one chain of a program, its inputs in order."""
    module = torch.fx.experimental.proxy_tensor.make_fx(program, pre_dispatch=True)(*inputs)
    parts = partition(simplified(import_fx(module, list(inputs)), HOPPER).graph, device=HOPPER)
    (part,) = (part for part in parts if part.kind != "view")
    assert part.kind == "chain"
    return part.graph


def pushed(v: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = 2 * t / (1 + t.square().sum(-1, keepdim=True))
    return v + torch.linalg.cross(v, s), s


def parted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.square().sum(-1)
    return x / (1 + size)[:, None], size


PROGRAMS: dict[str, tuple[Callable[..., Any], int, int, torch.dtype]] = {
    "crossed": (pushed, 2, 3, torch.float32),
    "unit": (lambda x: F.normalize(x, dim=-1), 1, 3, torch.float32),
    "halves": (lambda x: x / (1 + x.square().sum(-1, keepdim=True)), 1, 3, torch.float16),
    "pairs": (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1), 1, 2, torch.bfloat16),
    "softmax": (lambda x: torch.softmax(x, -1), 1, 5, torch.float32),
    "two results": (parted, 1, 3, torch.float32),
    "numbers": (lambda a, b: (a - b).square().sum(-1), 2, 3, torch.float32),
    "largest": (lambda x: x.abs().amax(-1), 1, 8, torch.float32),
    "integers": (lambda x: x - x.amax(-1, keepdim=True), 1, 3, torch.int64),
    "wide": (lambda x: x.amax(-1), 1, 4, torch.int64),
    "bytes": (lambda x: x.amax(-1), 1, 3, torch.uint8),
}  # fmt: skip


def drawn(count: int, rows: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(rows, length, generator=generator) * 3 for _ in range(count)]
    if dtype.is_floating_point and rows > 20:
        found[0][3, 0], found[0][5, 1], found[0][7, 0] = float("nan"), float("inf"), float("-inf")
    return [(x.abs() if dtype is torch.uint8 else x).to(dtype) for x in found]


@pytest.mark.parametrize("rows", [64, 90, 1])
@pytest.mark.parametrize("busy", [1, whole_rows.BUSY_THREADS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_a_few_elements(name: str, busy: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "BUSY_THREADS", busy)
    program, count, length, dtype = PROGRAMS[name]
    inputs = drawn(count, rows, length, dtype)
    wanted = program(*inputs)
    graph = graph_of(program, *inputs)
    given = [inputs[int(node.name.rsplit("_", 2)[-2][3:])] for node in graph.inputs]
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}
    for target in ("cuda/sm_90a", "rocm/gfx942"):
        found = run_chain(graph, given, target)  # results of two, in either order
        for right in wanted if isinstance(wanted, tuple) else [wanted]:
            alike = [result for result in found if result.shape == right.shape]
            assert any(torch.allclose(result, right, equal_nan=True, **near) for result in alike), target


def test_four_rows_of_three_are_three_vectors() -> None:
    """Each of two inputs is loaded, and each of two results stored, by three accesses of 16 bytes."""
    graph = graph_of(pushed, torch.empty(400000, 3), torch.empty(400000, 3))
    mapping = ranked(graph, machine_of(HOPPER))[0].mapping
    assert mapping.lanes == 1
    assert emit_chain(graph, HOPPER, "chain", mapping).script().count('"v4"') == 12


def test_rows_of_whole_accesses_are_of_lanes() -> None:
    """Eight float32 are two accesses, which two lanes store side by side; eight halves are one thread's."""
    for dtype, lanes in ((torch.float32, 2), (torch.float16, 1)):
        graph = graph_of(lambda x: torch.softmax(x, -1), torch.empty(40000, 8, dtype=dtype))
        assert ranked(graph, machine_of(HOPPER))[0].mapping.lanes == lanes


ROWS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int, int]] = {
    "numbers of windows": (lambda x: x.unfold(1, 21, 1).std(-1), (1024, 2520), 1, 1),
    "the largest of a part": (lambda x: torch.softmax(x, -1)[:, :-1].amax(-1), (14400, 91), 16, 8),
}  # fmt: skip
"""Program of rows of some elements -> what it takes, lanes that share a row and rows of a block."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_read_again_share_a_block(name: str) -> None:
    """One row to a block leaves most of its lanes without an element."""
    program, shape, lanes, teams = ROWS[name]
    mapping = ranked(graph_of(program, torch.empty(shape)), machine_of(HOPPER))[0].mapping
    assert (mapping.lanes, mapping.teams) == (lanes, teams)
    few = (3, *shape[1:-1], min(shape[-1], 99))
    x = torch.randn(few, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, ..., 2], x[2, ..., 30 % few[-1]] = float("nan"), float("-inf"), float("inf")
    graph = graph_of(program, x)
    for target in ("cuda/sm_90a", "rocm/gfx942"):
        (found,) = run_chain(graph, [x], target)
        torch.testing.assert_close(found.reshape(program(x).shape), program(x), equal_nan=True)
