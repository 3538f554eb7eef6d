"""Programs of capture with plans of ours for their graphs: the same results, up to rounding."""

from __future__ import annotations

import os

import capture_world
import pytest
import torch
from capture_world import PROGRAMS, captured_run, compare
from test_capture_programs import NAMES

import ladder
from ladder.api.compiler import Compiler

EVERY = 60
"""Days after which all programs have had their turn."""


def close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Say whether values are the same up to the rounding of another order of operations."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return torch.allclose(expected.to(wide), found.to(wide), rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.fixture(autouse=True)
def up_to_rounding(monkeypatch):
    monkeypatch.setattr(capture_world, "same_values", close)


PRECISE = {"hostile_16_bit_inputs_in_place"}
"""Programs of 16-bit numbers whose results show that kernels round once unless they are ``precise``."""


def mismatches(names: list[str]) -> dict[str, str]:
    """Return how programs with plans differ from eager ones."""
    found = {}
    for name in names:
        outcomes = captured_run(PROGRAMS[name], 2, Compiler(precise=name in PRECISE))
        found[name] = compare(*outcomes[:2])
    return {name: text for name, text in found.items() if text}


ALWAYS = (
    *("sharing_add_first_first_apart", "sharing_exchanged_first_apart", "sharing_kept_as_it_was_first_apart"),
    *("layout_product", "layout_as_strided", "layout_dropout", "layout_sliced", "layout_open_parts"),
    "sharing_views_returned_first_apart",
    *("random_unused", "mode_gradient", "number_bool", "number_in_place_number", "layout_versions"),
    *("mode_autocast_outside", "layout_moved_resized", "layout_moved_sum_resizes"),
    *("layout_moved_expanded_written", "layout_moved_unfolded_written"),
    *(
        "storage_complex_parts_written",
        "storage_conjugated_arguments",
        "storage_negated_where_read",
        "module_hooks_all",
    ),
    *("written_views_that_no_schema_tells", "written_arguments_that_overlap_themselves"),
    *("whole_numbers_rounded", "narrow_constants_stored", "indices_that_are_known", "convolved_with_itself"),
    *("numbers_without_axes_turned_around", "mutated_then_error"),
    *("idle_channels", "idle_channels_last", "idle_nothing", "idle_told_by_name"),
    *("data_of_views", "layout_conjugated", "without_tensors"),
    *("varying_int_types", "weird_constants", "tensor_method_patched"),
)
"""One of each kind of which plans have once been wrong."""


@pytest.mark.parametrize("name", ALWAYS)
def test_kinds_that_were_wrong(name):
    assert mismatches([name]) == {}


def test_some_programs_every_day():
    names = sorted(name for home in NAMES.values() for name in home)
    assert mismatches(names[int(os.environ["LADDER_TEST_DAY"]) % EVERY :: EVERY]) == {}


@pytest.mark.parametrize("home", NAMES)
def test_all_programs(home, long_test):
    assert mismatches(NAMES[home]) == {}


READS = {
    "equal": lambda x: torch.equal(x, x.abs()),
    "not equal": lambda x: not x.equal(x.abs()),
    "other shape": lambda x: torch.equal(x, x[:1]),
    "allclose": lambda x: torch.allclose(x, x.abs(), atol=1e-3, equal_nan=True),
    "is_nonzero": lambda x: (x > 0).all().is_nonzero(),
    "__bool__": lambda x: (x > 0).all().__bool__(),
    "item": lambda x: (x > 0).all().item(),
}
"""What gives Python's truth of tensors, which no graph holds as it is."""


@pytest.mark.parametrize("name", READS)
def test_truths_of_tensors_leave_graphs_to_plans(name):
    """Torch ran all of a graph that a truth of an operator had decided."""

    def program(x):
        h = x.exp()
        return h * 2 if (found := READS[name](x)) else h - 1, found

    fast = ladder.compile(program)
    with torch.no_grad():
        for rows in (3, 3, 3, 3, 4, 5, 1):
            for x in (torch.ones(rows, 4), torch.full((rows, 4), torch.nan), -torch.ones(rows, 4)):
                (found, truth), (expected, wanted) = fast(x), program(x)
                assert truth is wanted
                torch.testing.assert_close(found, expected, equal_nan=True)
    assert not fast.refused


def test_sides_of_branches_are_told_the_sizes_that_numbers_are_made_of():
    def fn(x, count):
        more = count + 1
        return x * more if x.sum() > 0 else x - more

    fast = ladder.compile(fn)
    for count in range(2, 12):
        x = torch.full((3,), -1.0 if count % 3 else 2.0)
        assert torch.equal(fast(x, count), fn(x, count))
    assert fast.calls["eager"] == 0
