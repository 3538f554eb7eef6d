"""Parts of capture by themselves: conditions on tensors, tables of facts, indices, loops, natives."""

from __future__ import annotations

import bisect
import contextlib
import copy
import heapq
import operator
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx

import ladder
from ladder.capture import capture
from ladder.capture.heap.table import ABSENT, FUNCTION_FIELDS, Field, Objects, Table
from ladder.capture.python.natives import CHANGES
from ladder.capture.trace.loops import repeat, rolled
from ladder.capture.values.indices import Proven, Use
from ladder.capture.values.kinds import has_same_value, same_value
from ladder.capture.values.tensors import bulk_check, metadata_checks

BEFORE = torch.zeros(3, 4)

OTHERS: dict[str, torch.Tensor] = {
    "dtype": torch.zeros(3, 4).double(),
    "shape": torch.zeros(3, 5),
    "rank": torch.zeros(3, 4, 1),
    "strides": torch.zeros(4, 3).t(),
    "gradient": torch.zeros(3, 4, requires_grad=True),
    "layout": torch.zeros(3, 4).to_sparse(),
    "device": torch.zeros(3, 4, device="meta"),
}
"""What differs from `BEFORE` in one thing."""


def holds(tensor: torch.Tensor, left_open: frozenset[int] | None = None) -> bool:
    """Tell whether the conditions that were made for `BEFORE` hold for a tensor."""
    names: dict[str, Any] = {}

    def constant(value: Any) -> str:
        names[f"c{len(names)}"] = value
        return f"c{len(names) - 1}"

    texts = [text for text, _ in metadata_checks(constant, BEFORE, "v", left_open)]
    return all(eval(text, {**names, "v": tensor}) for text in texts)


@pytest.mark.parametrize("what", OTHERS)
def test_conditions_on_one_tensor_tell_it_from_others(what: str) -> None:
    assert holds(torch.ones(3, 4))
    assert not holds(OTHERS[what])


def test_extents_that_are_left_open_may_be_others() -> None:
    left = frozenset({1})
    assert holds(torch.ones(3, 9), left)
    assert not holds(torch.ones(4, 9), left)
    assert not holds(torch.ones(3, 9, 1), left)


def by_order(x: torch.Tensor) -> torch.Tensor:
    return (x + 1 if x.is_contiguous() else x - 1) * x.stride(0)


def test_tensors_of_open_extents_are_contiguous() -> None:
    """Where the others were: their strides follow from their extents."""
    captured = capture(by_order)
    for extent in (4, 5, 6, 7):
        for x in (torch.ones(3, extent), torch.ones(extent, 3).t(), torch.ones(3, 2 * extent)[:, ::2]):
            assert torch.equal(captured(x), by_order(x))


def test_strides_of_open_extents_follow_from_them() -> None:
    captured = capture(by_order)
    for extent in (4, 5, 6, 7, 8):
        assert torch.equal(captured(torch.ones(3, extent)), by_order(torch.ones(3, extent)))
    other = torch.ones(9, 3).t()
    assert torch.equal(captured(other), by_order(other))


@pytest.mark.parametrize("what", OTHERS)
def test_conditions_on_several_tensors_tell_each_from_others(what: str) -> None:
    check = bulk_check([BEFORE, BEFORE.clone()], [None, None])
    assert check(torch.ones(3, 4), torch.ones(3, 4))
    assert not check(torch.ones(3, 4), OTHERS[what])


NAN = float("nan")
VALUES = (
    *(0.0, -0.0, 1.0, NAN, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), 1j),
    *(np.float32(0), np.float32(-0.0)),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_conditions_on_numbers_tell_zeros_apart(value: Any) -> None:
    """Values of one type are the same where they are written alike."""
    for other in (found for found in VALUES if type(found) is type(value)):
        same = repr(other) == repr(value)
        text = same_value("v", value, "constant")
        assert bool(eval(text, {"v": other, "constant": value})) == same
        assert has_same_value(other, value) == same


@pytest.mark.parametrize("home", [OrderedDict, MappingProxyType, dict])
def test_a_name_that_was_missing_is_missed(home: Callable[[Any], Any]) -> None:
    held: dict[str, int] = {"there": 1}
    asked = home(held)
    table = Table()
    table.add(asked, "later", ABSENT, "home")
    table.add(asked, "there", 1, "home")
    table.finish(1)
    assert table.unchanged()
    (held if home is MappingProxyType else asked)["later"] = 2
    assert not table.unchanged()
    assert table.recheck() == 1


