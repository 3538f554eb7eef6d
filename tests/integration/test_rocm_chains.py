"""Memory-bound chains become AMD code objects: wide accesses, lanes by DPP, bfloat16 by its bits."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from ladder.ir import Graph, GraphBuilder
from ladder.lower.build import build_function
from ladder.lower.chain import emit_chain
from ladder.movement.mapping import Mapping
from targets import get_device
from tile_types.errors import ScheduleError

SHAPE = (64, 24, 96)


def softmax(ttype: str, transposed: bool) -> Graph:
    """Return a softmax over the last axis, or over the one before it, made the last."""
    g = GraphBuilder("chain")
    x = g.input("x", ttype, SHAPE)
    if transposed:
        x = g.add("transpose", x, permutation=(1, 2, 0))
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=2)))
    return g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=2)))


@pytest.mark.parametrize(
    ("arch", "ttype", "transposed"),
    [("gfx942", "bfloat16", False), ("gfx90a", "bfloat16", True), ("gfx1100", "float16", True)],
)
def test_chains_compile(arch: str, ttype: str, transposed: bool, tmp_path: Path) -> None:
    graph, device = softmax(ttype, transposed), get_device(f"rocm/{arch}")
    mapping = Mapping(16, 1, 16, (32, 64)) if transposed else None
    built = build_function(lambda name: emit_chain(graph, device, name, mapping), "chain", device, tmp_path)
    assembly, report = built.sources["asm"], built.resources["chain"]
    assert not report["vgpr_spills"] + report["sgpr_spills"] + report["scratch_bytes"]
    assert bool(report["lds_bytes"]) == transposed
    loads = re.findall(r"^\s+global_load_(\w+)", assembly, re.MULTILINE)
    assert set(loads) <= {"dwordx4", "b128"}
    assert re.search(r"quad_perm:|row_half_mirror", assembly)
    assert re.search(r"^\s+v_exp_f32", assembly, re.MULTILINE)
    # TVM's ROCm target would take the bits of a bfloat16 for a whole number.
    assert not re.search(r"v_cvt_f32_u32", assembly)


def test_blocks_of_too_many_threads_are_refused() -> None:
    emit = partial(emit_chain, softmax("float16", False), get_device("rocm/gfx942"), "chain")
    with pytest.raises(ScheduleError, match="at most 256 threads"):
        emit(Mapping(512, 1))
