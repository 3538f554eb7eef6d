"""Chains on CPUs: the exponential of all ranges, rows kept across reductions, copies that join a chain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ladder
from benchmarks.chain_programs import PROGRAMS
from ladder.cli.first_kernels import whole_chain
from ladder.frontend.aten_models import row_codes
from ladder.frontend.importer import Importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder
from ladder.lower.build import derive_stage
from ladder.lower.chain import emit_chain
from ladder.partition import partition
from ladder.rewrite import simplify
from ladder.runtime.build import find_or_build, load_entry
from ladder.runtime.compile import target_of
from ladder.runtime.model.chains import chain_job
from ladder.runtime.tokens import quantize_tokens
from targets import get_device, host_cpu
from tile_types.arrays import torch_dtype


def runner(graph: Graph) -> Callable[..., list[torch.Tensor]]:
    """Return the chain's kernel for this machine."""
    (kernel,) = find_or_build([chain_job(graph, get_device(target_of(torch.device("cpu"))))])
    entry = load_entry(kernel, "cpu")

    def run(*arguments: torch.Tensor) -> list[torch.Tensor]:
        tiles = [graph.tile(value) for value in graph.outputs]
        results = [torch.empty(tile.known_shape, dtype=torch_dtype(tile.ttype.name)) for tile in tiles]
        for result in results:
            result.fill_(torch.nan if result.is_floating_point() else 99)
        entry(*arguments, *results)
        return results

    return run


def test_exponential() -> None:
    g = GraphBuilder("exp")
    graph = g.finish(g.add("exp", g.input("x", "float32", (4, 50_001))))
    x = np.linspace(-110, 95, 200_004, dtype=np.float32)
    x[:4] = (np.nan, np.inf, -np.inf, 0)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64)).astype(np.float32)
    (got,) = runner(graph)(torch.from_numpy(x.reshape(4, -1)))
    np.testing.assert_allclose(got.numpy().reshape(-1), exact, rtol=4e-7, atol=1e-37)


@pytest.mark.parametrize(
    "function",
    [
        *(
            torch.exp,
            torch.sigmoid,
            torch.tanh,
            torch.erf,
            torch.nn.functional.gelu,
            torch.nn.functional.silu,
        ),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: torch.softmax(x, -1),
    ],
)
def test_no_function_is_called_lane_by_lane(function: Callable[..., torch.Tensor]) -> None:
    fast, x = ladder.compile(function), torch.linspace(-3, 3, 96).reshape(3, 32)
    with torch.no_grad():
        assert torch.allclose(fast(x), function(x), atol=1e-6)
    (kernel,) = fast.models[0].kernels.values()
    assembly = derive_stage("asm", kernel.sources(), host_cpu())
    assert "ret" in assembly
    assert "expf" not in assembly


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    """The programs of `benchmarks.chains`, as whole chains, in float32."""
    program = PROGRAMS[name]
    arguments = [torch.randn(shape) for shape in program.shapes["small"]]
    graph = whole_chain(program.function, arguments)
    exact = program.function(*(x.double() for x in arguments))
    exact = exact if isinstance(exact, tuple) else (exact,)
    for got, want in zip(runner(graph)(*arguments), exact, strict=True):
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


def test_a_copy_joins_the_chain_that_it_follows() -> None:
    program = PROGRAMS["shuffle_split"]
    arguments = [torch.randn(shape) for shape in program.shapes["small"]]
    graph = simplify(import_fx(make_fx(program.function)(*arguments), arguments).graph)
    parts = partition(graph, side_by_side=True)
    assert [part.kind for part in parts] == ["chain", "view", "view"]
    assert {"concat", "transpose"} <= set(parts[0].operators)


TURNED = {
    "matrix": ((70, 45), (1, 0)),
    "channels last": ((2, 40, 6, 11), (0, 2, 3, 1)),
    "channels first": ((2, 6, 11, 40), (0, 3, 1, 2)),
    "batch": ((3, 33, 17), (0, 2, 1)),
    "planes": ((20, 3, 32), (2, 1, 0)),
    "heads": ((2, 5, 16, 24), (0, 2, 1, 3)),
}
"""Shape and permutation; the last one leaves the last axis where it is."""