KINDS_OF_CHANGE: dict[str, Callable[[dict[str, int]], Any]] = {
    "set": lambda d: operator.setitem(d, "later", 1),
    "update": lambda d: d.update({"other": 1, "later": 2}),
    "in place": lambda d: operator.ior(d, {"later": 1}),
    "made anew": lambda d: d.__init__({"later": 1}),  # type: ignore[misc]
    "default": lambda d: d.setdefault("later", 1),
    "emptied and filled": lambda d: (d.clear(), d.update({"later": 1})),
}


@pytest.mark.parametrize("held", [{}, {"there": 0}], ids=["empty", "filled"])
@pytest.mark.parametrize("how", KINDS_OF_CHANGE)
def test_any_kind_of_change_is_noticed(how: str, held: dict[str, int]) -> None:
    """Also the one of which torch is told nothing on Python 3.12: an empty dictionary takes another whole."""
    home, beside = dict(held), {"x": 1}
    table = Table()
    table.add(home, "later", ABSENT, "home")
    table.add(beside, "x", 1, "beside")
    table.finish(1)
    for _ in range(3):
        assert table.unchanged()
    KINDS_OF_CHANGE[how](home)
    assert not table.unchanged()
    assert table.recheck() == 1
    del home["later"]
    assert table.unchanged()
    home.clear()
    assert table.unchanged()
    home.update(later=5)
    assert not table.unchanged()


def test_empty_dictionaries_are_looked_at_where_torch_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = {"dict_version": lambda _: 1, "changes": None, "CLONES_COUNT": False, "INSTANCES_COUNT": True}
    for name, value in torchs.items():
        monkeypatch.setattr(f"ladder.capture.heap.table.{name}", value)
    home, beside = dict[str, int](), dict[str, int]()
    table = Table()
    table.add(home, "later", ABSENT, "home")
    table.add(beside, "later", ABSENT, "beside")
    table.finish(1)
    assert table.homes
    beside["other"] = 1
    assert all(table.unchanged() for _ in range(3))
    home["later"] = 1
    assert not any(table.unchanged() for _ in range(3))
    del home["later"]
    assert table.unchanged()


def test_what_a_record_changes_itself_is_compared_each_time() -> None:
    home = {"there": 0}
    table = Table()
    table.add(home, "there", 0, "home")
    table.finish(1, restless=[id(home)])
    assert table.unchanged()
    assert not table.homes
    home["there"] = 1
    assert not table.unchanged()


def test_a_change_of_one_table_leaves_others_right() -> None:
    homes = [{"at": number} for number in range(3)]
    tables = [Table() for _ in homes]
    for table, home in zip(tables, homes, strict=True):
        table.add(home, "at", home["at"], "home")
        table.finish(1)
    for turn in range(3):
        assert all(table.unchanged() for table in tables)
        homes[turn]["at"] = 9
        assert [table.unchanged() for table in tables] == [at != turn for at in range(3)]
        homes[turn]["at"] = turn


class Plain:
    """An object whose class and dictionary are guarded."""


class OtherPlain(Plain):
    """A class that it may get."""


class Slotted:
    """One that refers to more than these."""

    __slots__ = ("__dict__", "more")


class Listing(list[int]):
    """One that holds items besides."""


