"""Compiled functions as objects: called by threads and by themselves, copied, kept in classes and modules."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.capture import capture

MAKERS = [capture, ladder.compile]


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", MAKERS)
def test_called_by_threads(make: Any) -> None:
    def function(x: Tensor, scale: float, table: dict[str, Any]) -> Tensor:
        y = torch.relu(x) * scale + len(table)
        table[str(len(table))] = y
        return y.cumsum(0)

    fast, wrong = make(function), []

    def work(number: int) -> None:
        table: dict[str, Any] = {}
        same: dict[str, Any] = {}
        for turn in range(12):
            x, scale = rows(1 + (number + turn) % 4, turn), float(turn % 3)
            found, expected = fast(x, scale, table), function(x, scale, same)
            if not torch.allclose(found, expected) or len(table) != len(same):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("make", MAKERS)
def test_calls_itself(make: Any) -> None:
    def function(x: Tensor, n: int) -> Tensor:
        if n == 0:
            return x
        return held[0](x * 2, n - 1) + x.sum()

    held: list[Any] = [function]
    expected = [function(rows(2), n) for n in (3, 0, 2, 4)]
    held[0] = make(function)
    for n, result in zip((3, 0, 2, 4), expected, strict=True):
        torch.testing.assert_close(held[0](rows(2), n), result)


@pytest.mark.parametrize("make", MAKERS)
def test_called_again_by_what_it_calls(make: Any) -> None:
    """A hook, a comparison of a sort and an ``__eq__`` call the function that runs."""
    log: list[float] = []

    class Item:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __lt__(self, other: Item) -> bool:
            return bool(fast(self.x, []) < fast(other.x, []))

    def function(x: Tensor, items: list[Any]) -> Tensor:
        found = [item.x for item in sorted(items)]
        log.append(len(found))
        return sum(found, x).sum()

    fast = make(function)
    for count in (0, 2, 3, 3, 1):
        items = [Item(rows(1, seed)) for seed in range(count)]
        first, known = fast(rows(1), items), len(log)
        log.clear()
        torch.testing.assert_close(first, sum((item.x for item in items), rows(1)).sum())
        assert known >= 2 * max(count - 1, 0) + 1


@pytest.mark.parametrize("make", MAKERS)
def test_copied(make: Any) -> None:
    scale = [2.0]
    fast = make(lambda x: x * scale[0])
    fast(rows(2))
    for twin in (copy.copy(fast), copy.deepcopy(fast)):
        for scale[0] in (2.0, 3.0, 2.0):
            torch.testing.assert_close(twin(rows(2)), rows(2) * scale[0])
            torch.testing.assert_close(fast(rows(2)), rows(2) * scale[0])


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0
        self.activation = make(lambda x: torch.relu(x) + 1)
        self.forward = make(self.forward)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.activation(x * self.scale)


@pytest.mark.parametrize("make", MAKERS)
def test_kept_in_a_module_that_is_copied(make: Any) -> None:
    model = Model(make)
    with torch.no_grad():
        for number in range(3):
            torch.testing.assert_close(model(rows(2, number)), torch.relu(rows(2, number) * 2) + 1)
        twin = copy.deepcopy(model)
        twin.scale.mul_(2)
        torch.testing.assert_close(model(rows(2)), torch.relu(rows(2) * 2) + 1)
        torch.testing.assert_close(nn.Module.__call__(twin, rows(2)), torch.relu(rows(2) * twin.scale) + 1)


@pytest.mark.parametrize("make", MAKERS)
def test_methods_of_classes(make: Any) -> None:
    class Counter:
        total = 0

        def __init__(self, scale: float) -> None:
            self.scale = scale

        @make
        def run(self, x: Tensor) -> Tensor:
            self.total += 1
            return x * self.scale + self.total

        @staticmethod
        @make
        def twice(x: Tensor) -> Tensor:
            return x * 2

        @classmethod
        def made(cls, x: Tensor) -> Tensor:
            cls.total += 10
            return x + cls.total

        made_fast = classmethod(make(lambda cls, x: cls.made(x)))

    first, second = Counter(2.0), Counter(3.0)
    for turn in range(1, 5):
        torch.testing.assert_close(first.run(rows(2)), rows(2) * 2 + turn)
        torch.testing.assert_close(second.run(rows(2)), rows(2) * 3 + turn)
        torch.testing.assert_close(Counter.twice(rows(turn)), rows(turn) * 2)
    for turn in range(1, 4):
        torch.testing.assert_close(Counter.made_fast(rows(2)), rows(2) + Counter.total)
        assert Counter.total == 10 * turn


def test_texts_of_tensors_are_strings_from_the_first_call_on():
    class Holder:
        pass

    def program(x, holder):
        holder.name = f"{x.sum():.2f}"
        holder.parts = {"k": f"{x.sum():.1f}", "t": (f"{x.sum()} a", 1)}
        return [f"{x.sum():.3f}", holder.parts["t"]], x + 1

    fast, holder = capture(program), Holder()
    for _ in range(3):
        (text, inner), _ = fast(torch.ones(3), holder)
        found = (text, inner[0], holder.name, holder.parts["k"], holder.parts["t"][0])
        assert found == ("3.000", "3.0 a", "3.00", "3.0", "3.0 a")
        assert {type(item) for item in found} == {str}


class Doubled:
    """A descriptor in Python that keeps what is set in the instance."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, instance, owner=None):
        return self if instance is None else getattr(instance, self.name) * 2

    def __set__(self, instance, value):
        setattr(instance, self.name, value + 1)

    def __delete__(self, instance):
        delattr(instance, self.name)


