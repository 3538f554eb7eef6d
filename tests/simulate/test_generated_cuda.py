"""CUDA kernels as their code generator gets them, one or two of every family: simulated, and their assembly.

The simulator finds shuffles and barriers that part of a warp reaches, and accesses that no barrier orders.
What it takes for one instruction is an ``asm`` statement of the text, which the compiler must not move.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import block_graphs
import cuda_text
import pytest
import test_attention as attention
import test_expert_kernels as experts
import test_pipelines as products
import test_quantize as quantizers
import test_random_chains as chains
import test_tcgen05 as tensor_memory
from problems import require_right

from ladder.ir import GraphBuilder
from ladder.lower.blocks import BlockSchedule
from ladder.lower.chain import emit_chain
from ladder.lower.passes import as_generated
from ladder.simulate import launch, simulate_launch
from targets import get_device

pytestmark = pytest.mark.skipif(bool(cuda_text.missing_tools()), reason=cuda_text.missing_tools())

CALCULATES = re.compile(
    r"(\{\.reg \.b16 (l, )?h; )?(lop3|prmt|fma|mul|div|add|sub|max|min|cvt|dp4a|mov|mapa|ex2|rcp|shf)\."
)
"""Instructions of registers of one thread: the compiler may merge and move them."""

IN_ORDER = re.compile(
    r"commit_group|wgmma\.mma_async|tcgen05\.(mma|ld|st)\.|(mma|movmatrix|elect|redux)\.sync|wait_group|setmaxnreg"
)
"""Instructions that touch no memory that C++ sees; they stay in order with others that are volatile."""


def _block_graph() -> None:
    result, error = block_graphs.run(block_graphs.gated_mlp(8, 256, 64, 32, 32), BlockSchedule(2, 1, 3, 2))
    assert not result.findings, result.report()
    assert error <= 1e-3


def _tiles_of_wgmma() -> None:
    problem, _, m = products.WGMMA[next(iter(products.WGMMA))]
    require_right(products._wgmma(next(iter(products.WGMMA))), problem, m)


FAMILIES: dict[str, Callable[[], None]] = {
    "gemv or digits": lambda: products.test_chosen_schedules("int4", 1),
    "gemv of ampere": lambda: products.test_chosen_schedules_of_ampere("uint3 real zeros", 1),
    "mma": lambda: products.test_chosen_schedules_of_ampere("int4", 64),
    "wgmma": lambda: products.test_chosen_schedules("int4", 64),
    "wgmma, several tiles": _tiles_of_wgmma,
    "tcgen05": lambda: tensor_memory.test_kernels("codebook from shared memory"),
    "experts": lambda: experts.test_experts(next(iter(experts.CASES))),
    "attention": lambda: attention.test_simulated("cluster"),
    "attention of int8": lambda: attention.test_simulated("int8, bfloat16, mask"),
    "quantizer": lambda: quantizers.test_codes_and_scales("odd K", "cuda/sm_90a"),
    "quantizer of groups": lambda: quantizers.test_codes_and_scales("groups of 128", "cuda/sm_90a"),
    "rows": lambda: chains.check(3, "cuda/sm_90a"),
    "chain": lambda: chains.check(8, "cuda/sm_90a"),
    "block graph": _block_graph,
}
"""Family -> a test of it that simulates."""


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let simulations execute what passes leave, and return the functions that they were given."""
    found: list[Any] = []

    def spied(function: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        found.append(function)
        return as_generated(function, target)

    monkeypatch.setitem(simulate_launch.__kwdefaults__, "stage", "passed")
    monkeypatch.setattr(launch, "as_generated", spied)
    return found


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, emitted: list[Any]) -> None:
    FAMILIES[family]()
    assert emitted
    for function in emitted[:1]:
        source = cuda_text.source_of(function, get_device("cuda/sm_90a"))
        assert not list(movable(source))


def movable(source: str) -> list[str]:
    """Return the ``asm`` statements that a compiler could move over a barrier or out of order."""
    found = []
    for qualifier, body in re.findall(r"\basm\s*(volatile|__volatile__)?\s*\((.*?)\);", source, re.DOTALL):
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', body.split(":")[0] if qualifier == "" else body))
        if not text or CALCULATES.match(text.lstrip()):
            continue
        if not qualifier or not ('"memory"' in body or IN_ORDER.search(text)):
            found.append(body)
    return found


@pytest.mark.parametrize(
    ("statement", "moves"),
    [
        ('asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a));', False),
        ('asm volatile("bar.sync %0, %1;" : : "r"(a), "r"(b) : "memory");', False),
        ('asm volatile("bar.sync %0, %1;" : : "r"(a), "r"(b));', True),
        ('asm("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(a) : "memory");', True),
    ],
)
def test_assembly_that_may_move_is_found(statement: str, moves: bool) -> None:
    assert bool(movable(statement)) == moves


def test_no_address_of_a_known_number() -> None:
    """C++ takes none of a literal, and passes fold whatever they know, as the only index of an axis."""
    device, g = get_device("cuda/sm_90a"), GraphBuilder("chain")
    x, one = g.input("x", "float32", (1,)), g.add("iota", extent=1, begin=1, axis=0, rank=1, type="int64")
    graph = g.finish(g.add("div", x, g.add("convert", one, type="float32")))
    text = cuda_text.source_of(emit_chain(graph, device, "kernel"), device)
    assert not re.search(r"&\(\(?-?[\d(]", text)
