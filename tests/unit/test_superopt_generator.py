"""The search: what it finds, by inspecting the graphs; pruning, determinism, budgets, checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from typing import ClassVar

import numpy as np
import pytest
from superopt_programs import block_near_misses

from ladder.ir import Graph, GraphBuilder, evaluate, verify
from ladder.ir.interpret import abstract_expressions
from ladder.superopt.expressions import normal
from ladder.superopt.generator import PROGRAMS, Limits, Program, Report, get_program, instantiate, search
from ladder.superopt.generator.choose import choose_factors
from ladder.superopt.generator.emitter import Emitter
from ladder.superopt.generator.instantiate import axes_of, symbolic_program
from ladder.superopt.generator.reach import distances
from ladder.superopt.generator.report import operators_of
from ladder.superopt.generator.search import tasks_of
from ladder.superopt.generator.space import LEAST_TILE, chained, tile_of
from ladder.superopt.generator.structure import GraphStep
from ladder.superopt.show import page
from ladder.superopt.verifier import check_stability, verify_equal
from tile_types.errors import ParseError, ScheduleError, ShapeError, UnknownNameError

ONE = Limits(workers=1)


class Reports(dict[str, Report]):
    """Searches each program when it is first asked for."""

    LIMITS: ClassVar = {
        "rmsnorm_matmul": Limits(split=False), "gated_mlp": Limits(6), "lora": Limits(6),
        "gqa": Limits(proofs=3), "ntrans": Limits(7), "qknorm_attention": Limits(11, proofs=1),
    }  # fmt: skip
    DECODE: ClassVar = {"M": 16, "E": 16}

    def __missing__(self, name: str) -> Report:
        program = get_program(name)
        small = program.resized(**self.DECODE) if "M" in program.sizes else program
        self[name] = search(small, self.LIMITS[name], seed=1)
        return self[name]


@pytest.fixture(scope="module")
def reports() -> Reports:
    return Reports()


def block_of(graph: Graph) -> Graph:
    (body,) = (node.body for node in graph.nodes if node.body is not None)
    return body


def path(body: Graph, value: str) -> list[str]:
    """Return the operators from a value down its first operands, conversions left out."""
    node = body.producer(value)
    rest = path(body, node.inputs[0]) if node.inputs else []
    return rest if node.operator == "convert" else [node.operator, *rest]


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_found_is_valid_and_proved(reports, name):
    report = reports[name]
    assert report.complete
    assert report.found
    assert report.counts.verified == len(report.found) + len(report.unstable)
    assert report.dearer == 0 or report.counts.verified == report.limits.proofs
    for found in report.found:
        verify(found.graph)  # includes the rule of paths
        assert found.certificate.equal
        assert 0 < found.certificate.delta <= 2**-64
        assert found.stability.stable
        assert [node.tile.shape for node in found.graph.inputs] == [
            node.tile.shape for node in report.program.graph().inputs
        ]


def test_rmsnorm_divides_after_the_matmul(reports):
    """Load, one loop over K with two accumulators, then one division: no second pass over X."""
    bodies = [block_of(found.graph) for found in reports["rmsnorm_matmul"].found]
    moved = [body for body in bodies if path(body, body.outputs[0])[:3] == ["store", "div", "accumulate"]]
    assert moved
    body = moved[0]
    assert [axis.name for axis in body.loops] == ["Kl"]
    assert path(body, body.outputs[0]) == ["store", "div", "accumulate", "matmul", "load", "input"]
    assert sum(node.operator == "accumulate" for node in body.nodes) == 2


def blocks_of(graph: Graph) -> list[Graph]:
    return [node.body for node in graph.nodes if node.body is not None]


def operators(body: Graph) -> list[str]:
    hidden = ("input", "constant", "convert")
    return [node.operator for node in body.nodes if node.operator not in hidden]


def kinds(body: Graph) -> list[str]:
    return [dict(n.attributes).get("kind", "sum") for n in body.nodes if n.operator == "accumulate"]


def is_online_softmax(body: Graph) -> bool:
    """Whether sums over the steps are rescaled by one running maximum: of scores under the exponential."""
    rescaled = [n for n in body.nodes if n.operator == "accumulate" and len(n.inputs) == 2]
    (top,) = {node.inputs[1] for node in rescaled}
    scores = body.producer(top)
    (exponential,) = (node for node in body.nodes if node.operator == "exp")
    shifted = body.producer(exponential.inputs[0])
    return scores.operator == "reduce_max" and shifted.inputs == (scores.inputs[0], top)


def test_gqa_is_flash_attention():
    """One kernel: the keys are a loop, no score leaves the block, sums are rescaled by a running maximum."""
    report = search(get_program("gqa").resized(**Reports.DECODE), Limits(split=False, proofs=2), seed=1)
    found = next(f for f in report.found if f.structure.mapping.loops == ("S",))
    (body,) = blocks_of(found.graph)
    assert [axis.name for axis in body.grid] == ["Hg"]
    assert [axis.name for axis in body.loops] == ["Sl"]
    assert kinds(body) == ["rescale", "rescale"]
    assert is_online_softmax(body)
    assert path(body, body.outputs[0]) == [
        "store",
        "div",
        "accumulate",
        "matmul",
        "exp",
        "sub",
        "matmul",
        "load",
        "input",
    ]
    assert found.certificate.equal


def test_gqa_is_flash_decoding(reports):
    """Blocks share the keys; each leaves sums and its maximum, a second kernel rescales and divides."""
    found = next(f for f in reports["gqa"].found if f.structure.mapping.loops == ("S",))
    first, second = blocks_of(found.graph)
    assert [axis.name for axis in first.grid] == ["Hg", "Sg"]
    assert len(first.outputs) == 3
    assert kinds(first) == ["rescale", "rescale", "max"]
    assert is_online_softmax(first)
    assert "div" not in operators(first)
    assert [axis.name for axis in second.loops] == ["Sg"]
    assert kinds(second) == ["rescale", "rescale"]
    assert operators(second)[-2:] == ["div", "store"]
    assert found is not reports["gqa"].found[0] or found.structure.mapping.split == "S"


def test_pages_draw_both_block_graphs(reports):
    text = page(reports["gqa"], limit=1)
    for part in ("gqa_block", "gqa_combine", "grid Hg=2, Sg=", "kind=rescale", "states explored"):
        assert part in text


def test_attention_without_its_maximum_overflows(reports):
    """The same steps without the running maximum: equal, and rejected by the floating-point test."""
    found = reports["gqa"].found[0]
    plain = replace(found.structure, shifted=False)
    program = reports["gqa"].program.resized(H=1, M=2, D=2, S=8, E=2)
    factors = dict.fromkeys((name for d in program.sizes for name in plain.mapping.factors(d)), 2)
    factors |= {"Hg": 1, "St": 8 // math.prod(factors[name] for name in plain.mapping.factors("S")[:-1])}
    shifted, bare = (instantiate(s, program, factors) for s in (found.structure, plain))
    assert verify_equal(program.graph(), bare).equal
    assert check_stability(shifted, program.graph()).stable
    assert not check_stability(bare, program.graph()).stable


def test_qknorm_attention_is_one_pass(reports):
    """Both norms, the products and softmax in one block graph; the norms divide scores, or operands."""
    for found in reports["qknorm_attention"].found:
        first = blocks_of(found.graph)[0]
        assert operators(first).count("sqrt") == 2
        assert operators(first).count("matmul") >= 2
        assert operators(first).count("exp") == 1
        assert not first.loops or is_online_softmax(first)
        assert all(n.operator in ("input", "block") for n in found.graph.nodes)
        assert found.certificate.bound.functions > 0


def test_ntrans_is_one_kernel(reports):
    (found,) = reports["ntrans"].found
    (body,) = blocks_of(found.graph)
    assert operators(body).count("sqrt") == 2
    assert not body.loops
    assert [node.tile.shape[0] for node in body.nodes if node.operator == "load"] == [1, 1, 1]


def test_split_sums_are_combined_by_a_second_kernel():
    """RMSNorm and matmul with K shared by blocks: two partial results."""
    limits = Limits(8, proofs=4, workers=1)
    report = search(get_program("rmsnorm_matmul"), limits, seed=1)
    split = [found for found in report.found if found.structure.mapping.split]
    assert split
    program = get_program("rmsnorm_matmul").resized(B=16, K=1024, N=32)
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(node.tile.known_shape) for node in program.graph().inputs]
    expected = evaluate(program.graph(), inputs)
    for found in split[:2]:
        structure = found.structure.with_constants({1 / 4096: 1 / 1024})
        factors, _ = choose_factors(structure, program, 132, 1 << 20)
        assert np.allclose(evaluate(instantiate(structure, program, factors), inputs), expected, rtol=1e-9)


def test_gated_mlp_has_both_products_in_one_block(reports):
    body = block_of(reports["gated_mlp"].found[0].graph)
    products = [node for node in body.nodes if node.operator == "matmul"]
    assert len(products) == 2
    assert products[0].inputs[0] == products[1].inputs[0]  # X is loaded once
    assert len(body.loops) == 1


def test_lora_concatenates(reports):
    """(X ‖ X·A) · (W ‖ B): one product of concatenations after X·A."""
    bodies = [block_of(found.graph) for found in reports["lora"].found]
    concatenated = [body for body in bodies if any(node.operator == "concat" for node in body.nodes)]
    assert concatenated
    body = concatenated[0]
    left, right = (node for node in body.nodes if node.operator == "concat")
    assert [body.producer(value).operator for value in left.inputs] == ["load", "convert"]
    assert path(body, left.inputs[1]) == ["matmul", "load", "input"]
    assert [body.producer(value).name for value in right.inputs] == ["w", "b"]
    (last,) = (node for node in body.nodes if node.operator == "matmul" and node.inputs[0] == left.name)
    assert last.inputs == (left.name, right.name)


def test_weights_that_lora_merges_are_proved_equal_but_unstable(reports):
    """X · (W + A·B) rounds weights; where X · W cancels, X · W + (X · A) · B does not see that."""
    unstable = reports["lora"].unstable
    assert ["matmul", "add", "matmul"] in [[s.operator for s in found.structure.steps] for found in unstable]
    assert all("cancel" in found.stability.reason for found in unstable)


def test_while_nothing_is_stable_more_is_proved():
    """Where K is looped over, the cheapest graphs round parts of X·A."""
    limits = replace(ONE, operators=4, proofs=1, capacity=32 << 10, split=False)
    report = search(get_program("lora").resized(K=1024), limits, seed=1)
    assert not report.found
    assert len(report.unstable) > limits.proofs
    assert not report.dearer


@pytest.mark.parametrize("name", ["rmsnorm_matmul", "lora"])
def test_found_graphs_compute_the_program(reports, name):
    """At sizes with several blocks and steps, in float64."""
    program = get_program(name).resized(B=32, K=64, N=48)
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(node.tile.known_shape) for node in program.graph().inputs]
    expected = evaluate(program.graph(), inputs)
    for found in reports[name].found[:4]:
        structure = found.structure.with_constants({1 / 4096: 1 / 64})
        factors, _ = choose_factors(structure, program, 132, 1 << 20)
        assert np.allclose(evaluate(instantiate(structure, program, factors), inputs), expected, rtol=1e-9)


def test_expressions_of_found_graphs_are_the_programs(reports):
    for report in (reports["lora"], reports["gated_mlp"]):
        for found in report.found:
            left = abstract_expressions(symbolic_program(found.structure.mapping, report.program))
            right = abstract_expressions(instantiate(found.structure, report.program))
            if not any(step.operator == "concat_matmul" for step in found.structure.steps):
                assert [normal(e) for e in left] == [normal(e) for e in right]


def test_steps_are_in_canonical_order_and_graphs_distinct(reports):
    for report in (reports["lora"], reports["gated_mlp"]):
        structures = [found.structure for found in report.found]
        assert len(set(structures)) == len(structures)
        for structure in structures:
            assert list(structure.steps) == sorted(structure.steps)


def test_pruning_saves_twenty_times_the_states():
    """At fewer operators here; superopt_ablation_cpu_2026-11-23.json has what was measured at 8."""
    program, limits = get_program("gated_mlp"), replace(ONE, operators=6)
    pruned = search(program, limits)
    assert pruned.found
    budget = 20 * pruned.counts.states
    assert not search(program, replace(limits, pruning=False, compare=False, states=budget)).complete


def test_without_pruning_the_same_graphs_are_found():
    """A space small enough to search in full: the pruner drops nothing that leads to an equal graph."""
    limits = replace(ONE, operators=3)
    pruned = search(get_program("lora"), limits, seed=1)
    full = search(get_program("lora"), replace(limits, pruning=False), seed=1)
    assert full.complete
    assert {f.structure for f in pruned.found} == {f.structure for f in full.found}
    assert full.counts.states > pruned.counts.states


def test_two_processes_find_the_same_in_the_same_order():
    limits = replace(ONE, operators=5)
    one = search(get_program("lora"), limits, seed=1)
    two = search(get_program("lora"), replace(limits, workers=2), seed=1)
    assert [f.structure for f in one.found] == [f.structure for f in two.found]
    assert one.counts == two.counts


def test_a_search_goes_on_from_its_checkpoint(tmp_path):
    path_ = tmp_path / "search.json"
    program, limits = get_program("lora"), replace(ONE, operators=4)
    whole = search(program, limits, checkpoint=path_, seed=1)
    stored = json.loads(path_.read_text())
    assert len(stored["done"]) == len(list(tasks_of(program, limits)))
    kept = dict(list(stored["done"].items())[:10])
    path_.write_text(json.dumps({**stored, "done": kept}))
    progress = []
    again = search(program, limits, checkpoint=path_, seed=1, step=lambda text, done: progress.append(text))
    assert sum("parts" in text for text in progress) == len(stored["done"]) - 10
    assert again.counts == whole.counts
    assert [f.structure for f in again.found] == [f.structure for f in whole.found]
    assert search(program, replace(limits, operators=2), checkpoint=path_).complete
    for text in ("notes of mine", '{"broken', '["another"]', '{"done": {}}'):
        path_.write_text(text)
        with pytest.raises(ParseError, match="no checkpoint of a search"):
            search(program, limits, checkpoint=path_)
        assert path_.read_text() == text


def test_budgets():
    program = get_program("rmsnorm_matmul")
    late = search(program, replace(ONE, seconds=0.0))
    assert not late.complete
    assert late.counts.states == 0
    few = search(program, replace(ONE, states=100))
    assert not few.complete
    assert few.counts.states <= 100 + len(list(tasks_of(program, ONE)))
    shared = search(program, replace(ONE, states=100, workers=2))
    assert not shared.complete
    assert shared.counts.states >= 100


def test_closures_end_with_the_time():
    """Of many inputs a closure takes longer than all of a search may."""
    looks = iter([False, True])

    def steps(values, top):
        yield GraphStep((top,), "square", (top,))

    assert (
        distances(
            [0], steps, lambda step, operands: operands[0] + 1, lambda value: value == 3, lambda: next(looks)
        )
        is None
    )


def test_memory_limits_the_space():
    """LoRA without a loop needs a whole column block of W: it does not fit 24 KiB."""
    program, limits = get_program("lora"), replace(ONE, operators=4, capacity=24 * 1024)
    assert all(found.structure.mapping.loops for found in search(program, limits).found)


def test_devices_set_the_limits():
    program = get_program("gqa")
    ampere, hopper, cpu = (Limits.of(program, name) for name in ("cuda/sm_80", "cuda/sm_90a", "cpu"))
    assert ampere.units == 108
    assert ampere.capacity < hopper.capacity == Limits().capacity
    assert hopper == cpu == Limits()
    assert Limits.of(program, "cpu", operators=5, seconds=None).operators == 5


def test_longer_programs_may_have_more_operators():
    """Chains of more than ten operators count once; two accumulators are added, and decodings."""
    found = {name: operators_of(program) for name, program in PROGRAMS.items()}
    assert found == {
        "rmsnorm_matmul": 8, "gated_mlp": 8, "lora": 8, "gqa": 8, "qknorm_attention": 11, "ntrans": 9,
    }  # fmt: skip
    assert operators_of(get_program("gated_mlp").with_weights("int4_g128")) == 10


def test_sizes_that_no_tile_divides_are_a_reason():
    report = search(get_program("lora").resized(N=4099), replace(ONE, operators=3))
    assert not report.found
    assert any("divide" in reason for reason in report.counts.reasons)
    assert report.counts.verified == 0


def test_mappings_split_outputs_by_blocks_and_sums_by_steps():
    program = get_program("rmsnorm_matmul").resized(B=64)
    inputs, output = axes_of(program)
    assert (inputs, output) == ((("B", "K"), ("K", "N")), ("B", "N"))
    found = [task.mapping for task in tasks_of(program, ONE)]
    whole = {mapping.grid for mapping in found if not mapping.split}
    assert whole == {(), ("B",), ("N",), ("B", "N")}
    assert {mapping.loops for mapping in found} == {(), ("K",)}
    assert {mapping.fmap for mapping in found if mapping.loops} == {
        ((1,), (0,)), ((1,), (-1,)), ((-1,), (0,)),
    }  # fmt: skip
    assert {mapping.split for mapping in found} == {None, "K"}
    assert all(mapping.grid[-1] == "K" for mapping in found if mapping.split)
    narrow = program.resized(B=LEAST_TILE)
    assert {task.mapping.grid for task in tasks_of(narrow, ONE) if not task.mapping.split} == {(), ("N",)}


def test_chains_that_sum_rows_take_no_vectors():
    """A long program with a vector as scale has values of one axis, too."""
    links = (("square", ()), ("reduce_sum", (("axis", 1),)), ("sqrt", ()))
    assert chained(links, tile_of((16, 64)), "x")[0] == (16, 1)
    with pytest.raises(ShapeError):
        chained(links, tile_of((64,)), "x")


def test_kernels_before_the_block():
    """X · A as a kernel of its own, then one product of concatenations."""
    report = search(get_program("lora"), replace(ONE, operators=3, kernels=2), seed=1)
    assert report.complete
    split = [found for found in report.found if found.structure.prefix.steps]
    assert split
    for found in report.found:
        verify(found.graph)
        assert found.certificate.equal
    first, then = split[0].structure.prefix.steps, split[0].structure.steps
    assert [step.operator for step in first] == ["matmul"]
    assert then[0].operator == "concat_matmul"
    assert [node.operator for node in split[0].graph.nodes if node.operator != "input"][-1] == "block"
    assert report.found[0].structure.prefix.steps == ()  # a launch costs more than it saves here


def grouped(n, sizes) -> Graph:
    """X · W of int4 codes and a scale per group of I rows: axes of W and X by group."""
    g = GraphBuilder("grouped")
    x = g.input("X", "float16", (n["G"], n["B"], n["I"]))
    codes, scale = (
        g.input("C", "int4", (n["G"], n["I"], n["N"])),
        g.input("S", "float16", (n["G"], 1, n["N"])),
    )
    decoded = g.add("mul", g.add("convert", codes, type="float16"), scale)
    return g.finish(g.add("reduce_sum", g.add("matmul", x, decoded), axis=0))


def test_scales_move_across_the_product():
    """Codes are multiplied as they are, and a group's sum scaled: less work, and exact products."""
    program = Program("grouped", grouped, {"G": 32, "B": 16, "I": 128, "N": 1024})
    report = search(program, replace(ONE, operators=4, split=False), seed=1)
    assert report.complete
    found = [f for f in report.found if [s.operator for s in f.structure.steps[:2]] == ["matmul", "mul"]]
    assert any(f.structure.mapping.loops == ("G",) for f in found)
    assert any(s.operator == "mul" for f in report.found for s in f.structure.steps[:1])  # the plain way, too
    body = block_of(found[0].graph)
    (product,) = (node for node in body.nodes if node.operator == "matmul")
    assert path(body, product.inputs[1]) == ["load", "input"]  # but for the conversion of int4
    assert body.producer(body.producer(product.inputs[1]).inputs[0]).tile.ttype.name == "int4"


