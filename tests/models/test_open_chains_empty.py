"""Chains of open sizes in which something never has elements run on their kernels."""

from __future__ import annotations

import pytest
import torch
from onnx.parser import parse_model
from torch import Tensor

import ladder
from ladder.ir.parser import parse
from ladder.rewrite.identities import LAYOUT_FOLDING
from ladder.rewrite.rules import rewrite
from ladder.runtime.model import binders


def test_parts_without_elements_are_no_reason_to_compute_node_by_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rotated(x: Tensor, y: Tensor) -> Tensor:
        low, high, rest = x[..., :3], x[..., 3:6], x[..., 6:]
        return torch.cat([torch.cat([-high, low], -1) * y[..., :6], rest], -1).tanh()

    def refuse(*_: object) -> None:
        raise AssertionError("by reference")

    monkeypatch.setattr(binders, "by_torch", refuse)
    fast = ladder.compile(rotated)
    with torch.no_grad():
        for rows in (4, 5, 7):
            x, y = torch.randn(rows, 6), torch.randn(rows, 6)
            assert torch.allclose(fast(x, y), rotated(x, y), atol=1e-6)
    assert len(fast.models) == 2
    assert not fast.refused


def test_repeats_of_nothing() -> None:
    """A border and a sum give elements where their operand has none."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        nothing = x.flatten()[6:].repeat(2)
        return torch.nn.functional.pad(nothing, (1, 2))[:, None] + 1, x[2:].repeat(2, 3).sum(0, True)

    x = torch.arange(6.0).reshape(2, 3)
    for found, wanted in zip(ladder.compile(program)(x), program(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("parts", "left"), [("%x, %e", 0), ("%e, %x", 0), ("%x, %e, %y", 1), ("%x, %y", 1)])
def test_joins_lose_parts_without_elements(parts: str, left: int) -> None:
    extent = 3 * (parts.count("%x") + parts.count("%y"))
    graph = parse(
        f"""kernel k {{
          %x = input() : float32[n, 3]
          %y = input() : float32[n, 3]
          %e = slice(%x, begin=(0, 3), shape=("n", 0)) : float32[n, 0]
          %z = concat({parts}, axis=1) : float32[n, {extent}]
          %r = neg(%z) : float32[n, {extent}]
          return %r
        }}"""
    )
    found = rewrite(graph, LAYOUT_FOLDING)
    joins = [node for node in found.nodes if node.operator == "concat"]
    assert len(joins) == left
    assert all(0 not in found.tile(value).shape for node in joins for value in node.inputs)


@pytest.mark.parametrize("rows", ["n", 0])
@pytest.mark.parametrize(("given", "least"), [("bool", 0), ("uint8", 0), ("int8", -128), ("int32", -(2**31))])
def test_the_greatest_of_nothing_is_the_least_of_its_type(given: str, least: int, rows: object) -> None:
    """Bytes are computed in int32, of which the least was taken; of bool that was True."""
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
      g ({given}[2, {rows}, 4] x) => (bool[2, 1, 4] m, int64[2, 1, 4] y) {{
        axis = Constant <value_ints = [1]> ()  most = ReduceMax (x, axis)
        m = Cast <to = 9> (most)  y = Cast <to = 7> (most)
      }}"""
    found = ladder.compile(parse_model(text))(torch.zeros(2, 0, 4, dtype=getattr(torch, given)))
    assert found[0].unique().tolist() == [least != 0]
    assert found[1].unique().tolist() == [least]
