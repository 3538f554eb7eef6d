"""The shipped database of proven graphs: keys that renaming leaves alone, and proofs that can be repeated."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks import ship_graphs
from benchmarks.graph_patterns import PATTERNS, TYPES, WEIGHTS, get_pattern
from ladder.runtime.model.found import GRAPHS, is_emitted
from ladder.runtime.trials import candidates_of
from ladder.superopt.canonical import Canonical, canonical
from ladder.superopt.generator import Limits, VerifiedGraph, instantiate
from ladder.superopt.generator.instantiate import symbolic_program
from ladder.superopt.generator.search import proved
from ladder.superopt.generator.stored import certificate_of
from ladder.superopt.generator.structure import GraphStep, Mapping, Prefix, Structure
from ladder.superopt.operators import OPERATORS
from ladder.superopt.shipped import certified, entries, recalled
from ladder.superopt.tracer import Tracer
from ladder.superopt.verifier import DELTA, verify_for_all_extents
from targets import get_device

ENTRIES = [(name, weights) for name in PATTERNS for weights in WEIGHTS]


def norm_product(
    rows: int, depth: int, *, reverse: bool, gain_first: bool, epsilon: float = 1e-6
) -> Canonical:
    """Return a norm and a product, written one way or another."""
    t = Tracer()
    shapes = {"x": ((rows, depth), (0,)), "gain": ((1, depth), ()), "w": ((48, depth), ())}
    order = sorted(shapes, reverse=reverse)
    made = {name: t.input(*shapes[name]) for name in order}
    y = OPERATORS["rms_norm"](t, made["x"], (depth,), None, epsilon)
    y = OPERATORS["mul"](t, *((made["gain"], y) if gain_first else (y, made["gain"])))
    return canonical(t.program("any", OPERATORS["linear"](t, y, made["w"]), "bfloat16"))


def test_keys_do_not_depend_on_names_sizes_numbers_and_order() -> None:
    a = norm_product(1, 64, reverse=False, gain_first=True)
    b = norm_product(7, 256, reverse=True, gain_first=False, epsilon=1e-3)
    assert a.key == b.key == get_pattern("norm, product").program("rows").key
    assert a.inputs != b.inputs
    assert a.key != get_pattern("norm without gain, product").program("rows").key


def test_everything_is_shipped() -> None:
    keys = [get_pattern(name).program(weights).key for name, weights in ENTRIES]
    assert len(set(keys)) == len(keys)
    assert set(entries()) == set(keys)
    assert all(entry.found for entry in entries().values())


@pytest.mark.parametrize(("name", "weights"), ENTRIES)
def test_what_is_shipped_is_proved_again(name: str, weights: str) -> None:
    """By its own seed, and for other numbers and sizes by a new one."""
    form = get_pattern(name).program(weights)
    entry = entries()[form.key]
    form = get_pattern(name).program(weights, entry.found[0]["types"][0])
    stored, structure = entry.found[0], entry.structures(form.program)[0]
    mapping, known = structure.mapping, certificate_of(stored["certificate"])
    pair = symbolic_program(mapping, form.program), instantiate(structure, form.program)
    again, extents = verify_for_all_extents(*pair, delta=known.delta, seed=known.seed)
    assert again.verdict == "replayed"
    assert extents == stored["extents"]
    assert known.equal
    assert known.delta < Fraction(DELTA)
    other = replace(form.program, sizes={name: 2 * size for name, size in form.program.sizes.items()})
    found = proved(entry.structures(other)[0], other, Limits(), Fraction(DELTA))
    assert isinstance(found, VerifiedGraph)
    assert found.certificate.equal
    assert found.stability.stable


@pytest.mark.parametrize(("weights", "kept"), [("packed", 4), ("rows", 4), ("columns", 0)])
def test_gains_are_multiplied_in_first_where_they_cannot_overflow(weights: str, kept: int) -> None:
    """Rows times gains overflow in float16, not in bfloat16: one type's graphs are not the other's."""
    found = {}
    for ttype in TYPES:
        form = get_pattern("norm, product").program(weights, ttype)
        report = recalled(form, Limits(), 8)
        assert report is not None
        found[ttype] = [one.structure for one in report.found]
        for one in report.found:
            assert isinstance(certified(one, form.program, Limits()), VerifiedGraph)
    assert len(found["float16"]) == kept
    first = [one for one in found["bfloat16"] if one not in found["float16"]]
    form = get_pattern("norm, product").program(weights)
    assert first
    assert "overflowing" in proved(first[0], form.program, Limits(), Fraction(DELTA)).stability.reason


@pytest.mark.parametrize("weights", ["packed", "rows"])
def test_plans_try_graphs_that_have_kernels_first(weights: str) -> None:
    """Decoded weights times gains have none; rows times gains, of bfloat16 alone, are also faster."""
    form, device = get_pattern("norm, product").program(weights, "bfloat16"), get_device(ship_graphs.TARGET)
    report = recalled(form, Limits.of(form.program, device.name), GRAPHS)
    assert report is not None
    best, *_ = candidates_of(report, device, 1, choices=1)
    assert is_emitted(best, device)
    assert best.predicted < 20e-6


def lora_of_parts() -> Structure:
    """Return ``X·W + (X·A)·B`` where blocks and steps share K and each rounds its part of ``X·A``."""
    turned = (("transpose_b", True),)
    mapping = Mapping(
        ("D3", "D2"), ("D2",), ((-1, 1), (0, 1), (-1, 1), (0, -1)), ((1,), (1,), (1,), (-1,)), split="D2"
    )
    steps = (
        GraphStep((1,), "convert", (1,)),
        GraphStep((2, 0), "matmul", (0, 2), turned),
        GraphStep((4, 0), "matmul", (0, 4), turned),
        GraphStep((5, 3), "matmul", (5, 3), turned),
        GraphStep((7, 6), "add", (6, 7)),
        GraphStep((8,), "accumulate", (8,), (("kind", "sum"),)),
        GraphStep((9,), "combine", (9,)),
    )
    return Structure(Prefix((), (0, 1, 2, 3)), mapping, steps)


@pytest.mark.parametrize("ttype", TYPES)
def test_sums_of_parts_are_not_rounded_whatever_the_seed(ttype: str) -> None:
    """Where X·A cancels its parts do not: what rounds them has many times the program's error."""
    form = get_pattern("LoRA").program("packed", ttype)
    limits = Limits.of(form.program, ship_graphs.TARGET)
    shipped, parts = entries()[form.key].structures(form.program), lora_of_parts()
    for seed in (1, 2):
        for each in (*shipped, parts):
            found = proved(each, form.program, limits, Fraction(DELTA), seed)
            assert isinstance(found, VerifiedGraph)
            assert found.stability.stable == (each is not parts)


def test_a_graph_with_another_number_is_refused() -> None:
    form = get_pattern("norm, product").program("rows")
    entry = entries()[form.key]
    wrong = replace(entry, numbers=tuple(2 * number for number in entry.numbers))
    structure = entry.structures(form.program)[0]
    numbers = dict(zip(entry.numbers, wrong.numbers, strict=True))
    found = proved(structure.with_constants(numbers), form.program, Limits(), Fraction(DELTA))
    assert isinstance(found, str)


def test_what_is_shipped_is_what_the_search_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ship_graphs, "PATH", tmp_path / "shipped.json")
    assert ship_graphs.main(["product, residual", "--weights", "rows", "columns"]) == 0
    made = json.loads((tmp_path / "shipped.json").read_text("utf-8"))
    for key, entry in made.items():
        again = json.loads(json.dumps([found["structure"] for found in entry["found"]]))
        assert again == [found["structure"] for found in entries()[key].found]
        assert [found["graph"] for found in entry["found"]] == [f["graph"] for f in entries()[key].found]
    assert {entry["weights"] for entry in made.values()} == {"rows", "columns"}
