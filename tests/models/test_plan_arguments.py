"""What plans know of their arguments from call to call, of sizes that are open, and of where results lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.fx

import ladder
from ladder.api.compiler import BySizes
from ladder.capture.values.aliasing import aliasing_of
from ladder.runtime.kernel import ALIGNMENT
from ladder.runtime.model import build
from ladder.runtime.model.arguments import CallArguments
from ladder.runtime.model.joined import Join, Joined
from ladder.runtime.model.memory import Block, Result, rounded_up
from ladder.runtime.model.sizes import NUMBER, reader

CPU = torch.device("cpu")


def looks(arguments: CallArguments, *values: Any, times: int = 3) -> list[bool]:
    return [arguments.look(values).apart for _ in range(times)]


@pytest.mark.parametrize(("read", "write"), [((0, 10), (5, 20)), ((5, 20), (0, 10)), ((0, 20), (5, 10))])
def test_what_is_read_and_what_is_written_meet_whichever_begins_first(
    read: tuple[int, int], write: tuple[int, int]
) -> None:
    memory = torch.zeros(32)
    values = (memory[slice(*read)], memory[slice(*write)])
    assert looks(CallArguments([1]), *values) == [False] * 3
    assert looks(CallArguments([1]), memory[20:], memory[:20]) == [True] * 3


def test_a_tensor_with_gaps_reaches_to_its_last_element() -> None:
    memory = torch.zeros(40)
    gaps = memory.view(4, 10)[:, :2]
    assert looks(CallArguments([1]), gaps, memory[20:25]) == [False] * 3
    assert looks(CallArguments([1]), gaps, memory[32:]) == [True] * 3


@pytest.mark.parametrize(("shape", "steps"), [((3, 4), (0, 1)), ((3, 2), (1, 1)), ((2, 2, 2), (4, 1, 1))])
def test_what_is_written_may_not_overlap_itself(shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
    memory = torch.zeros(40)
    overlaps = memory.as_strided(shape, steps)
    assert looks(CallArguments([0]), overlaps, memory[20:]) == [False] * 3
    assert looks(CallArguments([1]), overlaps, memory[20:]) == [True] * 3
    lies = memory.view(2, 4, 5).permute(2, 0, 1)[::2, :, :1]
    assert looks(CallArguments([0]), lies) == [True] * 3


@pytest.mark.parametrize(("first", "last"), [(0, 4), (2, 5), (4, 8), (9, 12), (14, 22), (20, 24), (23, 30)])
def test_what_moves_is_found_among_several_that_are_written(first: int, last: int) -> None:
    """Written are 4 to 8, 10 to 14 and 18 to 22; what has no elements meets nothing."""
    memory, elsewhere = torch.zeros(32), torch.zeros(4)
    written = memory[18:22], memory[4:8], memory[6:6], memory[10:14]
    arguments = CallArguments([1, 2, 3, 4])
    assert all(arguments.look((elsewhere.clone(), *written)).apart for _ in range(3))
    meets = any(first < end and begin < last for begin, end in ((4, 8), (10, 14), (18, 22)))
    assert arguments.look((memory[first:last], *written)).apart is not meets
    assert arguments.look((memory[first:first], *written)).apart


def test_arrays_made_of_arguments_are_made_anew_only_where_a_part_changed() -> None:
    parts, x = [torch.ones(2, 3), torch.ones(4, 3)], torch.ones(1)
    joined, arguments = Joined([Join((1, 2), 0)]), CallArguments([0])

    def made() -> torch.Tensor:
        values = (x, *parts)
        generation = arguments.look(values).generation
        return joined.of(values, generation if arguments.stay(joined.places) else 0)[0]

    def change_data() -> None:
        parts[0].data = torch.full((2, 3), 9.0)

    changes = (lambda: parts[0].mul_(2), lambda: parts.__setitem__(1, torch.zeros(4, 3)), change_data)
    for change in changes:
        before = [made() for _ in range(4)]
        assert all(each is before[0] for each in before)
        change()
        assert torch.equal(made(), torch.cat(parts))


def test_an_argument_that_grew_in_place_is_another() -> None:
    memory = torch.zeros(32)
    grows, written = torch.empty(0).set_(memory.untyped_storage(), 0, (5,)), memory[10:20]
    arguments = CallArguments([1], are_open=True)
    assert looks(arguments, grows, written) == [True] * 3
    before = arguments.look((grows, written)).generation
    grows.set_(memory.untyped_storage(), 0, (15,))
    after = arguments.look((grows, written))
    assert (after.generation, after.apart) == (before + 1, False)


def test_sizes_are_read_off_the_axes_that_show_them() -> None:
    assert reader([(0, 1), (1, NUMBER), (0, 0)])([torch.zeros(2, 3), 7]) == (3, 7, 2)


def test_results_larger_than_those_of_their_class_have_room() -> None:
    """A shape may shrink where sizes grow: 9 and 10 are of one class, and 10 is what it is laid out for."""
    assert rounded_up(9) == rounded_up(10) == 10
    results = [Result(name, ("1000 - 100*n",), torch.float32, 0, 1) for name in "ab"]
    block = Block(results, ("n",), CPU)
    block.buffers((10,))
    first, second = (buffer.data_ptr() for buffer in block.buffers((9,)))
    assert abs(second - first) >= 100 * 4


def test_small_results_of_many_sizes_share_few_layouts() -> None:
    """A text that grows by one token after the other lays results out three times, not every few tokens."""
    names = ("rows", "tokens")
    shapes = ("rows", "tokens"), ("rows", 8), ("tokens", "tokens"), ("rows", "tokens", 4)
    results = [Result(str(at), shape, torch.float32, at, at + 1) for at, shape in enumerate(shapes)]
    block = Block(results, names, CPU)
    for tokens in range(5, 33):
        held = block.buffers((3, tokens))
        assert [buffer.shape for buffer in held[:3]] == [(3, tokens), (3, 8), (tokens, tokens)]
        for written, other in pairwise(held):  # those that are alive at one time
            written.fill_(1.0)
            other.fill_(2.0)
            assert bool((written == 1.0).all())
    assert len(block._layouts) == 3


def test_large_results_have_room_for_a_quarter_more() -> None:
    results = [Result("a", ("n", 1 << 14), torch.float32, 0, 1)]
    block = Block(results, ("n",), CPU)
    block.buffers((129,))
    assert block.memory.numel() == rounded_up(129) << 16 == 160 << 16


def test_numbers_decide_which_plan_runs() -> None:
    module = torch.fx.symbolic_trace(lambda x, number: x * number)

    def make(module: Any, values: Sequence[Any]) -> Any:
        number = values[1]
        return lambda x, _: x * number

    plans = BySizes(module, make, module, lambda: None)
    x = torch.ones(2)
    for number in (2, 3, 2):
        assert plans(x, number).tolist() == [number, number]


def test_results_lie_as_the_programs_for_every_size() -> None:
    """What no one plan serves: strides are those of the call, not of the sizes that were recorded."""
    module = torch.fx.symbolic_trace(lambda x: x.transpose(1, 2)[:, :3])
    first = torch.randn(2, 4, 8)
    module.meta = {"open": [first], "aliasing": aliasing_of([first], module(first))}
    steps = []

    def make(module: Any, values: Sequence[Any]) -> Any:
        steps.append(module.meta["aliasing"].strides[0].steps)
        return module.forward

    plans = BySizes(module, make, module, lambda: None)
    for tokens in (4, 7, 7, 12):
        x = torch.randn(2, tokens, 8)
        assert plans(x).stride() == steps[-1] == (8 * tokens, 1, 8)
    assert len(steps) == 3


def test_sizes_that_depend_on_values_are_run_by_torch() -> None:
    """How the results of such a graph lie is not known ahead of a call."""
    module = torch.fx.symbolic_trace(lambda x: (x.nonzero(), x.t()[:1]))
    first = torch.eye(4)
    module.meta = {"open": [first], "aliasing": aliasing_of([first], module(first))}
    plans = BySizes(module, lambda *_: None, module.forward, lambda: None)  # type: ignore[arg-type]
    for size in (4, 5, 5):
        assert plans(torch.eye(size))[0].shape == (size, 2)


CONSTANTS = {
    "computed": lambda: torch.linspace(0, 1, 3),
    "held": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "views": lambda: torch.tensor([1.0, 2.0, 3.0]).view(3, 1),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_results_that_are_the_same_in_every_call_belong_to_the_caller(name: str) -> None:
    make = CONSTANTS[name]
    compiled, x = ladder.compile(lambda x: (x + 1, make())), torch.ones(2, 3)
    with torch.no_grad():
        for _ in range(4):
            first, second = compiled(x)
            assert torch.equal(first, x + 1)
            assert torch.equal(second, make())
            second.fill_(7)
            first.fill_(7)
    assert not compiled.refused


class Entry:
    """In place of a kernel: notes where its tensors begin."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.begins: list[int] = []

    def __call__(self, *values: Any) -> None:
        self.begins += [value.data_ptr() for value in values if isinstance(value, torch.Tensor)]
        self.entry(*values)


def test_kernels_are_given_tensors_that_begin_where_vectors_may(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[Entry] = []
    load = build.load_entry

    def noted(kernel: Any, family: str) -> Entry:
        entries.append(Entry(load(kernel, family)))
        return entries[-1]

    monkeypatch.setattr(build, "load_entry", noted)
    compiled = ladder.compile(lambda x: torch.relu(x) * 2 + 1)
    memory = torch.randn(4 * 8 + 1)
    x = memory[1:].view(4, 8)
    assert x.data_ptr() % ALIGNMENT
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), torch.relu(x) * 2 + 1)
    begins = [begin for entry in entries for begin in entry.begins]
    assert begins
    assert not any(begin % ALIGNMENT for begin in begins)


def test_states_of_memory_that_was_replaced_are_dropped() -> None:
    """And those of memory that stays are kept."""
    layer = torch.nn.Linear(16, 16)
    compiled = ladder.compile(lambda x: layer(torch.relu(layer(x)) + 1).exp())
    seen = []
    with torch.no_grad():
        for rows in (2, 3, 40, 3, 39, 900):
            compiled(torch.randn(rows, 16))
            seen += [(f.memory.open.grown, len(f.states)) for f in compiled.models[-1].executable._frames]
    assert seen == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