REPLACED: dict[str, Callable[[Any], Any]] = {
    "another class": lambda each: setattr(each, "__class__", OtherPlain),
    "an equal dictionary": lambda each: setattr(each, "__dict__", dict(vars(each))),
    "no dictionary": lambda each: delattr(each, "__dict__"),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_classes_and_dictionaries_of_several_objects_are_compared(what: str, at: int) -> None:
    owners = [Plain() for _ in range(3)]
    for number, owner in enumerate(owners):
        owner.number = number  # type: ignore[attr-defined]
    if not Objects.takes(owners[0], vars(owners[0])):
        pytest.skip("instances hold their values themselves, as Python 3.13's do: they are compared apart")
    objects = Objects({id(owner): (owner, vars(owner), Plain) for owner in owners})
    assert objects.hold()
    owners[0].number = 7  # type: ignore[attr-defined]
    assert objects.hold()
    REPLACED[what](owners[at])
    assert not objects.hold()


@pytest.mark.parametrize("kind", [Slotted, Listing, torch.nn.Parameter, OSError])
def test_objects_that_may_refer_to_more_are_compared_apart(kind: type) -> None:
    owner = kind()
    assert not Objects.takes(owner, vars(owner))


def table_of(*functions: Any) -> Table:
    """Return a table of all fields of functions, as they are."""
    table = Table()
    for function in functions:
        for name in FUNCTION_FIELDS:
            table.add(function, Field(name), getattr(function, name), name)
    table.finish(1)
    return table


def functions_to_change() -> tuple[Any, Any]:
    """Return new functions: one with defaults and what closes over them, one with neither."""
    number = 1.0

    def given(x: float, factor: float = 1.0, *, more: float = 0.0) -> float:
        """Compute."""
        return x * factor + more + number

    def plain(x: float) -> float:
        return x

    return given, plain


CHANGES_OF_FUNCTIONS: dict[str, Callable[[Any, Any], None]] = {
    "code": lambda given, plain: setattr(plain, "__code__", (lambda x: x + 1).__code__),
    "code of one with defaults": lambda given, plain: setattr(
        given, "__code__", given.__code__.replace(co_name="other")
    ),
    "equal default of another type": lambda given, plain: setattr(given, "__defaults__", (1,)),
    "equal default that is another object": lambda given, plain: setattr(given, "__defaults__", (True,)),
    "negative zero": lambda given, plain: setattr(given, "__kwdefaults__", {"more": -0.0}),
    "no defaults": lambda given, plain: setattr(given, "__defaults__", None),
    "no keyword defaults": lambda given, plain: delattr(given, "__kwdefaults__"),
    "first defaults": lambda given, plain: setattr(plain, "__defaults__", ()),
    "first keyword defaults": lambda given, plain: setattr(plain, "__kwdefaults__", {}),
    "default in place of the documentation": lambda given, plain: (
        delattr(plain, "__doc__"),
        setattr(plain, "__defaults__", (1,)),
    )[-1],
    "default in place of the module": lambda given, plain: (
        delattr(plain, "__module__"),
        setattr(plain, "__defaults__", (1,)),
    )[-1],
    "defaults moved from one to the other": lambda given, plain: (
        setattr(plain, "__defaults__", given.__defaults__),
        setattr(given, "__defaults__", None),
    )[-1],
}


@pytest.mark.parametrize("what", CHANGES_OF_FUNCTIONS)
def test_functions_that_were_changed_are_noticed(what: str) -> None:
    given, plain = functions_to_change()
    tables = table_of(given, plain), table_of(plain, given)
    assert all(table.unchanged() and table.recheck() == 0 for table in tables)
    CHANGES_OF_FUNCTIONS[what](given, plain)
    assert not any(table.unchanged() for table in tables)
    assert all(table.recheck() != 0 for table in tables)
    assert table_of(given, plain).unchanged()


def test_a_function_that_is_changed_elsewhere_stays_as_it_was() -> None:
    """Where its code and defaults did not change, a second look says so, and the next is a quick one."""
    given, plain = functions_to_change()
    table = table_of(given, plain)
    for name, value in (("__doc__", "new"), ("__name__", "n"), ("attribute", 3), ("__module__", None)):
        for function in (given, plain):
            setattr(function, name, value)
        assert table.recheck() == 0
        assert table.unchanged()


@pytest.mark.parametrize("name", ["__doc__", "__module__"])
def test_functions_with_odd_parts_are_told_apart(name: str) -> None:
    """A tuple may stand where no string is, before the defaults and in their place."""
    _, plain = functions_to_change()
    part = (1.0,)
    delattr(plain, name)
    plain.__defaults__ = part
    table = table_of(plain)
    assert table.unchanged()
    setattr(plain, name, part)
    plain.__defaults__ = None
    assert not table.unchanged()
    assert table.recheck() == 2


AUDITED = """
import sys
from ladder.capture.heap.table import FUNCTION_FIELDS, Field, Table
made = [eval("lambda x, y=1: x") for _ in range(20)]
table = Table()
for function in made:
    for name in FUNCTION_FIELDS:
        table.add(function, Field(name), getattr(function, name), name)
table.finish(1)
events = []
sys.addaudithook(lambda event, _: events.append(event))
assert table.unchanged()
print(*events)
"""


def test_functions_are_looked_at_with_one_audited_event() -> None:
    run = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True, check=True)
    assert run.stdout.split().count("gc.get_referents") == 1
    assert "object.__getattr__" not in run.stdout


def test_an_index_that_was_written_is_checked_again() -> None:
    index, proven = torch.tensor([1, 2]), Proven()
    proven.add(Use(index, 5, True))
    assert proven.covers(Use(index, 5, True))
    assert proven.covers(Use(index, 9, False))
    assert not proven.covers(Use(index, 4, True))
    index.add_(7)
    assert not proven.covers(Use(index, 5, True))