@pytest.mark.parametrize("ttype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("case", TURNED)
def test_transposes_are_turned_in_registers(case: str, ttype: str) -> None:
    shape, order = TURNED[case]
    g = GraphBuilder("turned")
    x = g.input("x", ttype, shape)
    turned = g.add("transpose", g.add("relu", x), permutation=order)
    y = g.input("y", ttype, tuple(shape[axis] for axis in order))
    graph = g.finish(g.add("add", turned, y))
    dtype = getattr(torch, ttype)
    a, other = (torch.randint(-100, 100, graph.tile(name).known_shape).to(dtype) for name in (x, y))
    result = torch.zeros_like(other)
    device = get_device(target_of(torch.device("cpu")))
    assert ("Shuffle" in emit_chain(graph, device, "chain").script()) == (case != "heads")
    entry = load_entry(*find_or_build([chain_job(graph, device)]), "cpu")
    entry(a, other, result)
    assert torch.equal(result, torch.relu(a).permute(order) + other)


@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 16), (32, 32)])
def test_matrices_beside_their_transposes_meet_on_the_diagonal(shape: tuple[int, ...]) -> None:
    """Of the first element of the only tile, both results read one element."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + x.mT, (x * 2 + 1).mT.contiguous()

    x = torch.randn(shape)
    for found, wanted in zip(ladder.compile(both)(x), both(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [5, 37, 64])
def test_transposes_of_open_sizes_are_turned(size: int) -> None:
    g = GraphBuilder("turned")
    x = g.input("x", "float32", (2, "s", 40))
    graph = g.finish(g.add("transpose", g.add("relu", x), permutation=(0, 2, 1)))
    device = get_device(target_of(torch.device("cpu")))
    assert "Shuffle" in emit_chain(graph, device, "chain").script()
    a, result = torch.randn(2, size, 40), torch.zeros(2, 40, size)
    load_entry(*find_or_build([chain_job(graph, device)]), "cpu")(size, a, result)
    assert torch.equal(result, torch.relu(a).transpose(1, 2))


def test_a_quotient_of_open_sizes_that_is_small_is_not_turned() -> None:
    """As in chunks of Mamba 2: ``8 * c // c`` is no number, but known to be less than a tile's side."""
    count = "-floordiv(7*s, 8) + s"
    chunk = f"floordiv(-8*floordiv(7*s, 8) + 8*s, {count})"
    g = GraphBuilder("chunks")
    x = g.input("x", "float32", (2, count, 64, chunk))
    graph = g.finish(g.add("transpose", g.add("relu", x), permutation=(0, 1, 3, 2)))
    device = get_device(target_of(torch.device("cpu")))
    a, result = torch.randn(2, 3, 64, 8), torch.zeros(2, 3, 8, 64)
    load_entry(*find_or_build([chain_job(graph, device)]), "cpu")(20, a, result)
    assert torch.equal(result, torch.relu(a).mT)


