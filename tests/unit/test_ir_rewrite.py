"""Rules as data, passes that verify and dump."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from ir_examples import of_matmul_blocks, operands

from ladder import knobs
from ladder.ir import (
    GraphBuilder,
    evaluate,
    parse,
    verify,
)
from ladder.ir.build import bind
from ladder.rewrite import Pass, Rule, pattern, rewrite, rewriting, run_passes
from ladder.rewrite.axis_rules import JOIN_FOLDING, MERGED_REDUCTIONS
from ladder.rewrite.bounds import BOUND_FOLDING
from ladder.rewrite.convolution_rules import CHANNELS_LAST
from ladder.rewrite.identities import (
    CONVERT_FOLDING,
    GROUPED_ATTENTION,
    LAYOUT_FOLDING,
    MATMUL_RECOGNITION,
    NEUTRAL_FOLDING,
    OUTER_PRODUCTS,
)
from ladder.rewrite.merge import merge_equal
from ladder.rewrite.simplify import ordering
from ladder.rewrite.transpose_rules import DEPTHWISE, TRANSPOSE_SINKING, as_given
from tile_types.errors import VerificationError


def operators(graph):
    return [node.operator for node in graph.nodes]


def chain(*types):
    g = GraphBuilder("chain")
    x = g.input("x", types[0], (3,))
    for ttype in types[1:]:
        x = g.add("convert", x, type=ttype)
    return g.finish(x)


@pytest.mark.parametrize(
    ("types", "left"),
    [
        (("int4", "float16", "float32"), ["input", "convert"]),
        (("float16", "float32", "float16"), ["input"]),
        (("float16", "float16"), ["input"]),
        (("float32", "float16", "float32"), ["input", "convert", "convert"]),
        (("float16", "bfloat16", "float32"), ["input", "convert", "convert"]),
        (("fp8_e4m3", "bfloat16", "float32", "float16"), ["input", "convert"]),
        (("bool", "int64", "float32"), ["input", "convert"]),
        (("int8", "uint64", "float32"), ["input", "convert", "convert"]),
        (("bfloat16", "float64", "float32"), ["input", "convert"]),
        (("float16", "int64", "float32"), ["input", "convert", "convert"]),
        (("int8", "complex64", "float32"), ["input", "convert", "convert"]),
    ],
)
def test_converts_fold_only_where_nothing_is_lost(types, left):
    result = rewrite(chain(*types), CONVERT_FOLDING)
    assert operators(result) == left
    assert result.tile(result.outputs[0]).ttype.name == types[-1]


@pytest.mark.parametrize(("first", "left"), [(True, 1), (False, 2)])
def test_what_is_rounded_is_not_rounded_again(first: bool, left: int) -> None:
    """Of a half that a kernel may keep wider, the second conversion is the first that rounds."""
    build = GraphBuilder("chain")
    half = build.add("convert", build.input("x", "float32", (4, 8)), type="float16", exact=first)
    again = build.add("convert", build.add("convert", half, type="float32"), type="float16", exact=True)
    graph = rewrite(build.finish(again), CONVERT_FOLDING)
    assert [dict(n.attributes).get("exact") for n in graph.nodes if n.tile.ttype.name == "float16"][-1]
    assert sum(n.tile.ttype.name == "float16" for n in graph.nodes) == left


@pytest.mark.parametrize(
    ("operator", "ttype", "number", "shape", "stays"),
    [
        ("add", "int64", 0.0, (2, 3), False),
        ("add", "int64", 1.0, (2, 3), True),
        ("add", "float32", 0.0, (2, 3), True),  # -0.0 + 0.0 is 0.0
        ("mul", "float32", 1.0, (2, 3), False),
        ("mul", "float32", 1.0, (), False),
        ("mul", "float32", 0.0, (2, 3), True),
    ],
)
def test_numbers_that_change_nothing_are_dropped(operator, ttype, number, shape, stays):
    g = GraphBuilder("g")
    x, constant = g.input("x", ttype, shape), g.add("constant", value=number, type=ttype)
    for pair in ((x, constant), (constant, x)):
        graph = g.finish(g.add("neg", g.add(operator, *pair)))
        assert (operator in operators(rewrite(graph, NEUTRAL_FOLDING))) is stays


def test_rules_compose_by_addition():
    g = GraphBuilder("g")
    x = g.input("x", "float16", (2, 3))
    y = g.add("transpose", g.add("transpose", x, permutation=(1, 0)), permutation=(1, 0))
    graph = g.finish(g.add("convert", g.add("reshape", y, shape=(2, 3)), type="float16"))
    assert operators(rewrite(graph, LAYOUT_FOLDING + CONVERT_FOLDING)) == ["input"]
    assert operators(rewrite(graph, CONVERT_FOLDING)) == ["input", "transpose", "transpose", "reshape"]


def test_contract_becomes_matmul_with_operands_swapped_if_need_be():
    g = GraphBuilder("g")
    a, b = g.input("a", "float16", ("M", 8)), g.input("b", "float16", (5, 8))
    graph = g.finish(g.add("contract", b, a, spec="y c, x c -> x y", type="float32"))
    result = rewrite(graph, MATMUL_RECOGNITION)
    assert result.nodes[-1].operator == "matmul"
    assert result.nodes[-1].inputs == ("a", "b")
    x = operands(graph)
    assert np.allclose(evaluate(result, x), x["a"] @ x["b"].T)


@pytest.mark.parametrize("given", [{"sizes": (("c", 4),)}, {"sizes": (("c", 9),), "pad": True}])
def test_contractions_of_parts_stay(given):
    g = GraphBuilder("g")
    a, b = g.input("a", "float32", (3, 8)), g.input("b", "float32", (8, 5))
    graph = g.finish(g.add("contract", a, b, spec="x c, c y -> x y", type="float32", **given))
    assert rewrite(graph, MATMUL_RECOGNITION) == graph


@pytest.mark.parametrize("first", list(permutations(range(3))))
def test_transposes_fold_to_their_composition(first):
    for second in permutations(range(3)):
        g = GraphBuilder("g")
        x = g.input("x", "float32", (2, 3, 4))
        graph = g.finish(g.add("transpose", g.add("transpose", x, permutation=first), permutation=second))
        result = rewrite(graph, LAYOUT_FOLDING)
        assert len(result.nodes) <= 2
        given = operands(graph)
        assert np.array_equal(evaluate(result, given), evaluate(graph, given))


@pytest.mark.parametrize(
    ("stretched", "joined", "folds"),
    [
        ((2, 3, 4, 5, 8), (2, 12, 5, 8), True),
        ((2, 3, 4, 5, 8), (2, 3, 20, 8), False),
        ((2, 3, 4, 5, 8), (2, 6, 10, 8), False),
    ],
)
def test_repeated_heads_are_groups_only_where_heads_are_repeated(stretched, joined, folds):
    g = GraphBuilder("g")
    q = g.input("q", "float32", (2, 12, 1, 8))
    k, v = (g.input(name, "float32", (2, 3, 5, 8)) for name in "kv")
    repeated = [
        g.add("reshape", g.add("broadcast", g.add("reshape", x, shape=(2, 3, 1, 5, 8)), shape=stretched),
              shape=joined)
        for x in (k, v)
    ]  # fmt: skip
    graph = g.finish(g.add("attention", q, *repeated, scale=1.0))
    result = rewrite(graph, GROUPED_ATTENTION)
    assert ("broadcast" not in operators(result)) is folds
    given = operands(graph)
    assert np.allclose(evaluate(result, given), evaluate(graph, given))


def test_rewriting_reaches_into_block_graphs():
    fold = Rule("drop neg", pattern("neg", "x"), lambda match: match["x"])
    result = rewrite(of_matmul_blocks(), (fold,))
    verify(result)
    assert "neg" not in str(result)
    assert "neg" in str(of_matmul_blocks())


def test_rules_that_never_end_are_reported():
    grow = Rule(
        "grow",
        pattern("neg", "x"),
        lambda match: match.builder.add("neg", match.builder.add("exp", match["x"])),
    )
    with pytest.raises(VerificationError, match=r"did not end.*grow"):
        rewrite(of_matmul_blocks(), (grow,))


def test_same_name_binds_the_same_value():
    double = Rule("x + x", pattern("add", "x", "x"), lambda match: match.builder.add("neg", match["x"]))
    g = GraphBuilder("g")
    x, y = g.input("x", "float32", (2,)), g.input("y", "float32", (2,))
    assert "add" in operators(rewrite(g.finish(g.add("add", x, y)), (double,)))
    assert "add" not in operators(rewrite(g.finish(g.add("add", x, x)), (double,)))


@pytest.mark.parametrize(
    ("middle", "source", "kept"),
    [("int64", "bool", 1), ("int64", "float16", 2), ("uint64", "int8", 2), ("float64", "bfloat16", 1)],
)
def test_converts_through_types_without_codes(middle, source, kept):
    """Labels that are compared become int64, then floats; only what holds all values is left out."""
    graph = chain(source, middle, "float32")
    assert operators(rewrite(graph, CONVERT_FOLDING)).count("convert") == kept


def test_passes_are_verified_and_dumped(tmp_path, monkeypatch):
    graph = chain("int4", "float16", "float32")
    with knobs.override(dump=tmp_path):
        result = run_passes(graph, [rewriting("fold converts", CONVERT_FOLDING)])
    stages = sorted(tmp_path.iterdir())
    assert [path.name for path in stages] == ["chain.00.input.txt", "chain.01.fold_converts.txt"]
    assert [parse(path.read_text()) for path in stages] == [graph, result]
    monkeypatch.setenv("LADDER_DUMP", str(tmp_path / "by knob"))
    run_passes(graph, [])
    assert (tmp_path / "by knob" / "chain.00.input.txt").exists()


def test_the_pass_that_breaks_a_graph_is_named(tmp_path):
    def break_it(graph):
        return parse(str(graph).replace("float32[3]", "float32[4]"))

    broken = r"after pass 'break it': graph 'chain', node %convert_1"
    with knobs.override(dump=tmp_path), pytest.raises(VerificationError, match=broken):
        run_passes(chain("int4", "float16", "float32"), [Pass("break it", break_it)])
    assert (tmp_path / "chain.01.break_it_broken.txt").exists()


def turned_programs():
    """Yield names and graphs of one operator on images whose channels were brought first."""
    image, first = (2, 3, 5, 4), (0, 3, 1, 2)

    def graph(body, images=1):
        g = GraphBuilder("g")
        given = [g.input(f"x{at}", "float32", image) for at in range(images)]
        return g.finish(body(g, *(g.add("transpose", x, permutation=first) for x in given)))

    for operator in ("reduce_sum", "reduce_max"):
        for axis in range(4):
            for keep in (True, False):
                yield (
                    f"{operator} {axis} {keep}",
                    graph(lambda g, x, o=operator, a=axis, k=keep: g.add(o, x, axis=a, keep=k)),
                )
    for axis in range(4):
        yield f"concat {axis}", graph(lambda g, x, y, a=axis: g.add("concat", x, y, axis=a), 2)
    low, high = (0, 1, 2, 0), (1, 0, 1, 3)
    yield "pad", graph(lambda g, x: g.add("pad", x, low=low, high=high, value=2.0))
    yield (
        "slice",
        graph(lambda g, x: g.add("slice", x, begin=(0, 1, 1, 2), shape=(2, 2, 2, 3), step=(1, 2, 1, 1))),
    )
    yield "both turned", graph(lambda g, x, y: g.add("sub", x, y), 2)
    for shape in ((4, 1, 1), (3, 1), (5,), (1, 4, 1, 1), (4, 3, 1), (3, 5), (2, 1, 3, 1), ()):

        def body(g, x, shape=shape):
            return g.add("sub", x, g.input("v", "float32", shape))

        yield f"less {shape}", graph(body)


PROGRAMS = dict(turned_programs())


@pytest.mark.parametrize("name", PROGRAMS)
def test_channels_stay_last(name):
    graph = PROGRAMS[name]
    result = rewrite(graph, TRANSPOSE_SINKING + DEPTHWISE)
    verify(result)
    given = operands(graph)
    found, wanted = evaluate(result, given), evaluate(graph, given)
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted)


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_patches_of_sequences_find_their_places(order):
    """Parts of the last axis, moved and joined, keep no rule from an end."""
    g = GraphBuilder("g")
    opened = g.add("reshape", g.input("x", "float32", (2, 3, 32)), shape=(2, 3, 8, 4))
    moved = g.add("transpose", opened, permutation=order)
    extents = [(2, 3, 8, 4)[axis] for axis in order]
    results = []
    for shape in ((*extents[:2], extents[2] * extents[3]), (extents[0], extents[1] * extents[2], extents[3])):
        joined = g.add("reshape", moved, shape=shape)
        means = [g.add("reduce_sum", joined, axis=axis, keep=True) for axis in (1, 2)]
        results += [g.add("sub", joined, mean) for mean in means]
    graph = g.finish(*results)
    result = run_passes(graph, (ordering(CHANNELS_LAST),))
    verify(result)
    given = operands(graph)
    for found, wanted in zip(evaluate(result, given), evaluate(graph, given), strict=True):
        assert np.allclose(found, wanted)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("first", "vector", "merges"),
    [(3, (3, 1, 1), True), (2, (), True), (3, (4, 1), True), (2, (5,), True), (1, (), False)],
)
def test_reductions_of_neighbouring_axes_are_one(first, vector, merges, keep):
    """Where what is computed of x reads each operand by both axes, or by neither, or inputs by one."""
    g = GraphBuilder("g")
    x, y = g.input("x", "float32", (2, 3, 4, 5)), g.input("y", "float32", vector)
    value = g.add("square", g.add("sub", x, y))
    for axis in (first, first - 1 if first > 1 else 2 if keep else 1):
        value = g.add("reduce_sum", value, axis=axis, keep=keep)
    graph = g.finish(value)
    result = rewrite(graph, MERGED_REDUCTIONS + LAYOUT_FOLDING)
    verify(result)
    assert operators(result).count("reduce_sum") == (1 if merges else 2)
    assert np.allclose(evaluate(result, operands(graph)), evaluate(graph, operands(graph)))


def test_reductions_whose_results_others_read_stay():
    """The largest of a row by parts, as `argmax` finds it: the row is not read again as a whole."""
    g = GraphBuilder("g")
    largest = g.add("reduce_max", g.input("x", "float32", (2, 3, 4)), axis=2, keep=False)
    for outputs, count in (((), 1), ((largest,), 2), ((g.add("exp", largest),), 2)):
        graph = g.finish(g.add("reduce_max", largest, axis=1, keep=False), *outputs)
        assert operators(rewrite(graph, MERGED_REDUCTIONS + LAYOUT_FOLDING)).count("reduce_max") == count


def test_libraries_read_and_leave_what_lies_as_it_is():
    """What a call takes and gives is not moved; what a kernel gives is, if it would lie otherwise."""
    order = (0, 2, 1)
    g = GraphBuilder("g")
    x = g.input("x", "float32", (2, 3, 4))
    moved = g.add("transpose", g.add("restride", x, permutation=order), permutation=order)
    taken = g.add("take", moved, g.input("ids", "int32", (5,)))
    for value in (taken, g.add("square", taken)):
        plain = g.add("restride", value, permutation=(0, 1, 2))
        stored = g.add("restride", g.add("transpose", value, permutation=order), permutation=order)
        for result, kept in ((plain, []), (stored, ["transpose", "restride"] if value != taken else [])):
            found = as_given(g.finish(result))
            verify(found)
            assert [name for name in operators(found) if name not in ("input", "take", "square")] == kept


@pytest.mark.parametrize("order", [range(5), reversed(range(5)), (3, 0, 3, 4, 1, 2)])
def test_what_a_loop_writes_part_by_part_is_one_join(order):
    """``out[:, t] = h`` for all t is a join of what was written last at each place."""
    g = GraphBuilder("filled")
    whole = g.input("start", "float32", (2, 5, 3))
    for number, at in enumerate(order):
        part = g.input(f"h{number}", "float32", (2, 1, 3))
        sides = [
            g.add("slice", whole, begin=(0, begin, 0), shape=(2, count, 3))
            for begin, count in ((0, at), (at + 1, 4 - at))
        ]
        whole = g.add("concat", sides[0], part, sides[1], axis=1)
    graph = g.finish(whole)
    result = rewrite(graph, LAYOUT_FOLDING + JOIN_FOLDING)
    assert operators(result).count("concat") == 1
    assert "slice" not in operators(result)
    given = operands(graph)
    np.testing.assert_array_equal(evaluate(result, given), evaluate(graph, given))


@pytest.mark.parametrize(
    ("begin", "count", "step", "axis", "left"),
    [
        (0, 3, 1, 1, []),
        (1, 2, 1, 1, ["slice"]),
        (3, 2, 2, 1, ["slice"]),
        (6, 1, 1, 1, ["slice"]),
        (2, 2, 1, 1, ["concat", "slice"]),
        (0, 2, 3, 1, ["concat", "slice"]),
        (1, 3, 2, 0, ["concat", "slice"]),
    ],
)
def test_slices_of_joins(begin, count, step, axis, left):
    """A slice that lies within one operand of a join is one of that operand; others stay."""
    g = GraphBuilder("sliced")
    whole = g.add("concat", g.input("a", "float32", (8, 3)), g.input("b", "float32", (8, 4)), axis=1)
    shape, place, steps = [8, 7], [0, 0], [1, 1]
    shape[axis], place[axis], steps[axis] = count, begin, step
    graph = g.finish(g.add("slice", whole, begin=tuple(place), shape=tuple(shape), step=tuple(steps)))
    result = rewrite(graph, LAYOUT_FOLDING + JOIN_FOLDING)
    assert operators(result)[2:] == left
    given = operands(graph)
    np.testing.assert_array_equal(evaluate(result, given), evaluate(graph, given))


@pytest.mark.parametrize(
    ("order", "shape", "axis", "joins"),
    [
        ("ababab", (4, 1), 1, 2),
        ("ababab", (4, 1), 0, 2),
        ("aaa", (2, 3), 1, 0),
        ("aaaa", (2, 20), 0, 0),
        ("abab", (4, 1), 1, 4),
        ("abaab", (4, 1), 1, 5),
        ("aaa", (2, 16), 1, 3),
    ],
)
def test_what_a_join_repeats_is_repeated_by_index(order, shape, axis, joins):
    """Where it has the same ones three times or more; wide ones along the last axis stay pieces of a row."""
    g = GraphBuilder("repeated")
    parts = {name: g.input(name, "float32", shape) for name in sorted(set(order))}
    graph = g.finish(g.add("concat", *map(parts.__getitem__, order), axis=axis))
    result = rewrite(graph, LAYOUT_FOLDING + JOIN_FOLDING)
    found = [len(node.inputs) for node in result.nodes if node.operator == "concat"]
    assert found == ([joins] if joins else [])
    given = operands(graph)
    np.testing.assert_array_equal(evaluate(result, given), evaluate(graph, given))


def test_slices_of_slices_are_one():
    g = GraphBuilder("twice")
    x = g.input("x", "float32", (20, "n"))
    inner = g.add("slice", x, begin=(3, 1), shape=(5, "n - 1"), step=(3, 1))
    graph = g.finish(g.add("slice", inner, begin=(1, 2), shape=(2, "n - 3"), step=(2, 1)))
    result = rewrite(graph, JOIN_FOLDING)
    assert operators(result) == ["input", "slice"]
    x = np.arange(140, dtype=np.float32).reshape(20, 7)
    np.testing.assert_array_equal(evaluate(bind(result, {"n": 7}), [x]), evaluate(bind(graph, {"n": 7}), [x]))


@pytest.mark.parametrize(
    ("column", "row", "transpose_b"),
    [((3, 1), (1, 4), False), ((3, 1), (4, 1), True), ((2, 3, 1), (4, 1), True), ((3, 1), (2, 1, 4), False)],
)
def test_products_over_one_element_are_of_elements(column, row, transpose_b):
    g = GraphBuilder("outer")
    x, y = g.input("x", "float32", column), g.input("y", "float32", row)
    graph = g.finish(g.add("matmul", x, y, transpose_b=transpose_b, type="float32"))
    result = rewrite(graph, OUTER_PRODUCTS)
    assert "matmul" not in operators(result)
    given = operands(graph)
    given["x"].flat[:2] = 0.0, np.inf
    found, wanted = evaluate(result, given), evaluate(graph, given)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 447.0, 448.0, -448.5, 6.0, -1e-7, 3e4)


def clamped(g, value, low, high, ttype):
    """Clamp as importers do: the lower bound first; None is none."""
    for operator, end in (("maximum", low), ("minimum", high)):
        if end is not None:
            value = g.add(operator, value, g.add("constant", value=end, type=ttype))
    return value


@pytest.mark.parametrize(
    ("first", "between", "second", "left"),
    [
        ((-448.0, 448.0), "float32", (-448.0, 448.0), 2),
        ((-448.0, 448.0), "float16", (-448.0, 448.0), 2),  # float16 has 448
        ((-448.0, 448.0), "int8", (-448.0, 448.0), 4),  # integers wrap around
        ((0.1, 448.0), "float16", (0.1, None), 3),  # float16 has no 0.1
        ((-500.0, 500.0), "float32", (-448.0, 448.0), 2),
        ((0.0, None), "float32", (-448.0, 448.0), 2),
        ((None, 6.0), "float32", (-448.0, 448.0), 2),
        ((1.0, 2.0), "float32", (3.0, 4.0), 2),  # all are 3
        ((2.0, 1.0), "float32", (None, 1.5), 2),
        ((float("inf"), None), "float32", (None, 5.0), 2),
        ((float("-inf"), None), "float32", (None, float("inf")), 0),
    ],
)
def test_clamps_of_what_is_clamped(first, between, second, left):
    g = GraphBuilder("g")
    x = g.input("x", "float32", (len(SPECIAL),))
    value, ttype = clamped(g, x, *first, "float32"), "float32" if between == "int8" else between
    if between != "float32":
        value = g.add("reshape", g.add("convert", value, type=between), shape=(len(SPECIAL), 1))
    if between == "int8":
        value = g.add("convert", value, type="float32")
    graph = g.finish(clamped(g, value, *second, ttype))
    result = rewrite(graph, BOUND_FOLDING)
    assert sum(name in ("maximum", "minimum") for name in operators(result)) == left
    values = np.array(SPECIAL if between != "int8" else [*SPECIAL[3:], 1.0, 2.0, 3.0])
    np.testing.assert_array_equal(evaluate(result, [values]), evaluate(graph, [values]))


def test_clamps_that_others_read_stay():
    g = GraphBuilder("g")
    inner = clamped(g, g.input("x", "float32", (4,)), -5.0, 5.0, "float32")
    graph = g.finish(inner, clamped(g, inner, -3.0, 3.0, "float32"))
    assert rewrite(graph, BOUND_FOLDING) == graph


def test_reductions_along_several_axes_are_one_whether_they_keep_them() -> None:
    """Means beside variances: the axes are kept by one, and not by the other."""
    g = GraphBuilder("moments")
    x = g.input("x", "float32", (3, 4, 5, 6))
    kept, apart = x, x
    for axis in (3, 2, 0):
        kept = g.add("reduce_sum", kept, axis=axis)
        apart = g.add("reduce_sum", apart, axis=axis, keep=False)
    merged = merge_equal(g.finish(kept, apart))
    assert sum(node.operator == "reduce_sum" for node in merged.nodes) == 3
    assert [merged.tile(value).shape for value in merged.outputs] == [(1, 4, 1, 1), (4,)]
    other = g.add("reduce_sum", g.add("reduce_sum", x, axis=2), axis=3)
    assert sum(n.operator == "reduce_sum" for n in merge_equal(g.finish(kept, other)).nodes) == 5
