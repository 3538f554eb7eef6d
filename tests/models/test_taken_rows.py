"""Chains on GPUs that read elements at other places: windows of bordered inputs, rows of no whole vectors.

What they take is read as it lies, in one kernel, on simulators of both vendors beside torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_targets import run_chain

from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.partition import partition
from ladder.runtime.model.prepared import simplified
from targets import get_device

HOPPER = get_device("cuda/sm_90a")
TARGETS = ("cuda/sm_90a", "rocm/gfx942")


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the frontend see a GPU, though inputs are on the CPU."""
    on_cpu = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", on_cpu, False)


def graph_of(program: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Graph:
    """Return the one chain of a program."""
    module = torch.fx.experimental.proxy_tensor.make_fx(program, pre_dispatch=True)(*inputs)
    parts = partition(simplified(import_fx(module, list(inputs)), HOPPER).graph, device=HOPPER)
    (part,) = (part for part in parts if part.kind != "view")
    assert part.kind == "chain"
    return part.graph


def is_as_torch(program: Callable[..., Any], inputs: Sequence[torch.Tensor], near: float = 1e-5) -> None:
    """Compare what kernels of both vendors find with what torch does."""
    graph, wanted = graph_of(program, inputs), program(*inputs)
    given = [inputs[int(node.name.rsplit("_", 2)[-2][3:])] for node in graph.inputs]
    for target in TARGETS:
        (found,) = run_chain(graph, given, target)
        found = found.reshape(graph.tile(graph.outputs[0]).known_shape).reshape(-1)
        lies = wanted.as_strided((wanted.numel(),), (1,))
        torch.testing.assert_close(found, lies, equal_nan=True, rtol=near, atol=near)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3
    if dtype is torch.uint8:
        return (x.abs() * 40).clamp(max=255).to(dtype)
    flat = x.view(-1)
    if len(flat) > 4:
        flat[3], flat[len(flat) // 2], flat[-2] = float("nan"), float("inf"), -0.0
    return x.to(dtype)


def patches(x: torch.Tensor) -> torch.Tensor:
    y = F.pad(x.permute(0, 2, 1), (0, 8), "replicate").unfold(-1, 16, 8)
    return (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-5)


def frames(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(-1, 24, 8) - x.unfold(-1, 24, 8).mean(-1, keepdim=True)


HELD: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.dtype]] = {
    "patches of replicated series": (patches, (2, 40, 3), torch.float32),
    "frames": (frames, (3, 8, 65), torch.float32),
    "softmax of lags": (lambda x: x.unfold(-1, 8, 4).softmax(-1), (3, 37), torch.float32),
    "halves": (lambda x: F.layer_norm(x.mT.unfold(-1, 16, 16), (16,)), (2, 40, 3), torch.float16),
    "zeros in front": (
        lambda x: F.pad(x, (9, 0)).unfold(-1, 10, 1).softmax(-1),
        (2, 13),
        torch.float32,
    ),
    "turned ends": (
        lambda x: torch.cat([x[:, 1:9].flip(1), x], 1).unfold(-1, 12, 3).softmax(-1),
        (2, 31),
        torch.float32,
    ),
}
"""Name -> program of rows that are windows, what it takes."""


@pytest.mark.parametrize("name", HELD)
def test_rows_of_windows_stay_in_registers(name: str) -> None:
    program, shape, dtype = HELD[name]
    inputs = [drawn(*shape, dtype=dtype)]
    mapping = ranked(graph_of(program, inputs), machine_of(HOPPER))[0].mapping
    assert mapping.lanes > 1
    assert mapping.num
    is_as_torch(program, inputs, 1e-2 if dtype is torch.float16 else 1e-5)


BORDERED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "reflected images": (lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), "reflect"), 3, 1), (1, 2, 7, 9)),
    "replicated series": (lambda x: x - F.avg_pool1d(F.pad(x, (2, 2), "replicate"), 5, 1), (2, 3, 23)),
    "every second": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), "reflect"), 3, 2), (1, 2, 8, 12)),
    "one row": (lambda x: F.avg_pool2d(F.pad(x, (2, 2, 0, 0), "replicate"), (1, 5), 1), (1, 1, 1, 8)),
}
"""Name -> program that reads small windows of what is padded by its own elements."""


@pytest.mark.parametrize("name", BORDERED)
def test_windows_read_through_borders(name: str) -> None:
    """Nothing stores the padded tensor: `graph_of` finds one kernel."""
    program, shape = BORDERED[name]
    is_as_torch(program, [drawn(*shape)])


def mixed(x: torch.Tensor, c: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    y = x.float() - c
    return a[:, None, None, None] * y + (1 - a)[:, None, None, None] * y.flip(0)


THREES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "mixed images of bytes": (mixed, ((4, 6, 4, 3), (3,), (4,)), torch.uint8),
    "odd images of bytes": (mixed, ((3, 5, 7, 3), (3,), (3,)), torch.uint8),
    "mixed images of halves": (mixed, ((2, 4, 8, 3), (3,), (2,)), torch.float16),
    "positions": (lambda x, t: (x - t) * 2, ((2, 8, 3), (2, 1, 3)), torch.float32),
    "five of two": (lambda x, t: x + t[:, None], ((6, 5, 2), (6, 2)), torch.float32),
    "part of rows": (lambda x, t: x[:, :, 1:] * t, ((2, 8, 4), (3,)), torch.float32),
    "seven beside": (lambda x, t: torch.cat([x, t], -1) * 2, ((4, 4, 3), (4, 4, 4)), torch.float32),
}
"""Name -> program of rows of no whole vectors, what it takes; the first is of a type."""


@pytest.mark.parametrize("name", THREES)
def test_vectors_cross_rows(name: str) -> None:
    program, shapes, dtype = THREES[name]
    is_as_torch(program, [drawn(*shapes[0], dtype=dtype), *(drawn(*shape) for shape in shapes[1:])])


def test_bytes_of_three_channels_are_read_in_words() -> None:
    inputs = [torch.empty(64, 224, 224, 3, dtype=torch.uint8), torch.empty(3), torch.empty(64)]
    text = emit_chain(graph_of(mixed, inputs), HOPPER, "chain").script()
    assert text.count("T.ptx.ld(") >= 2
    assert '"u8"' not in text


def biased(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[-1])
    slopes = 2.0 ** (-8 / x.shape[1] * torch.arange(1, x.shape[1] + 1))
    y = x.float() + slopes[:, None, None] * (at[None] - at[:, None])
    return y.masked_fill(at[None] > at[:, None], float("-inf")).softmax(-1).to(x.dtype)


def test_numbers_of_rows_are_computed_again() -> None:
    """A head's slope is one number of each row: scores are not stored for it."""
    assert graph_of(biased, [torch.empty(4, 16, 512, 512, dtype=torch.float16)]).outputs
    is_as_torch(biased, [drawn(1, 2, 8, 8).nan_to_num(0, 1, 1).half()], 2e-3)