def test_loops_of_two_dimensions():
    """Groups and rows of a group in one loop: two accumulated sums are one."""
    program = Program("grouped", grouped, {"G": 32, "B": 16, "I": 128, "N": 1024})
    limits = replace(ONE, operators=5, split=False, proofs=6, loops=2)
    report = search(program, limits, seed=1)
    found = [f for f in report.found if f.structure.mapping.loops == ("G", "I")]
    assert found
    body = block_of(found[0].graph)
    assert [axis.name for axis in body.loops] == ["Gl", "Il"]
    verify(found[0].graph)
    small = program.resized(G=4, B=4, I=6, N=4)
    factors = {"Gl": 2, "Gt": 2, "Bt": 4, "Il": 3, "It": 2, "Ng": 2, "Nt": 2}
    known = {name: factors[name] for d in small.sizes for name in found[0].structure.mapping.factors(d)}
    inputs = [
        np.random.default_rng(0).integers(-8, 8, n.tile.known_shape) * 0.5 for n in small.graph().inputs
    ]
    wanted = evaluate(small.graph(), inputs)
    assert np.allclose(evaluate(instantiate(found[0].structure, small, known), inputs), wanted)


def test_tampered_structures_are_rejected(reports):
    """Each step of a found graph changed: the proof notices."""
    report = reports["gated_mlp"]
    structure = report.found[0].structure
    factors = {name: 2 for d in report.program.sizes for name in structure.mapping.factors(d)}
    program = report.program.graph({d: 2 * len(structure.mapping.factors(d)) for d in report.program.sizes})
    other = {"silu": "square", "mul": "add"}
    for number, step in enumerate(structure.steps):
        if step.operator not in other:
            continue
        steps = list(structure.steps)
        steps[number] = replace(step, operator=other[step.operator])
        changed = instantiate(replace(structure, steps=tuple(steps)), report.program, factors)
        assert verify_equal(program, changed).verdict == "different"


