"""Guards over what stays notice every change of it, and nothing else."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ladder.capture import capture
from ladder.capture.heap.table import INSTANCES_COUNT, Entry, Table

LAYERS = 10


class Own(nn.Linear):
    """A layer whose class and methods the tests change."""

    bias_of = 0.0

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return super().forward(x) * scale + shift + self.bias_of


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Own(4, 4) for _ in range(LAYERS))).requires_grad_(False).eval()


def calls(layers: nn.Module, change: Callable[[], Any]) -> tuple[int, int]:
    """Call captured layers before and after a change; return how often they were recorded, each time."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    with torch.no_grad():
        captured = capture(layers)
        for _ in range(3):
            assert torch.equal(captured(x), layers(x))
        before = captured.calls["recorded"]
        change()
        found = captured(x)
        assert torch.equal(found, layers(x))
        assert found.requires_grad == layers(x).requires_grad
    assert captured.calls["eager"] == 0
    return before, captured.calls["recorded"]


def at(layers: nn.Module, number: int) -> Any:
    return layers[number]  # type: ignore[index]


def later(self: Any, x: Tensor, scale: float = 3.0, *, shift: float = 0.5) -> Tensor:
    return nn.Linear.forward(self, x) + 100 * scale + shift


TENSORS: dict[str, Callable[[nn.Module], Any]] = {
    "data of other strides": lambda m: setattr(
        at(m, 3).weight, "data", at(m, 3).weight.data.t().contiguous().t()
    ),
    "a gradient is asked for": lambda m: at(m, 4).weight.requires_grad_(True),
    "transposed in place": lambda m: at(m, 5).weight.t_(),
    "swapped": lambda m: torch.utils.swap_tensors(
        at(m, 9).weight, nn.Parameter(torch.ones(4, 4).t(), requires_grad=False)
    ),
    "another class": lambda m: setattr(at(m, 1).bias, "__class__", Tensor),
}

OBJECTS: dict[str, Callable[[nn.Module], Any]] = {
    "a parameter is another": lambda m: setattr(at(m, 2), "weight", nn.Parameter(torch.ones(4, 4), False)),
    "a hook": lambda m: at(m, 6).register_forward_hook(lambda module, given, result: result * 2),
    "an instance has an attribute of its class": lambda m: setattr(at(m, 7), "bias_of", 2.0),
    "another dictionary": lambda m: setattr(at(m, 8), "__dict__", {**vars(at(m, 8)), "bias_of": 3.0}),
    "an object of another class": lambda m: setattr(at(m, 0), "__class__", nn.Linear),
}

CLASSES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "code": lambda patch: patch.setattr(Own.forward, "__code__", _second.__code__),
    "defaults": lambda patch: patch.setattr(Own.forward, "__defaults__", (2.0,)),
    "keyword defaults": lambda patch: patch.setattr(Own.forward, "__kwdefaults__", {"shift": 5.0}),
    "a method": lambda patch: patch.setattr(Own, "forward", later),
    "an attribute": lambda patch: patch.setattr(Own, "bias_of", 7.0),
}


