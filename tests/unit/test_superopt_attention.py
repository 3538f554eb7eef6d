"""Soundness on attention: every kind of block graph is accepted, every near miss rejected."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from superopt_attention import KINDS, near_misses, pair, structures
from superopt_programs import program

from ladder.superopt.generator import get_program, instantiate
from ladder.superopt.generator.instantiate import symbolic_program
from ladder.superopt.verifier import agree_at_once, refusal, verify_equal, verify_for_all_extents
from tile_types.errors import VerificationError

STRUCTURES = dict(structures())
EXTENTS = ({}, {"Mt": 1, "Sl": 3, "St": 1}, {"Sg": 3, "St": 1, "Et": 3}, {"Mt": 3, "Dt": 3, "St": 1})


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_kind_is_accepted_for_all_extents(name):
    structure, gqa = STRUCTURES[name], get_program("gqa")
    graph = instantiate(structure, gqa)
    certificate, _ = verify_for_all_extents(symbolic_program(structure.mapping, gqa), graph)
    assert certificate.equal, certificate
    assert 0 < certificate.delta <= 2**-64
    for extents in EXTENTS:
        one = pair(name, structure, extents)
        assert agree_at_once(one.first, one.second, seed=3), extents


def test_near_misses_are_rejected():
    """No certificate for any; where float64 differs, one evaluation in a field shows it."""
    seen: Counter[str] = Counter()
    for name in ("flash rows shifted", "decoding rows shifted", "flash columns", "decoding columns shifted"):
        for miss in near_misses(pair(name, STRUCTURES[name])):
            seen[miss.name.split(": ")[-1]] += 1
            try:
                assert not agree_at_once(miss.first, miss.second, seed=5), miss.name
            except VerificationError:
                seen["refused"] += 1
    assert sum(seen.values()) - seen["refused"] >= 200
    assert seen["sum for rescale"] >= 6  # a missing rescale
    assert seen["swapped operands"] >= 8
    assert seen["dropped"] >= 8
    assert len(KINDS) == 9


def test_missing_rescales_are_rejected_for_all_extents():
    """Sums of several steps, each relative to its own maximum, added as they are."""
    gqa = get_program("gqa")
    for name in ("flash shifted", "decoding shifted"):
        structure = STRUCTURES[name]
        graph = instantiate(structure, gqa)
        node = graph.nodes[-1]
        changed = []
        for inner in node.body.nodes:
            rescales = len(inner.inputs) == 2 and inner.operator == "accumulate"
            changed.append(replace(inner, inputs=inner.inputs[:1], attributes=()) if rescales else inner)
        body = replace(node.body, nodes=tuple(changed))
        broken = replace(graph, nodes=(*graph.nodes[:-1], replace(node, body=body)))
        assert not verify_for_all_extents(symbolic_program(structure.mapping, gqa), broken)[0].equal


@pytest.mark.parametrize(
    "body",
    [
        lambda q, k, v: ((q @ k).exp().exp() / (q @ k).exp().exp().sum(1)) @ v,
        lambda q, k, v: ((q @ k).exp() / (q @ k).exp().sum(0)) @ v,
        lambda q, k, v: ((q @ k).exp() / (q @ k).sum(1).exp()) @ v,
        lambda q, k, v: ((q @ k * 2.0).exp() / (q @ k).exp().sum(1)) @ v,
        lambda q, k, v: ((k.T @ q.T).exp() / (q @ k).exp().sum(1)) @ v,
        lambda q, k, v: (q @ k).exp() @ v,
        lambda q, k, v: ((q @ k).exp() / (q @ k).exp().sum(1)) @ v.T,
        lambda q, k, v: (((q @ k).silu()) / (q @ k).exp().sum(1)) @ v,
        lambda q, k, v: ((q @ k - (q @ k).op("reduce_max", axis=0)).exp() / (q @ k).exp().sum(1)) @ v,
    ],
)
def test_other_definitions_are_rejected(body):
    """Nested exponentials, the wrong axis, a maximum that does not cancel ..."""
    shapes = {"q": (2, 2), "k": (2, 2), "v": (2, 2)}
    softmax = program(lambda q, k, v: ((q @ k).exp() / (q @ k).exp().sum(1)) @ v, shapes)
    assert not verify_equal(softmax, program(body, shapes)).equal


def test_a_maximum_may_be_of_anything():
    """Softmax minus any number of the row is softmax; minus a number of the element is not."""
    shapes = {"x": (2, 3)}
    plain = program(lambda x: x.exp() / x.exp().sum(1), shapes)

    def shifted(x, by):
        return (x - by).exp() / (x - by).exp().sum(1)

    rows = program(lambda x: shifted(x, (x * 3.0).op("reduce_max", axis=1)), shapes)
    columns = program(lambda x: shifted(x, x.op("reduce_max", axis=0)), shapes)
    assert verify_equal(plain, rows).equal
    assert not verify_equal(plain, columns).equal


def test_maxima_are_functions_of_their_elements():
    """In any order, and of nothing else."""
    shapes = {"x": (2, 3)}
    rows = program(lambda x: x.op("reduce_max", axis=1), shapes)
    assert verify_equal(rows, program(lambda x: x.T.op("reduce_max", axis=0).T, shapes)).equal
    assert not verify_equal(rows, program(lambda x: (x + 1.0).op("reduce_max", axis=1), shapes)).equal
    assert "maxima" in refusal(rows)
