"""Fake results with open sizes: as torch's decompositions make them, and without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

import ladder
from ladder.runtime.quick_fakes import ELEMENTWISE, NORMS, _fakes, quick_fakes

aten = torch.ops.aten
NUMBERS: dict[str, tuple[Any, ...]] = {
    "threshold": (0.1, 20.0),
    "clamp": (-1, 2.5),
    "clamp_min": (0.0,),
    "clamp_max": (1,),
    "hardtanh": (0.0, 6.0),
}
LAYOUTS = {
    "contiguous": torch.randn(3, 4, 5, 6),
    "last": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "sliced": torch.randn(3, 4, 5, 12)[..., ::2],
    "moved": torch.randn(6, 3, 5, 4).permute(1, 3, 2, 0),
    "half": torch.randn(3, 4, 5, 6, dtype=torch.float16),
    "integers": torch.ones(3, 4, 5, 6, dtype=torch.int32),
    "empty": torch.randn(0, 4, 5, 6),
}


def open_sizes(x: torch.Tensor) -> FakeTensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def told(op: Any, layout: str, *more: Any) -> Any:
    """Return what an operator's results look like with the sizes that there are, or the error's kind."""
    x = open_sizes(LAYOUTS[layout])
    more = tuple(x.fake_mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in more)
    try:
        with torch.no_grad():
            found = tree_leaves(op(x, *more))
    except Exception as error:
        return type(error)
    return [(tuple(map(int, f.shape)), tuple(map(int, f.stride())), f.dtype, f.device) for f in found], [
        f is x for f in found
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_decomposed(layout: str) -> None:
    x = LAYOUTS[layout]
    row = [torch.ones(4, dtype=x.dtype) for _ in range(4)]
    for op in _fakes():
        name = op.name().removeprefix("aten::").split(".")[0]
        given = NUMBERS.get(name.removesuffix("_"), ())
        if name in NORMS:
            given = (*row, *([False] if name != NORMS[2] else []), 0.1, 1e-5)
        expected = told(op, layout, *given)
        with quick_fakes():
            assert told(op, layout, *given) == expected, op


@pytest.mark.parametrize("given", [(None, None), (2.0, 1.0), (torch.zeros(4, 5, 6), None)], ids=str)
def test_what_may_raise_is_torchs(given: tuple[Any, ...]) -> None:
    expected = told(torch.clamp, "contiguous", *given)
    with quick_fakes():
        assert told(torch.clamp, "contiguous", *given) == expected


def test_training_is_torchs() -> None:
    row = [torch.ones(4) for _ in range(4)]
    expected = told(aten.native_batch_norm, "contiguous", *row, True, 0.1, 1e-5)
    with quick_fakes():
        assert told(aten.native_batch_norm, "contiguous", *row, True, 0.1, 1e-5) == expected


def test_torchs_table_is_as_before() -> None:
    from torch._subclasses.fake_impls import get_fast_op_impls

    before = dict(get_fast_op_impls())
    with quick_fakes(), quick_fakes():
        assert len(get_fast_op_impls()) > len(before)
    assert get_fast_op_impls() == before


def test_compiling_takes_nothing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def counted(name: str, parts: Any, x: Any, *given: Any, **named: Any) -> Any:
        taken.extend([name] * x._has_symbolic_sizes_strides)
        return parts(x, *given, **named)

    for name in (*ELEMENTWISE, *(f"{n}_" for n in ELEMENTWISE), *NORMS):
        op = getattr(getattr(aten, name, None), "default", None)
        if op in decomposition_table:
            monkeypatch.setitem(decomposition_table, op, partial(counted, name, decomposition_table[op]))
    _fakes.cache_clear()
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True), nn.Mish()
    model = nn.Sequential(*layers).eval()
    fast = ladder.compile(model)
    try:
        with torch.no_grad():
            for batch in (2, 3, 4):
                x = torch.randn(batch, 3, 12, 12)
                torch.testing.assert_close(fast(x), model(x))
    finally:
        _fakes.cache_clear()
    assert taken == []
