"""Attention whose kernel makes q and the new rows of its caches, against what chain and attention mean."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from test_found_plans import prepared_for_h200
from torch import nn

from ladder import knobs
from ladder.ir import evaluate
from ladder.ir.attention import AXES, as_attention
from ladder.ir.attention_row import operand_names
from ladder.ir.build import node_attributes
from ladder.lower.build import emit_attention_with_rows
from ladder.lower.chain.attention_rows import RowsForm
from ladder.partition import Subgraph
from ladder.partition.attention import node_of
from ladder.partition.cached_attention import rows_of
from ladder.runtime.model.cached_attention import cached_attention_jobs
from ladder.runtime.model.prepared import Prepared, from_data, to_data
from ladder.simulate import simulate_launch
from schedules.attention import AttentionSchedule
from targets import get_device
from tile_types.arrays import numpy_dtype
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")


@dataclass
class Shape:
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    keys: int = 70
    kind: torch.dtype = torch.float16
    norm: bool = False
    given: bool = False


class Step(nn.Module):
    """Rotary positions of q and k, with norms of heads before or without, rows of caches, and attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.rand(shape.size, dtype=shape.kind) + 0.5)

    def heads(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        shape = self.shape
        x = x.view(shape.batch, 1, -1, shape.size)
        if shape.norm and turned:
            wide = x.float()
            x = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x.transpose(1, 2)

    def forward(self, x: Any, cos: Any, sin: Any, k: Any, v: Any, position: Any) -> Any:
        shape = self.shape
        parts = x.split([shape.heads * shape.size, *[shape.kv_heads * shape.size] * 2], -1)
        q, key, value = (self.heads(part, at < 2) for at, part in enumerate(parts))
        q, key = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, key))
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value)
        mask = (torch.arange(shape.keys) <= position[:, None])[None, None]
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return (found, q) if shape.given else found


def examples(shape: Shape) -> list[torch.Tensor]:
    """Return arguments that show shapes and types."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    caches = torch.zeros(2, shape.batch, shape.kv_heads, shape.keys, shape.size, dtype=shape.kind)
    angles = torch.zeros(2, 1, shape.size, dtype=shape.kind)
    x = torch.zeros(shape.batch, 1, width, dtype=shape.kind)
    return [x, *angles, *caches, torch.tensor([3])]


def prepared(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> tuple[Prepared, Subgraph]:
    """Return what is prepared for an H200, and its one part that computes."""
    with knobs.override(cache=False, found_graphs=False):
        found = prepared_for_h200(Step(shape), examples(shape), monkeypatch)
    assert [part.kind for part in found.parts if part.kind != "view"] == ["cached_attention"]
    return found, next(part for part in found.parts if part.kind != "view")


Plan = AttentionSchedule

CASES = {
    "one token": (Shape(), Plan(8, 3, 2), [0, 15, 16, 69]),
    "norms of heads, bfloat16": (Shape(kind=torch.bfloat16, norm=True, size=128), Plan(8, 4, 4), [40, 69]),
    "two sequences": (Shape(2, 4, keys=45), Plan(8, 6, 2), [0, 16, 44]),
    "heads of 96, one block": (Shape(size=96, heads=4, kv_heads=4), Plan(8, 3), [17]),
    "as Qwen3-30B-A3B decodes": (
        Shape(heads=32, kv_heads=4, size=128, keys=1152, kind=torch.bfloat16, norm=True),
        Plan(8, 8, 8),
        [1040],
    ),
    "heads of 16": (Shape(size=16), Plan(8, 3, 2), [20]),
    "two fragments": (Shape(), Plan(8, 3, 8, 2), [33]),
    "wide groups": (Shape(heads=16, kv_heads=1, size=32), Plan(16, 6, 2), [64]),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_made_and_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, schedule, positions = CASES[case]
    _, part = prepared(shape, monkeypatch)
    for number, position in enumerate(positions):
        order = ("together", "last warps first", "random")[number % 3]
        require_right(part, arrays_of(part, position), schedule, order)


def test_rows_go_where_numbers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end too, beyond it nowhere; positions may say something else."""
    _, part = prepared(Shape(), monkeypatch)
    schedule = Plan(8, 3, 4)
    for row in (-60, 12):
        require_right(part, arrays_of(part, 40, row), schedule, "random")
    arrays = arrays_of(part, 40, 70)
    before = [arrays[name].copy() for name in caches_of(part)]
    _, *after = simulated(part, arrays, schedule, "together", caches=True)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(before, after, strict=True))


def test_saved_and_named_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found, part = prepared(Shape(), monkeypatch)
    data = to_data(found)
    assert data is not None
    assert from_data(json.loads(json.dumps(data))) == replace(found, parts=list(found.parts))
    (job,) = cached_attention_jobs(part, H200)
    other = next(iter(job.others()))  # what takes its place where it spills
    assert other.key != job.key


