"""Rows of operators of open sizes: what they cannot tell is a call of torch, a fault of theirs is loud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ladder import knobs
from ladder.frontend import aten_rows
from ladder.frontend.torch_fx import import_fx
from ladder.ir.graph import Graph


def imported(program: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    """Return the graph of a program of tensors of which every size is open."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [
        mode.from_tensor(
            torch.empty(shape),
            source=ConstantSource(f"x{at}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape)),
        )
        for at, shape in enumerate(shapes)
    ]
    with mode:
        return import_fx(make_fx(program)(*fakes), fakes).graph


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


def test_a_row_that_fails_is_told_of_open_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aten_rows.ROWS, "sin.default", broken)
    monkeypatch.setattr("ladder.faults._warned", set())
    with pytest.raises(ZeroDivisionError):
        imported(torch.sin, (3, 7))
    with knobs.override(strict=False), pytest.warns(match="aten.sin.default runs in torch, for a fault"):
        assert "call" in [node.operator for node in imported(torch.sin, (3, 7)).nodes]


SETTINGS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "kernel": (F.conv2d, ((2, 3, 9, 8), (4, 3, 5, 6))),
    "step": (lambda x, w, n: F.conv1d(x, w[:, :, :2], stride=n.shape[0]), ((2, 3, 9), (4, 3, 5), (3,))),
    "gap": (lambda x, w, n: F.conv1d(x, w[:, :, :2], dilation=n.shape[0]), ((2, 3, 9), (4, 3, 5), (3,))),
    "transposed": (
        lambda x, w, n: F.conv_transpose1d(x, w[:, :, :2], dilation=n.shape[0]),
        ((2, 3, 9), (3, 4, 5), (3,)),
    ),
    "correction": (lambda x, n: x.var(correction=n.shape[0]), ((2, 9), (3,))),
}
"""Programs in which a setting of an operator is an open size, and the shapes of their tensors."""


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_open_sizes_are_calls(name: str) -> None:
    """They are no faults: nothing is raised where faults are."""
    program, shapes = SETTINGS[name]
    assert "call" in [node.operator for node in imported(program, *shapes).nodes]