def test_joins_of_joins_are_several_kernels() -> None:
    """A scan by halves: one kernel of all its joins would have a branch for each way through them."""

    def scanned(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return x
        odd = scanned(x[::2] + x[1::2])
        even = torch.cat([x[:1], odd[:-1] + x[2::2]])
        return torch.stack([even, odd], 1).flatten(0, 1)

    compiled, x = ladder.compile(scanned), torch.arange(32.0).reshape(32, 1).repeat(1, 24)
    with torch.no_grad():
        assert torch.equal(compiled(x), x.cumsum(0))
    assert "joins of joins" in compiled.plan()


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_of_joined_and_padded_sums(rows: int) -> None:
    """Of one row each, whose place within each branch of the join is named as outside of it."""

    def joined(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.sum(0)
        padded = torch.nn.functional.pad(total, (0, 0, 1, 2))
        return torch.cat([total, total + 1, total * 2]).sum(0), padded.amax(0)

    x = torch.randn(3, rows, 5)
    torch.testing.assert_close(ladder.compile(joined)(x), joined(x))


@pytest.mark.parametrize("widths", [(64,) * 24, (16, 5, 40), (7, 3, 9), (33, 1)])
def test_reductions_over_joins_go_through_their_pieces(widths: tuple[int, ...]) -> None:
    """No element asks which operand it is of: a norm over 24 parts took 22 times as long as PyTorch's."""
    g = GraphBuilder("joined")
    parts = [g.input(f"x{number}", "float32", (8, width)) for number, width in enumerate(widths)]
    whole = g.add("concat", *parts, axis=1)
    square = g.add("square", whole)
    graph = g.finish(
        g.add("sub", whole, g.add("reduce_max", whole, axis=1, keep=True)),
        g.add("reduce_sum", square, axis=1, keep=False),
    )
    assert "if_then_else" not in emit_chain(graph, host_cpu(), "chain").script()
    given = [torch.randn(8, width) for width in widths]
    joined = torch.cat(given, 1)
    less, total = runner(graph)(*given)
    assert torch.equal(less, joined - joined.amax(1, keepdim=True))
    torch.testing.assert_close(total, joined.square().sum(1), rtol=1e-5, atol=1e-5)


def test_each_of_many_joined_rows_is_behind_few_branches() -> None:
    """Halves of the operands are told apart first: each is emitted a few times, not once for each other."""
    g = GraphBuilder("rows")
    parts = [g.add("exp", g.input(f"x{number}", "float32", (2, 64))) for number in range(16)]
    graph = g.finish(g.add("concat", *parts, axis=0))
    lines = emit_chain(graph, host_cpu(), "chain").script().splitlines()
    depth = max((len(line) - len(line.lstrip())) // 4 for line in lines)
    assert depth < 14
    given = [torch.randn(2, 64) for _ in parts]
    torch.testing.assert_close(runner(graph)(*given)[0], torch.cat(given).exp())


def test_sums_of_a_branch_end_with_it() -> None:
    """Longformer's probabilities: one side of a join knows nothing of what the other has computed."""

    def program(masked: torch.Tensor, *x: torch.Tensor) -> torch.Tensor:
        count = len(masked)
        scores, *ends = (each.view(count, -1, *each.shape[-2:]) for each in x[:3])
        own, *bounds = (each.view(count, -1, 1, 9) for each in x[3:])
        scores = scores.view(count, 4, 16, 9).transpose(1, 2)[:, 4:12]
        wide = torch.cat([ends[0], scores, ends[1]], 1)
        wide = wide + torch.cat([bounds[0], own[:, 4:12], bounds[1]], 1)
        rows = torch.softmax(wide, -1).masked_fill(masked[..., None, None], 0)
        return torch.nn.functional.pad(rows.transpose(1, 2).reshape(4 * count, 4, 4, 9), (0, 5))

    fast = ladder.compile(program)
    for count in (2, 3, 2, 4):
        shapes = (4 * count, 4, 4, 9), *[(count, 4, 4, 9)] * 2, (count, 4, 4, 9), *[(count, 4, 1, 9)] * 2
        given = [torch.rand(count, 16) > 0.5, *map(torch.randn, shapes)]
        torch.testing.assert_close(fast(*given), program(*given))
    assert not fast.refused


def test_rows_of_open_length_are_kept() -> None:
    """One kernel for rows of any length, one or several of a block, by one thread or several."""
    torch.manual_seed(0)  # what cancels has no bound
    g = GraphBuilder("rows")
    x = g.input("x", "float32", ("M", "N"))
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    part = g.add("div", powers, g.add("reduce_sum", powers, axis=1))
    square = g.add("square", part)
    graph = g.finish(part, g.add("sub", square, g.add("reduce_sum", square, axis=1)))
    source = str(emit_chain(graph, get_device(target_of(torch.device("cpu"))), "chain"))
    assert (
        source.count("""alloc_buffer((T.Cast("int64", N),)""") == 4
    )  # two rows, for one thread and for several
    (kernel,) = find_or_build([chain_job(graph, get_device(target_of(torch.device("cpu"))))])
    entry = load_entry(kernel, "cpu")
    for shape in ((1, 1), (3, 7), (2, 20), (2100, 17), (70, 1000), (3, 20_001)):
        x = torch.randn(shape)
        found = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        entry(*shape, x, *found)
        exact = torch.softmax(x.double(), -1)
        torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-9)
        rest = exact.square() - exact.square().sum(-1, keepdim=True)
        torch.testing.assert_close(found[1].double(), rest, rtol=1e-5, atol=1e-9)


def test_a_row_is_kept_of_which_a_function_is_reduced() -> None:
    """Rows whose magnitudes are reduced are computed once, not again for their codes."""
    torch.manual_seed(0)
    im = Importer("chain")
    graph = im.g.finish(*row_codes(im, im.g.add("erf", im.g.input("x", "float32", ("M", "N")))))
    source = str(emit_chain(graph, host_cpu(), "chain"))
    assert source.count("""alloc_buffer((T.Cast("int64", N),)""") == 2  # for one thread and for several
    (kernel,) = find_or_build([chain_job(graph, host_cpu())])
    entry = load_entry(kernel, "cpu")
    for shape in ((1, 1), (3, 200), (2100, 17)):
        x = torch.randn(shape)
        x[-1, -1] = torch.nan
        codes, scale = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0])
        entry(*shape, x, codes, scale)
        wanted, scales = quantize_tokens(torch.erf(x), "int8")
        torch.testing.assert_close(scale, scales, equal_nan=True)
        assert (codes.int() - wanted)[:-1].abs().sum() <= x.numel() // 100  # ties


def test_rows_with_infinity_have_no_scale() -> None:
    im = Importer("chain")
    run = runner(im.g.finish(*row_codes(im, im.g.input("x", "float32", (4, 3)))))
    x = torch.tensor([[1, 2, -4], [0, 0, 0], [1, torch.inf, 2], [torch.nan, 1, 2.0]])
    codes, scale = run(x)
    torch.testing.assert_close(scale, quantize_tokens(x, "int8")[1], equal_nan=True)
    assert codes[:2].tolist() == [[32, 64, -127], [0, 0, 0]]


@pytest.mark.parametrize("kind", [torch.int16, torch.uint16])
def test_short_integers_are_elements_of_chains(kind: torch.dtype) -> None:
    """Sound of 16 bits to numbers and back, arithmetic that wraps around, in kernels of ours alone."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wave = x.to(torch.float32) / 32768
        again = (wave.clamp(0, 1) * 32767).to(kind)
        if kind == torch.uint16:  # torch has no arithmetic of them
            return wave, again, torch.cat((x, again))
        return wave, again, torch.cat((x, again)), x + x * 3, x.abs().amax(1), x & 255, x < 40000, -x >> 3

    x = torch.randint(-(1 << 15), 1 << 15, (5, 37), generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([-(1 << 15), (1 << 15) - 1, 0])
    x = x.to(kind)
    fast = ladder.compile(program)
    for _ in range(2):
        got = fast(x)
    for one, other in zip(got, program(x), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.double(), other.double())
    assert "torch" not in str(fast.plan())