@pytest.mark.parametrize(("shape", "knob"), [(Shape(given=True), True), (Shape(), False)])
def test_others_keep_their_kernels(shape: Shape, knob: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with knobs.override(cache=False, found_graphs=False, prologues=knob):
        parts = prepared_for_h200(Step(shape), examples(shape), monkeypatch).parts
    kinds = [part.kind for part in parts]
    assert "cached_attention" not in kinds
    assert "attention" in kinds


def test_blocks_of_too_few_warps_make_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, part = prepared(Shape(), monkeypatch)
    with pytest.raises(ScheduleError, match="3 warps make rows, a block has 2"):
        require_right(part, arrays_of(part, 3), Plan(8, 2))
    _, part = prepared(Shape(heads=16, kv_heads=1, size=32), monkeypatch)
    with pytest.raises(ScheduleError, match="a block has all heads that share keys"):
        require_right(part, arrays_of(part, 3), Plan(8, 8))


def caches_of(part: Subgraph) -> list[str]:
    """Return the names of the caches that a part writes."""
    return [part.graph.producer(value).inputs[0] for value in node_of(part.graph).inputs[1:3]]


def arrays_of(part: Subgraph, position: int, row: int | None = None) -> dict[str, np.ndarray]:
    """Return random arguments by their names in a part; what no token has filled yet is NaN.

    row: Where the new one goes instead of the position.
    """
    rng, node, arrays = np.random.default_rng(0), node_of(part.graph), {}
    for x in part.graph.inputs:
        array = rng.normal(size=x.tile.known_shape)
        if x.name in caches_of(part):
            array[:, :, position + (row is not None) :] = np.nan
        arrays[x.name] = array.astype(numpy_dtype(x.tile.ttype.name))
    numbers = part.graph.producer(node.inputs[1]).inputs[1]
    for name, place in ((node.inputs[3], position), (numbers, position if row is None else row)):
        arrays[name] = np.full_like(arrays[name], place)
    return arrays


def require_right(
    part: Subgraph, arrays: dict[str, np.ndarray], schedule: AttentionSchedule, order: str = "together"
) -> None:
    """Simulate a part's kernel and compare with what the part means."""
    given = [np.nan_to_num(arrays[node.name].astype(np.float64)) for node in part.graph.inputs]
    wanted = evaluate(part.graph, given)
    out, _, _ = simulated(part, copied(arrays), schedule, order)
    _, *caches = simulated(part, copied(arrays), schedule, order, caches=True)
    rows = arrays[part.graph.producer(node_of(part.graph).inputs[1]).inputs[1]]
    for name, cache in zip(caches_of(part), caches, strict=True):
        unset = np.isnan(arrays[name])
        unset[:, :, rows] = False
        assert np.array_equal(np.isnan(cache), unset)
        cache[unset] = 0
    bound = 1e-2 if part.graph.tile(part.graph.outputs[0]).ttype.name == "bfloat16" else 2e-3
    for got, exact in zip((out, *caches), wanted, strict=True):
        assert np.linalg.norm(got.astype(np.float64) - exact) <= bound * np.linalg.norm(exact)


def copied(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in arrays.items()}


def simulated(
    part: Subgraph,
    arrays: dict[str, np.ndarray],
    schedule: AttentionSchedule,
    order: str,
    caches: bool = False,
) -> list[np.ndarray]:
    """Return the result, and the caches as they are afterwards if asked for."""
    graph, node = part.graph, node_of(part.graph)
    form, names = as_attention(graph, node), operand_names(len(node.inputs), node_attributes(node))
    bases = caches_of(part)
    chain = [arrays[x.name] for x in rows_of(graph).inputs if x.name not in bases]
    held = zip(("k", "v", *names[3:]), (*bases, *node.inputs[3:]), strict=True)
    operands = {name: arrays[value] for name, value in held}
    form_of_out = graph.tile(node.name)
    out = operands["out"] = np.full(form_of_out.known_shape, np.nan, operands["k"].dtype)
    numbers = {"batch": out.shape[0], "tokens": out.shape[2], "keys": operands["k"].shape[2]}
    for name in form.tensors("q"):
        array = operands[name]
        for axis, extent, stride in zip(AXES[name], array.shape, array.strides, strict=False):
            numbers[f"{name}_{axis}"] = 0 if extent == 1 else stride // array.itemsize
    flat = [operands[name].reshape(-1) for name in form.tensors("q")]
    values = [*chain, *(numbers[name] for name in form.numbers("q")), *flat]
    first = len(values) - len(flat)
    outputs = (first, first + 1, -1) if caches else (-1,)
    kernel = emit_attention_with_rows(RowsForm(rows_of(graph)), form, H200, schedule, "kernel")
    result = simulate_launch(kernel, values, target=H200, outputs=outputs, order=order)
    assert caches or not result.findings, result.report()  # outputs are taken as unset before
    return [out, operands["k"], operands["v"]]