def outside(body) -> Program:
    def define(n, sizes):
        g = GraphBuilder("outside")
        x, y = g.input("x", "float16", (n["M"], n["K"])), g.input("y", "float16", (n["M"], n["K"]))
        return g.finish(*body(g, x, y))

    return Program("outside", define, {"M": 32, "K": 32})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda g, x, y: [g.add("add", x, y), g.add("mul", x, y)], "one result"),
        (lambda g, x, y: [g.add("mul", x, g.add("reduce_max", x, axis=1))], "only to be subtracted"),
        (lambda g, x, y: [g.add("transpose", x, permutation=(1, 0))], "no transpose yet"),
        (lambda g, x, y: [g.add("div", g.add("constant", value=2.0, type="float16"), x)], "not in div"),
        (lambda g, x, y: [g.add("convert", g.add("add", x, y), type="float32")], "one element type"),
    ],
)
def test_what_the_search_cannot_express_is_named(body, message):
    with pytest.raises(ScheduleError, match=message):
        search(outside(body), ONE)


@pytest.mark.parametrize(("name", "least"), [("rmsnorm_matmul", 60), ("gated_mlp", 10), ("lora", 70)])
def test_blocks_that_are_off_by_one_are_rejected(reports, name, least):
    """Wrong imap, fmap, omap, grid, loop or accumulator of everything found."""
    program = get_program(name)
    count = 0
    for found in (*reports[name].found, *reports[name].unstable):
        if found.structure.mapping.split:
            continue  # two blocks: the suite of attention changes those
        factors = {f: 2 for d in program.sizes for f in found.structure.mapping.factors(d)}
        extents = {d: 2 ** len(found.structure.mapping.factors(d)) for d in program.sizes}
        graph = instantiate(found.structure, program, factors)
        assert verify_equal(program.graph(extents), graph).equal
        for pair in block_near_misses(graph):
            count += 1
            assert not verify_equal(program.graph(extents), pair.second).equal, pair.name
    assert count >= least