class Described:
    value = Doubled()

    def __init__(self, x):
        self.value = x


def test_descriptors_in_python_are_set_and_deleted_in_the_graph():
    def program(x, kept):
        made = Described(x)
        kept.value = made.value
        del made.value
        return kept.value, vars(made)

    mine, its, fast = Described(0), Described(0), capture(program)
    for number in range(4):
        x = torch.full((3,), float(number))
        (found, left), (expected, its_left) = fast(x, mine), program(x, its)
        assert torch.equal(found, expected)
        assert torch.equal(mine._value, its._value)
        assert left == its_left == {}
    assert fast.outcome == "whole"


def test_recurrent_layers_behind_computed_weights_are_one_graph() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.LSTM(4, 5)).eval()
    x, captured = torch.randn(2, 3, 4), capture(model)
    for _ in range(2):
        torch.testing.assert_close(captured(x)[0], model(x)[0])
    assert captured.outcome == "whole", captured.explain()


BACKEND = """
made = {}

class Backend:
    def __init__(self):
        from . import inside
        self.scale = inside.SCALE

def backend():
    if "torch" not in made:
        made["torch"] = Backend()
    return made["torch"]
"""

REQUIREMENT = """
from importlib.metadata import PackageNotFoundError, version

class Requirement:
    met = None

    def __bool__(self):
        if self.met is None:
            try:
                self.met = bool(version("no package of this name"))
            except PackageNotFoundError as error:
                self.met, self.why = False, f"{error}"
        return self.met

class Backend:
    scale = 3

needed = Requirement()

def backend():
    return None if needed else Backend
"""

IMPORT = """
import importlib

class Backend:
    def __init__(self, scale):
        self.scale = scale

def backend():
    {way}
    return Backend(inside.SCALE)
"""
LIBRARIES = {
    "backend": BACKEND,
    "requirement": REQUIREMENT,
    "import": IMPORT.format(way="from . import inside"),
    "import by name": IMPORT.format(way="inside = importlib.import_module('lazy_library.inside')"),
}


@pytest.mark.parametrize("text", LIBRARIES.values(), ids=[*LIBRARIES])
def test_what_a_library_sets_up_in_its_first_call_does_not_stop_the_second(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "lazy_library"
    home.mkdir()
    (home / "__init__.py").write_text(text)
    (home / "inside.py").write_text("SCALE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_library", "lazy_library.inside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    library = importlib.import_module("lazy_library")
    captured, x = capture(lambda x: x * library.backend().scale), torch.ones(3)
    for _ in range(4):
        assert torch.equal(captured(x), 3 * x)
    assert (captured.outcome, captured.calls["eager"]) == ("whole", 0), captured.explain()
