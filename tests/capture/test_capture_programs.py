"""Every program gives under capture what it gives without; most are captured."""

import importlib

import pytest
import torch
from capture_world import PROGRAMS, captured_run, compare
from programs_output import caught

from benchmarks.capture_overhead import stack
from ladder.capture import capture

FIRST = ("containers", "objects", "outside", "dynamic")
LATER = (
    "errors",
    "state",
    "tensors",
    "language",
    "iterators",
    "native_iterators",
    "models",
    "checks",
    "data",
)
STRESS = (
    "exceptions",
    "protocols",
    "lifetimes",
    "aliases",
    "torch_state",
    "module_state",
    "scalars",
    "idioms",
)
ADVERSARIAL = ("sharing", "layout", "random", "numbers", "classes", "surgery", "effects", "output", "modes")
ADVERSARIAL += ("suspended", "storage", "patched", "settings", "idle", "deep_copies", "held")
ADVERSARIAL += (
    "arguments",
    "callbacks",
    "flow",
    "hostile",
    "hostile_numbers",
    "hostile_objects",
    "hostile_state",
    "lookups",
    "thrown",
    "once",
    "training",
)
LIBRARIES = ("changed", "wrapped", "unlike", "mapped", "watched", "projects")
HOMES = (*FIRST, *LATER, *STRESS, "surroundings", "branches", "counters", *LIBRARIES, *ADVERSARIAL)
NAMES: dict[str, list[str]] = {}
for home in HOMES:
    before = set(PROGRAMS)
    importlib.import_module(f"programs_{home}")
    NAMES[home] = [name for name in PROGRAMS if name not in before]


CHANGING = {name for home in ADVERSARIAL for name in NAMES[home]}
"""Programs whose own calls are enough: arguments come back, and change kind, between them."""

ONCE = [(name, 1) for home in (*FIRST, *LATER, *LIBRARIES, *ADVERSARIAL) for name in NAMES[home]]


THRICE = [(name, 3) for name in PROGRAMS if name not in CHANGING]


@pytest.mark.parametrize(("name", "repeat"), [*ONCE, *THRICE])
def test_same_as_without_capture(name, repeat):
    expected, found, _ = captured_run(PROGRAMS[name], repeat)
    assert compare(expected, found) == ""


def test_most_programs_are_captured():
    names = [name for home in FIRST for name in NAMES[home]]
    captures = {name: captured_run(PROGRAMS[name], 2)[2] for name in names}
    outcomes = {name: captured.outcome for name, captured in captures.items()}
    missed = [name for name in names if outcomes[name] != "eager" and captures[name].calls["eager"]]
    assert missed == []
    eager = sorted(name for name, outcome in outcomes.items() if outcome not in ("whole", "split"))
    assert len(names) == 74
    assert eager == ["frame_and_inspect"]
    assert sum(outcome == "whole" for outcome in outcomes.values()) >= 45


SPLIT = ("managers_that_stay", "unlike_values_that_raise", "unlike_numbers_of_tensors")
SPLIT += ("unlike_tuple_without_length", "unlike_unpacked_tuples", "rows_that_read_values", "rows_that_stay")
SPLIT += ("checks_that_raise", "checks_on_sides_of_branches", "generators_that_compare_tensors")
SPLIT += ("arrays_that_are_not_compared", "numbers_of_numpy_that_torch_takes_for_floats")
SPLIT += (
    "wrapped_sets_of_modules_and_of_what_is_equal",
    "weak_references_after_changes",
    "watched_while_a_call_is_native",
    "watched_operators_of_the_program",
    "watched_branches",
    "watched_by_a_mode_that_stays",
)
WHOLE = [name for home in LIBRARIES for name in NAMES[home] if name not in SPLIT]


@pytest.mark.parametrize("name", WHOLE)
def test_what_libraries_do_is_one_graph(name):
    captured = captured_run(PROGRAMS[name], 1)[2]
    assert captured.outcome == "whole"
    assert not captured.calls["eager"]


def test_messages_of_tensors_that_nobody_reads_break_no_graph():
    captured = captured_run(PROGRAMS["effect_messages_that_nobody_reads"], 1)[2]
    assert not any(record.split for record in captured.records)


@pytest.mark.parametrize("number", [0, 1, 4, 5, 6])
def test_texts_of_errors_break_no_graph(number):
    captured, x = capture(caught), torch.randn(3)
    for _ in range(2):
        (y, texts), (want, wanted) = captured(x, number), caught(x, number)
        assert torch.equal(y, want)
        assert texts == wanted
    assert captured.outcome == "whole", captured.explain()


def test_a_model_is_one_graph_and_a_miss_is_seen():
    model, x = stack(2, 8, 2), torch.randn(1, 3, 8)
    captured = capture(model)
    for _ in range(2):
        assert torch.equal(captured(x), model(x))
    assert captured.outcome == "whole"
    assert [record.operators for record in captured.records] == [56]
    assert captured.calls == {"recorded": 1, "eager": 0}
    with torch.no_grad():
        model[1].query.weight.mul_(2)
        model[0].activation.forward = torch.tanh
        assert torch.equal(captured(x), model(x))
    assert captured.calls == {"recorded": 2, "eager": 0}


def test_a_backend_takes_the_graphs():
    seen = []

    def backend(module, examples):
        seen.append((module, examples))
        return module.forward

    captured = capture(lambda x, y: torch.relu(x) @ y, backend=backend)
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    assert torch.equal(captured(x, y), torch.relu(x) @ y)
    ((module, examples),) = seen
    assert [id(item) for item in examples] == [id(x), id(y)]
    assert captured.graphs == [module]
    assert "guard: " not in captured.explain()
    assert "guard: " in captured.explain(guards=True)


@pytest.mark.parametrize("name", ["held_by_loaders", "held_in_turns", "held_by_stacks"])
def test_generators_in_containers_break_no_graph(name):
    captured = captured_run(PROGRAMS[name], 1)[2]
    assert captured.outcome == "whole", captured.explain()


def test_numbers_behind_a_graph_break_are_left_open():
    captured = captured_run(PROGRAMS["counts_of_steps_that_change"], 1)[2]
    before = len(captured.records)
    world = PROGRAMS["counts_of_steps_that_change"]()
    for _ in range(2):
        captured(*world.steps[0][1]())
    assert len(captured.records) == before


def test_labels_of_profilers_break_no_graph():
    captured = captured_run(PROGRAMS["labels_of_profilers"], 1)[2]
    assert captured.outcome == "whole", captured.explain()