def test_programs_by_name():
    with pytest.raises(UnknownNameError, match="did you mean 'lora'"):
        get_program("lorra")


def test_the_page_draws_everything(reports):
    text = page(reports["lora"])
    assert text.count("<svg") == 2 * min(8, len(reports["lora"].found))  # each beside the program
    assert "omap=" in text
    assert "states explored" in text
    assert "concat" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_time_is_left_to_prove_what_a_search_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, module = [], import_module("ladder.superopt.generator.search")
    for name in ("_run", "_finished"):
        keep = lambda *given: iter(ends.append(given[-1]) or ())  # noqa: E731
        monkeypatch.setattr(module, name, keep)
    monkeypatch.setattr(module, "_proved_together", lambda structures, most, finished: [structures])
    search(get_program("lora"), Limits(seconds=100.0))
    assert ends[1] - ends[0] == pytest.approx(30, abs=1)


def test_products_of_a_column_with_a_row_are_not_rounded():
    g = GraphBuilder("outer")
    emitter = Emitter(g, "float16")
    emitter.values = dict(
        enumerate(g.input(name, "float32", s) for name, s in (("A", (8, 1)), ("B", (1, 4))))
    )
    emitter.add(2, GraphStep((1, 0), "matmul", (0, 1)))
    graph = g.finish(emitter.values[2])
    assert [node.operator for node in graph.nodes] == ["input", "input", "mul"]
    assert graph.tile(graph.outputs[0]).ttype.name == "float32"
