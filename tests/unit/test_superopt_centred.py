"""Products of rows less their mean: whole tensors of block graphs, and proofs at all extents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ladder.ir import GraphBuilder, evaluate
from ladder.ir.build import bind
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.outline import outlined
from ladder.runtime.fused import Lowering
from ladder.simulate.fused import simulate_fused
from ladder.superopt.generator import Limits, Program, instantiate, search
from ladder.superopt.generator.centred import centred
from ladder.superopt.generator.instantiate import symbolic_program
from ladder.superopt.generator.report import operators_of
from ladder.superopt.generator.structure import GraphStep, Mapping, Prefix, Structure
from ladder.superopt.verifier import verify_for_all_extents
from ladder.superopt.verifier.congruence import whole
from targets import get_device
from tile_types.errors import VerificationError

SIZES = {"M": 32, "K": 256, "N": 64}


def _layer_norm(n, sizes, scaled=False, centre=True):
    g = GraphBuilder("layer_norm_matmul")
    x, w = g.input("X", "float16", (n["M"], n["K"])), g.input("W", "float16", (n["K"], n["N"]))
    scale = g.input("S", "float16", (1, n["K"])) if scaled else None
    part = g.add("constant", value=1.0 / sizes["K"], type="float16")
    mean = g.add("mul", g.add("reduce_sum", x, axis=1), part)
    d = g.add("sub", x, mean) if centre else x
    square = g.add("mul", g.add("reduce_sum", g.add("square", d), axis=1), part)
    root = g.add("sqrt", g.add("add", square, g.add("constant", value=1e-5, type="float16")))
    y = g.add("div", d, root)
    return g.finish(g.add("matmul", g.add("mul", y, scale) if scale else y, w))


PROGRAM = Program("layer_norm_matmul", _layer_norm, SIZES)


def _step(operator, *operands, **attributes):
    newest = tuple(sorted(operands, reverse=True))
    return GraphStep(newest, operator, operands, tuple(sorted(attributes.items())))


OF_DIFFERENCE = Structure(
    Prefix((), (0, 1)),
    Mapping(("M", "N"), ("K",), ((0, -1), (-1, 1)), ((1,), (0,))),
    (
        _step("square", 0), _step("matmul", 0, 1), _step("reduce_sum", 2, axis=1),
        _step("accumulate", 3, kind="sum"), _step("accumulate", 4, kind="sum"),
        _step("scale", 6, value=1 / 256), _step("offset", 7, value=1e-5), _step("sqrt", 8),
        _step("div", 5, 9),
    ),
)  # fmt: skip
"""A block graph of the difference of rows from their mean."""


def _completed() -> Structure:
    found = centred(PROGRAM)
    assert found is not None
    return found.completed(OF_DIFFERENCE)


def _proved(structure: Structure, program: Program = PROGRAM) -> bool:
    graph = instantiate(structure, program)
    return verify_for_all_extents(symbolic_program(structure.mapping, program), graph)[0].equal


def test_the_program_of_the_difference_takes_it_for_the_input():
    found = centred(PROGRAM)
    assert found is not None
    graph = found.program.graph()
    assert [node.operator for node in graph.nodes].count("reduce_sum") == 1
    x, w = np.random.default_rng(0).normal(size=(32, 256)), np.random.default_rng(1).normal(size=(256, 64))
    difference = evaluate(graph, [x - x.mean(1, keepdims=True), w])
    own = evaluate(PROGRAM.graph(), [x, w])
    np.testing.assert_allclose(difference, own, rtol=1e-9)


def test_programs_that_use_the_input_otherwise_too_have_no_difference():
    def twice(n, sizes):
        g = GraphBuilder("twice")
        x, w = g.input("X", "float16", (n["M"], n["K"])), g.input("W", "float16", (n["K"], n["N"]))
        mean = g.add("mul", g.add("reduce_sum", x, axis=1), g.add("constant", value=0.5, type="float16"))
        return g.finish(g.add("matmul", g.add("add", g.add("sub", x, mean), x), w))

    assert centred(Program("twice", twice, SIZES)) is None
    assert centred(Program("rms", lambda n, s: _layer_norm(n, s, centre=False), SIZES)) is None


def test_a_scaled_norm_of_many_operators_is_found():
    """Its chains are single steps, and no longer than that: the program of the difference has none."""
    sizes = {"M": 8, "K": 16, "N": 16}
    program = Program("scaled", lambda n, s: _layer_norm(n, s, scaled=True), sizes)
    limits = Limits(operators_of(program), grid=1, loops=0, split=False, proofs=2, workers=1)
    report = search(program, limits)
    assert [found.certificate.equal for found in report.found] == [True]
    assert (
        "overflowing product of X S" in report.unstable[0].stability.reason
    )  # the scale is multiplied in first


def test_the_mean_is_computed_apart_in_float32_and_all_is_proved():
    structure = _completed()
    graph = instantiate(structure, PROGRAM)
    block = next(node for node in graph.nodes if node.body is not None)
    assert graph.tile(block.inputs[2]).ttype.name == "float32"
    assert _proved(structure)


NEAR = {
    "without eps": lambda steps: (*steps[:8], _step("scale", 9, value=1.0), *steps[9:]),
    "other eps": lambda steps: tuple(
        replace(s, attributes=(("value", 1e-6),)) if s.operator == "offset" else s for s in steps
    ),
    "half the variance": lambda steps: tuple(
        replace(s, attributes=(("value", 1 / 512),)) if s.operator == "scale" else s for s in steps
    ),
    "squares of the input": lambda steps: (steps[0], _step("square", 0), *steps[2:]),
    "product of the input": lambda steps: (*steps[:2], _step("matmul", 0, 1), *steps[3:]),
    "squares of the mean": lambda steps: (steps[0], _step("square", 2), *steps[2:]),
}


@pytest.mark.parametrize("change", NEAR)
def test_near_misses_are_not_proved(change):
    structure = _completed()
    assert not _proved(replace(structure, steps=NEAR[change](structure.steps)))


@pytest.mark.parametrize("structure", [OF_DIFFERENCE, _completed()], ids=["difference", "input"])
def test_whole_tensors_have_the_values_of_block_graphs(structure):
    graph = instantiate(structure, PROGRAM)
    factors = {"Mg": 2, "Mt": 3, "Ng": 3, "Nt": 2, "Kl": 4, "Kt": 5}
    tensors = whole(graph)
    assert all(node.body is None for node in tensors.nodes)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(6, 20)), random.normal(size=(20, 6))]
    tiled, plain = evaluate(bind(graph, factors), inputs), evaluate(bind(tensors, factors), inputs)
    np.testing.assert_allclose(plain, tiled, rtol=1e-9)


def _block(body, *, out=("g*a", "b"), grid=(0,)):
    """Return a kernel graph of one block graph of x[g*a, l*b]."""
    g = GraphBuilder("kernel")
    x = g.input("x", "float32", ("g*a", "b*l"))
    b = GraphBuilder("block", "block", grid={"g": "g"}, loops={"l": "l"})
    tile = b.add("load", b.input("x", "float32", ("g*a", "b*l")), grid=(0,), loop=(1,), shape=("a", "b"))
    return g.finish(*g.nest(b.finish(b.add("store", body(b, tile), grid=grid, shape=out)), x))


REFUSED = {
    "a sum of tiles": lambda b, x: b.add("accumulate", x),
    "a maximum": lambda b, x: b.add("accumulate", b.add("reduce_max", x, axis=1), kind="max"),
    "a function of a part": lambda b, x: b.add("accumulate", b.add("exp", b.add("reduce_sum", x, axis=1))),
    "the last step": lambda b, x: b.add("accumulate", b.add("reduce_sum", x, axis=1), kind="last"),
    "the last tile": lambda b, x: b.add("accumulate", x, kind="last"),
    "a sum over blocks": lambda b, x: b.add(
        "accumulate", b.add("reduce_sum", b.add("reduce_sum", x, axis=0), axis=1)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_whole_tensor_stands_for_is_refused(name):
    columns = 1 if "sum of tiles" not in name and "last tile" not in name else "b"
    rows = "g" if "blocks" in name else "g*a"
    with pytest.raises(VerificationError):
        whole(_block(REFUSED[name], out=(rows, columns)))


def test_a_sum_over_the_loop_is_one_of_the_tensor():
    graph = whole(_block(lambda b, x: b.add("accumulate", b.add("reduce_sum", x, axis=1)), out=("g*a", 1)))
    assert [node.operator for node in graph.nodes] == ["input", "reduce_sum"]


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_blocks_take_the_mean_as_a_column(target):
    """On the simulator: the kernel of the mean, then that of products, whose threads load it."""
    factors = {"Mg": 1, "Mt": 32, "Ng": 1, "Nt": 64, "Kl": 4, "Kt": 64}
    lowering = Lowering(outlined(instantiate(_completed(), PROGRAM, factors)), (BlockSchedule(),) * 2)
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=random).half() for shape in ((32, 256), (256, 64)))
    result = simulate_fused(lowering, get_device(target), [x + 3, w])
    exact = torch.nn.functional.layer_norm((x + 3).double(), (256,)) @ w.double()
    assert not result.findings, result.report()
    assert result.relative_error(exact.numpy()) <= 1e-3
