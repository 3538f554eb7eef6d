"""The verifier names graph, node and reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ir_examples import EXAMPLES, of_matmul_blocks

from ladder.ir import Graph, GraphBuilder, parse, verify
from ladder.ir.graph import Axis
from tile_types.errors import VerificationError


def changed(graph: Graph, name: str, /, **fields) -> Graph:
    """Return the graph with fields of one node replaced."""
    nodes = tuple(replace(node, **fields) if node.name == name else node for node in graph.nodes)
    return replace(graph, nodes=nodes)


def inside(graph: Graph, change) -> Graph:
    """Return the graph with its block graph changed."""
    node = graph.nodes[-1]
    return replace(graph, nodes=(*graph.nodes[:-1], replace(node, body=change(node.body))))


def fails(graph: Graph, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify(graph)


ADD = EXAMPLES["add"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"operator": "ad"}, r"graph 'example', node %y = ad.*unknown operator 'ad'"),
        ({"inputs": ("x0",)}, "takes 2 operands, got 1"),
        ({"inputs": ("x0", "z")}, "operand %z is undefined"),
        ({"inputs": ("x0", "y")}, "operand %y is defined only later: nodes must be in order, without cycles"),
        ({"attributes": (("axis", 1),)}, "unknown attribute of add 'axis'"),
        ({"name": "x0"}, "taken by an earlier node"),
        ({"name": "a b"}, "no identifier"),
        ({"tiles": ()}, "needs a result"),
        ({"tiles": (replace(ADD.tile("y"), shape=(4, 7)),)}, r"states float32\[4, 7\].*give float32\[4, 6\]"),
        ({"tiles": (replace(ADD.tile("y"), ttype=EXAMPLES["constant"].tile("y").ttype),)}, "states float16"),
        ({"tiles": (replace(ADD.tile("y"), level="shared"),)}, "lives in 'shared', allowed here: dram"),
        ({"body": EXAMPLES["neg"]}, "graph-defined operators carry a graph"),
    ],
)
def test_broken_nodes(fields, reason):
    fails(changed(ADD, "y", **fields), reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"outputs": ("z",)}, "returns %z, which no node defines"),
        ({"outputs": ()}, "needs an output"),
        ({"level": "warp"}, "level 'warp'"),
        ({"grid": (Axis("x", 2),)}, "only block graphs have grid"),
        ({"name": "1"}, "no identifier"),
    ],
)
def test_broken_graphs(fields, reason):
    fails(replace(ADD, **fields), reason)


def test_defaults_must_not_be_written():
    fails(changed(EXAMPLES["reduce_max"], "y", attributes=(("keep", False), ("axis", 0))), "sorted")


def test_block_operators_stay_in_block_graphs():
    load = of_matmul_blocks().nodes[-1].body.nodes[2]
    graph = GraphBuilder("g")
    graph.input("a", "float16", ("M", 96))
    graph.insert(replace(load, tiles=(replace(load.tile, level="dram"),)))
    fails(graph.finish("load"), "belongs in a block graph, this is a kernel graph")


def test_block_operands_must_match():
    graph = of_matmul_blocks()
    fails(changed(graph, "y", inputs=("B", "A")), "its graph takes")


def test_at_most_three_grid_dimensions():
    grid = tuple(Axis(name, 1) for name in "abcd")
    fails(inside(of_matmul_blocks(), lambda body: replace(body, grid=grid)), "4 grid dimensions, at most 3")


def test_dimensions_are_positive():
    loops = (Axis("i", 0),)
    fails(inside(of_matmul_blocks(), lambda body: replace(body, loops=loops)), "positive extent")


LOOPED = """
kernel g {{
  %x = input() : float32[8, 8]
  %y = block(%x) : float32[8, 8] = block b grid(g=4) loops(i=2) {{
    %a = input() : float32[8, 8]
{body}
    return %s
  }}
  return %y
}}
"""
LOAD = "    %l = load(%a, grid=(0,), loop=(1,), shape=(2, 4)) : float32[2, 4]@shared\n"
LOAD_WHOLE = "    %l = load(%a, grid=(0,), loop=(-1,), shape=(2, 8)) : float32[2, 8]@shared\n"
ACCUMULATE = "    %c = accumulate(%l) : float32[2, 8]@shared\n"
STORE = "    %s = store(%{}, grid=(0,), shape=(8, 8)) : float32[8, 8]"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (LOAD_WHOLE + STORE.format("l"), "its operand is loaded, it must be accumulated"),
        ("    %e = exp(%a) : float32[8, 8]@shared\n" + STORE.format("e"), "value that is operand"),
        (STORE.format("a"), "its operand is operand, it must be accumulated"),
        (
            LOAD_WHOLE + '    %c = accumulate(%l, kind="sum") : float32[2, 8]@shared\n' + STORE.format("c"),
            "without those at their default",
        ),
        (
            LOAD_WHOLE + ACCUMULATE + "    %d = accumulate(%c) : float32[2, 8]@shared\n" + STORE.format("d"),
            "its operand is accumulated, it must be loaded",
        ),
        (
            LOAD_WHOLE
            + "    %c = accumulate(%l) : float32[2, 8]@shared\n    %d = add(%c, %l) : float32[2, 8]@shared\n"
            + STORE.format("d"),
            "mixes operands that are accumulated and loaded",
        ),
        (
            LOAD_WHOLE
            + "    %c = accumulate(%l) : float32[2, 8]@shared\n"
            + "    %s = store(%c, grid=(-1,), shape=(8, 8)) : float32[8, 8]",
            "blocks write the same",
        ),
        (
            "    %l = load(%a, grid=(0,), shape=(2, 8)) : float32[2, 8]@shared\n"
            + "    %c = accumulate(%l) : float32[2, 8]@shared\n"
            + STORE.format("c"),
            "must name an axis for each of 1 dimensions",
        ),
        (
            LOAD_WHOLE + "    %s = accumulate(%l) : float32[2, 8]@shared",
            "its operands give|without a store",
        ),
    ],
)
def test_path_rule(body, reason):
    fails(parse(LOOPED.format(body=body)), reason)


def test_path_rule_accepts_one_of_each():
    accumulated = '    %c = accumulate(%l, axis=1, kind="concat") : float32[2, 8]@shared\n'
    verify(parse(LOOPED.format(body=LOAD + accumulated + STORE.format("c"))))


def test_accumulator_needs_a_loop():
    text = LOOPED.format(
        body=LOAD_WHOLE + "    %c = accumulate(%l) : float32[2, 8]@shared\n" + STORE.format("c")
    )
    fails(parse(text.replace(" loops(i=2)", "").replace("loop=(-1,), ", "")), "has no loop")
