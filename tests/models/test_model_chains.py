"""Memory-bound chains as model code writes them: few kernels on GPUs, each right on the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_column_reductions import run_parts

import ladder
from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.lower.chain.approximation import approximable, may_be_approximate
from ladder.movement.choose import machine_of, ranked
from ladder.partition import partition
from ladder.runtime.model.prepared import simplified
from targets import get_device

H200 = get_device("cuda/sm_90a")


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def normed_rotary(q: torch.Tensor, weight: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    q = weight * (q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(q.dtype)
    return q * c + rotated(q) * s


def shifted(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return x * k + before * (1 - k), x * v + before * (1 - v)


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=2), x[..., 1::2].clamp(-2, 2)
    return (up + 1) * gate * torch.sigmoid(gate)


def gray(x: torch.Tensor) -> torch.Tensor:
    mean = x.float().sum(1, keepdim=True).mean((1, 2, 3), keepdim=True)
    return (x * 0.5 + mean).half()


def updated(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> Any:
    return p - 0.5 * torch.sign(m * 0.5 + g), m * 0.25 + g * 0.75


PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], int]] = {
    "norm and rotary": (normed_rotary, [(1, 3, 4, 64), (64,), (3, 1, 64), (3, 1, 64)], 1),
    "norm and rotary of odd halves": (normed_rotary, [(1, 3, 4, 36), (36,), (3, 1, 36), (3, 1, 36)], 1),
    "tokens before": (shifted, [(2, 5, 64), (64,), (64,)], 1),
    "images twice as large": (
        lambda x, y: torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), y], 1),
        [(2, 3, 5, 8), (2, 4, 10, 16)],
        1,
    ),
    "two and four times": (
        lambda x: F.interpolate(x, (10, 32), mode="bilinear", align_corners=False),
        [(2, 3, 5, 8)],
        1,
    ),
    "one pixel": (lambda x: F.interpolate(x, scale_factor=4, mode="bilinear"), [(2, 3, 1, 1)], 1),
    "longer signals": (lambda x: F.interpolate(x, 12, mode="linear"), [(1, 2, 3)], 1),
    "reflected by one": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect") * 2, [(2, 3, 9, 16)], 1),
    "every second": (gated, [(6, 192)], 1),
    "mean of grays": (gray, [(2, 3, 40, 32)], 2),
    "two results of large": (updated, [(512, 520), (512, 520), (512, 520)], 1),
    "softplus": (lambda x: F.softplus(x) * F.softsign(x), [(24, 128)], 1),
    "arcs": (lambda x: torch.acos(x * 0.2) + torch.asin(x * 0.2) * torch.atan(x), [(24, 128)], 1),
    "largest": (lambda x: x - x.max(-1, keepdim=True).values + x.min(1, keepdim=True)[0], [(24, 128)], 1),
}
"""Name -> (program, shapes, kernels)."""


def parts_of(program: Callable[..., Any], inputs: Sequence[torch.Tensor], monkeypatch: Any) -> Any:
    """Return the graph of a program on an H200, its parts, and what it is given, in its order."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)
    found: list[Any] = []

    def backend(module: Any, examples: Any) -> Any:
        found.extend((simplified(import_fx(module, examples), H200).graph, examples))
        return module

    with torch.no_grad():
        ladder.compile(lambda *given: program(*given), backend=backend)(*inputs)
    return found[0], partition(found[0], device=H200, side_by_side=True), found[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, shapes, kernels = PROGRAMS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).half() for shape in shapes]
    graph, parts, given = parts_of(program, inputs, monkeypatch)
    assert len([part for part in parts if part.kind == "chain"]) == kernels
    exact = program(*inputs)
    exact = [exact] if isinstance(exact, torch.Tensor) else exact
    for made, wanted in zip(run_parts(graph, parts, given), exact, strict=True):
        assert (made - wanted.double()).abs().max() <= 2e-3 * wanted.double().abs().max()


def test_joined_rows_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm and a rotary embedding read a row once."""
    inputs = [
        torch.randn(shape).half() for shape in ((1, 900, 16, 128), (128,), (900, 1, 128), (900, 1, 128))
    ]
    _, parts, _ = parts_of(normed_rotary, inputs, monkeypatch)
    assert all(moves.mapping.num for moves in ranked(parts[0].graph, machine_of(H200)))


def test_few_positions_have_a_warp_of_columns() -> None:
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (16, 3, 224 * 224))
    graph = g.finish(g.add("sub", x, g.add("reduce_sum", x, axis=1)))
    assert ranked(graph, machine_of(H200))[0].mapping.across == 32


def test_sums_of_few_beside_what_they_are_made_of_are_columns() -> None:
    """Without a mapping too: not a loop for each result, one of which has a thread for every sum."""
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "float16", (2, 3, 64, 64)), type="float32")
    large = g.add("mul", x, x)
    graph = g.finish(g.add("reduce_sum", large, axis=1), large)
    mapping = ranked(graph, machine_of(H200))[0].mapping
    assert mapping.across
    assert str(emit_chain(graph, H200, "c", None)) == str(emit_chain(graph, H200, "c", mapping))


def test_steps_of_what_is_exact_allow_approximations() -> None:
    """A threshold on an argument decides as ever; one on an exponential would not."""
    for before in (False, True):
        g = GraphBuilder("chain")
        x = g.add("convert", g.input("x", "float16", (8, 64)), type="float32")
        power = g.add("exp", x)
        large = g.add("less", g.add("constant", value=20.0, type="float32"), x if before else power)
        graph = g.finish(g.add("convert", g.add("select", large, x, power), type="float16"))
        assert may_be_approximate(graph) is before


@pytest.mark.parametrize(
    ("between", "after", "found"),
    [
        ("bfloat16", "fp8_e4m3", {"exp", "div"}),
        ("bfloat16", "float32", {"exp", "div"}),
        ("", "float32", set()),
        ("bfloat16", "int8", set()),
        ("bfloat16", "floor", set()),
    ],
)
def test_functions_are_approximate_before_roundings_of_the_program(
    between: str, after: str, found: set[str]
) -> None:
    """None that is stored in 32 bits, or whose last bit another operator makes a step of."""
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "bfloat16", (8, 64)), type="float32")
    one = g.add("constant", value=1.0, type="float32")
    y = g.add("div", x, g.add("add", one, g.add("exp", g.add("neg", x))))
    y = g.add("convert", g.add("convert", y, type=between), type="float32") if between else y
    scaled = g.add("div", y, g.add("reduce_max", y, axis=1, keep=True))
    last = scaled if after == "float32" else g.add("floor", scaled) if after == "floor" else ""
    graph = g.finish(last or g.add("convert", scaled, type=after))
    assert set(approximable(graph).values()) == found
    assert len(approximable(graph)) == len(found)