def graph_of(make: Callable[[torch.fx.Graph, torch.fx.Node], Any]) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(make(graph, graph.placeholder("x")))
    return graph


def products(factors: tuple[float, ...]) -> Callable[[torch.fx.Graph, torch.fx.Node], Any]:
    def make(graph: torch.fx.Graph, x: torch.fx.Node) -> Any:
        values = []
        for factor in factors:
            x = graph.call_function(torch.mul, (x, factor))
            values.append(x)
        return values

    return make


def sums_of_two(graph: torch.fx.Graph, x: torch.fx.Node) -> Any:
    """Each takes those of the two iterations before it."""
    before, last = x, graph.call_function(torch.neg, (x,))
    for _ in range(6):
        before, last = last, graph.call_function(operator.add, (last, before))
    return last


def sums_with_the_first_sum(graph: torch.fx.Graph, x: torch.fx.Node) -> Any:
    """The second takes what the iteration before it made; the others take that, too."""
    last = first = graph.call_function(operator.add, (x, x))
    for _ in range(4):
        last = graph.call_function(operator.add, (last, first))
    return last


def sums_with_the_first(graph: torch.fx.Graph, x: torch.fx.Node) -> Any:
    last = graph.call_function(torch.neg, (x,))
    for _ in range(5):
        last = graph.call_function(operator.add, (last, x))
    return last


@pytest.mark.parametrize(
    ("make", "loops"),
    [
        (products((2.0, 2.0, 2.0)), True),
        (products((0.0, -0.0, 0.0)), True),
        (products((1, 1.0, 1)), False),
        (sums_of_two, True),
        (sums_with_the_first_sum, True),
        (sums_with_the_first, True),
    ],
    ids=[
        "equal numbers",
        "zeros of two signs",
        "numbers of two types",
        "two before",
        "first sum",
        "the first",
    ],
)
def test_loops_compute_what_their_iterations_do(make: Any, loops: bool) -> None:
    graph, x = graph_of(make), torch.tensor([1.0, 3.0])
    root, made = rolled(graph)
    assert any(node.target is repeat for node in made.nodes) == loops
    want = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    got = torch.fx.GraphModule(root, made)(x)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.signbit(), b.signbit())


def pushed(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    return x + heapq.heappushpop(held, 2.5) + len(held)


def replaced(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    return x + heapq.heapreplace(held, 2.5) + held[0]


def added(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    heapq.heappush(held, 0.5)
    bisect.insort(held, 0.25)
    return x + heapq.heappop(held) + held[0]


def in_order(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    held.reverse()
    heapq.heapify(held)
    bisect.insort_left(held, 1.5)
    bisect.insort_right(held, 1.5)
    return x + held[0]


def taken(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    numbers = iter(held)
    return x + next(numbers) + next(numbers)


@pytest.mark.parametrize("program", [pushed, replaced, added, in_order, taken])
def test_natives_that_write_into_lists_have_their_effect(program: Callable[..., torch.Tensor]) -> None:
    captured, x = capture(program), torch.zeros(2)
    for _ in range(4):
        held = [1.0, 2.0, 3.0]
        for _ in range(2):
            own = copy.copy(held)
            assert torch.equal(captured(x, held), program(x, own))
            assert held == own


def test_all_natives_that_write_are_tried() -> None:
    tried = {heapq.heappushpop, heapq.heapreplace, heapq.heappush, heapq.heappop, heapq.heapify, next}
    tried |= {bisect.insort, bisect.insort_left, bisect.insort_right}
    assert {native for native in CHANGES if native.__module__ != "_collections"} == tried


def product(x: torch.Tensor | None) -> torch.Tensor:
    x = torch.ones(2, 2) if x is None else x
    return (x @ x + 1).relu()


STATES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}
READ = (attrgetter("dtype"), attrgetter("requires_grad"), torch.Tensor.is_inference)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("compiler", [capture, ladder.compile], ids=["captured", "compiled"])
@pytest.mark.parametrize("x", [None, torch.ones(2, 2)], ids=["none", "a tensor"])
def test_states_of_torch_are_guarded(name: str, compiler: Callable[..., Any], x: torch.Tensor | None) -> None:
    """Whether or not an argument's conditions would tell."""
    made = compiler(product)
    for turn in range(6):
        with STATES[name]() if turn % 2 else contextlib.nullcontext():
            want, got = product(x), made(x)
        assert [read(got) for read in READ] == [read(want) for read in READ]
        assert torch.equal(got, want)