def _closure() -> Any:
    class Other(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
            return super().forward(x) * scale - shift - 1

    return Other.forward


_second = _closure()


@pytest.mark.parametrize("name", [*TENSORS, *OBJECTS])
def test_changes_are_noticed(name: str) -> None:
    layers = model()
    change = (TENSORS | OBJECTS)[name]
    before, after = calls(layers, lambda: change(layers))
    assert (before, after) == (1, 2)


@pytest.mark.parametrize("name", CLASSES)
def test_changes_of_classes_and_functions_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()
    before, after = calls(layers, lambda: CLASSES[name](monkeypatch))
    assert (before, after) == (1, 2)


def test_other_bases_are_noticed() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Based(nn.Linear):
        pass

    layers = nn.Sequential(*(Based(4, 4) for _ in range(LAYERS))).requires_grad_(False)
    assert calls(layers, lambda: setattr(Based, "__bases__", (Doubled,))) == (1, 2)


def test_what_changes_nothing_is_no_miss() -> None:
    layers = model()

    def harmless() -> None:
        for layer in layers:
            layer.weight.data = layer.weight.data.clone()  # other memory of the same form
            layer.weight.add_(1)
            layer.bias.requires_grad_(True)
            layer.bias.requires_grad_(False)
            layer.note = 1
        layers[3].register_forward_hook(lambda module, given, result: None).remove()

    assert calls(layers, harmless) == (1, 1)


def test_variables_of_the_environment_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * (2.0 if os.environ.get("LADDER_TEST_SCALE") else 3.0)

    x = torch.ones(3)
    captured = capture(scaled)
    assert torch.equal(captured(x), 3 * x)
    monkeypatch.setenv("LADDER_TEST_OTHER", "1")
    assert torch.equal(captured(x), 3 * x)
    assert captured.calls["recorded"] == 1
    monkeypatch.setenv("LADDER_TEST_SCALE", "1")
    assert torch.equal(captured(x), 2 * x)
    assert captured.calls["recorded"] == 2


@pytest.mark.parametrize("key", ["other", "pin", "is", "len"])
def test_a_dictionary_read_by_any_key_is_still_told_from_another(key: str) -> None:
    known = {key: 1.0}
    home: dict[str, Any] = {"known": known, "key": key}
    exec("def function(x, d):\n    y = x * d[key]\n    return y * (2 if d is known else 3)", home)
    captured, x = capture(home["function"]), torch.ones(2)
    for given in (known, {key: 1.0}, known):
        assert torch.equal(captured(x, given), home["function"](x, given))


def test_the_default_of_a_dictionary_is_told_from_its_entries() -> None:
    def function(x: Tensor, d: Any) -> Tensor:
        return x * d["default_factory"] + d["missing"]

    captured, x = capture(function), torch.ones(2)
    for factory in (float, int, lambda: 5.0, lambda: 7.0):
        given = [defaultdict(factory, default_factory=1.0) for _ in range(2)]
        assert torch.equal(captured(x, given[0]), function(x, given[1]))


COUNTS: defaultdict[str, int] = defaultdict(int)


def test_the_default_of_a_dictionary_that_stays_is_guarded_once() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * (COUNTS["a"] + 2)
        del COUNTS["a"]
        return y

    captured, x = capture(function), torch.ones(2)
    for _ in range(3):
        assert torch.equal(captured(x), 2 * x)
    assert captured.calls["recorded"] == 1
    COUNTS.default_factory = lambda: 5
    assert torch.equal(captured(x), 7 * x)


class Shared:
    """An object whose dictionary may be that of another."""

    def __init__(self) -> None:
        self.kept: Any = None


STAYS = Shared()


def marks_what_stays(x: Tensor, other: Shared) -> Tensor:
    before = other.kept
    STAYS.kept = 5
    after = other.kept
    return x + (1 if before is after else 2)


def test_an_object_that_turns_out_to_be_one_that_is_changed_is_noticed() -> None:
    """Its dictionary, too, may be the one that is changed."""
    x, captured = torch.zeros(2), capture(marks_what_stays)
    borg = Shared()
    borg.__dict__ = STAYS.__dict__
    for other in (Shared(), Shared(), borg, STAYS, Shared()):
        STAYS.kept = None
        expected = marks_what_stays(x, other)
        STAYS.kept = None
        assert torch.equal(captured(x, other), expected)
        assert STAYS.kept == 5


def test_tensors_that_turn_out_to_be_one_are_noticed_where_they_are_written() -> None:
    def adds(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    captured = capture(adds)
    for make in (lambda: (torch.ones(2), torch.ones(2)), lambda: (torch.ones(2),) * 2):
        for _ in range(2):
            assert torch.equal(captured(*make()), adds(*make()))


def test_that_a_leaf_cannot_be_written_says_nothing_of_other_tensors() -> None:
    def doubles(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    captured, leaf = capture(doubles), torch.ones(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="leaf"):
            captured(leaf)
        assert torch.equal(captured(leaf * 1), torch.full((3,), 4.0))


EQUAL_KEYS = (1, True, 1.0, (1, 0.0), (True, 0.0), (1, -0.0), (1.0, frozenset({2})), (1.0, frozenset({2.0})))


@pytest.mark.parametrize("kind", [dict, set])
def test_equal_keys_of_other_kinds_are_told_apart(kind: Callable[[Any], Any]) -> None:
    held: Any = kind([(2, 2)] if kind is dict else [2])

    def named(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x + len(held), repr(list(held))

    fast = capture(named)
    for key in (*EQUAL_KEYS, *EQUAL_KEYS):
        held.clear()
        held.update({key: 2} if kind is dict else {key})
        assert fast(torch.ones(2))[1] == repr([key])


@pytest.mark.skipif(not INSTANCES_COUNT, reason="instances hold their values themselves, as Python 3.13's do")
def test_the_second_call_looks_into_no_dictionary_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()
    fast = capture(layers)
    x = torch.ones(1, 4)
    wanted = fast(x)
    assert Own.forward.__annotations__  # reading them changes what the function refers to
    monkeypatch.setattr(Table, "recheck", lambda table: pytest.fail("all facts are looked at"))
    looked = []
    monkeypatch.setattr(Entry, "holds", lambda entry: looked.append(entry) or entry.found() is entry.value)
    assert torch.equal(fast(x), wanted)
    assert not [entry for entry in looked if isinstance(entry.home, dict)]
    assert fast.calls["recorded"] == 1


class Replacing(nn.Module):
    """Replaces what it reads in every call, as detectors do with the cells of their anchors."""

    def __init__(self, item: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
        self.cells = [torch.ones(3), torch.zeros(3)]
        self.by_name = {"first": torch.ones(3)}
        self.item = item

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.last + x)
        self.cells = [self.item(cell) for cell in self.cells]
        self.by_name = {name: self.item(cell) + x for name, cell in self.by_name.items()}
        return x + self.cells[0] * self.cells[1] + self.by_name["first"] + self.last


@pytest.mark.parametrize("item", [lambda cell: cell.to(torch.float32), lambda cell: cell + 0.5])
def test_what_a_record_replaces_is_left_open_at_its_first_miss(item: Any) -> None:
    plain, model = Replacing(item), Replacing(item)
    captured = capture(model)
    with torch.no_grad():
        for number in range(6):
            x = torch.full((3,), number / 4)
            assert torch.equal(captured(x), plain(x))
    assert captured.calls == {"recorded": 2, "eager": 0}
    assert torch.equal(model.last, plain.last)
