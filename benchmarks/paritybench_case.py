"""One test case of ParityBench: its calls by eager torch, twice, and by what is compiled."""

from __future__ import annotations

import copy
import importlib
import random
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import TestCase
from unittest.mock import MagicMock

import numpy
import torch
from torch.utils._pytree import tree_map

import ladder
from ladder.capture.python.frames import user_line
from ladder.capture.python.words import words
from ladder.faults import LadderWarning

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Of numbers, relative to a result's largest; others `WIDE`."""
WIDE = 1e-3

SEED = 1337

LIBRARIES = tuple(words("matplotlib pandas scipy sklearn tensorflow torchaudio torchtext torchvision"))
"""What files import, used or not; mocked where it is missing."""

HELPERS = "_paritybench_helpers"


class Late(BaseException):
    """A case took too long."""


class Uncounted(Exception):
    """Eager torch does not run a case, or not twice alike."""


class MockedModule(types.ModuleType):
    """A library that is missing: every attribute is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class MockedLibraries:
    """Finds libraries that cannot be imported, and what lies in them."""

    def __init__(self) -> None:
        self.names = {name for name in LIBRARIES if not _is_importable(name)}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return how to load one of the libraries."""
        from importlib.machinery import ModuleSpec

        is_one = name.partition(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if is_one else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a mock."""
        return MockedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: mocks have no code."""


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]
        return False
    return True


def mock_missing() -> None:
    """Let files import the libraries that this machine lacks."""
    sys.modules[HELPERS] = helpers()
    sys.meta_path.insert(0, MockedLibraries())


class MockConfig(dict[str, Any]):
    """A configuration whose keys are attributes."""

    __getattr__ = dict.__getitem__


class MockLayer(torch.nn.ReLU):
    """A layer that a file takes from elsewhere."""

    expansion = 1


def mock_layer(in_features: Any = None, out_features: Any = None, *_: Any, **options: Any) -> Any:
    """Return a linear layer where sizes are given, else an activation."""
    sized = in_features and out_features
    return torch.nn.Linear(in_features, out_features, **options) if sized else MockLayer()


def united_functional() -> None:
    """Give `torch.functional` and `torch.nn.functional` each other's functions: files call both ``F``."""
    both = torch.functional, torch.nn.functional
    names = {name: getattr(part, name) for part in both for name in dir(part) if name[0].islower()}
    for part in both:
        for name in names.keys() - set(dir(part)):
            setattr(part, name, names[name])


def helpers() -> types.ModuleType:
    """Return what every file of the corpus imports."""
    module = types.ModuleType(HELPERS)
    layers = {"_mock_config": MockConfig, "_mock_layer": mock_layer, "patch_functional": united_functional}
    tests = {"_paritybench_base": TestCase, "_fails_compile": lambda: lambda function: function}
    vars(module).update(layers, **tests)
    return module


def cases_of(path: Path) -> list[Any]:
    """Return the test cases of a file: (class, its arguments, those of a call, whether torch scripts it)."""
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    text = path.read_text(encoding="utf-8", errors="replace")
    exec(compile(text, str(path), "exec"), vars(module))
    return list(getattr(module, "TESTCASES", ()))


# ---- one case --------------------------------------------------------------------------
Arguments = tuple[list[Any], dict[str, Any]]


def seeded() -> None:
    """Start all random numbers anew."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


@dataclass(frozen=True)
class Case:
    """A class of modules, what makes its arguments and those of a call, and the device."""

    kind: type[torch.nn.Module]
    make_arguments: Callable[[], Arguments]
    make_inputs: Callable[[], Arguments]
    device: str = "cpu"

    def module(self) -> torch.nn.Module:
        """Return a new module for inference, always with the same weights."""
        seeded()
        args, kwargs = self.make_arguments()
        return self.kind(*args, **kwargs).eval().to(self.device)

    def calls(self) -> list[Arguments]:
        """Return the arguments of four calls: two of one size, then two of twice the batch."""
        seeded()
        made = [self.make_inputs() for _ in range(6)]
        larger = [joined(made[2], made[3]), joined(made[4], made[5])]
        return [tree_map(self._moved, each) for each in [*made[:2], *larger]]

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value


def joined(first: Any, second: Any) -> Any:
    """Return arguments in which tensors of two calls follow each other along their first axis."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second]) if first.ndim else first
    if isinstance(first, list | tuple):
        return type(first)(joined(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {name: joined(value, second[name]) for name, value in first.items()}
    return first


@dataclass(frozen=True)
class Called:
    """What a call gave, its arguments after it, and the state of random numbers."""

    result: Any
    arguments: Arguments
    random_state: torch.Tensor


def called(module: Callable[..., Any], given: Arguments) -> Called:
    """Call a module with copies of arguments and the usual seed."""
    args, kwargs = copy.deepcopy(given)
    seeded()
    result = module(*args, **kwargs)
    return Called(result, (args, kwargs), torch.get_rng_state())


def eager(case: Case) -> tuple[list[Arguments], list[Called], dict[str, torch.Tensor]]:
    """Return the calls that eager torch takes, what they give, and the module's tensors after them.

    Raises `Uncounted` where it takes none, or a second module gives other results.
    """
    try:
        calls, modules = case.calls(), [case.module(), case.module()]
        given = [calls[0]]
        found = [[called(module, calls[0])] for module in modules]
    except Exception as error:
        raise Uncounted(said(error)) from error
    for call in calls[1:]:
        with suppress(Exception):
            pair = [called(copy.deepcopy(module), call) for module in modules]
            if not differs(pair[0], pair[1]):
                found[0].append(called(modules[0], call))
                found[1].append(called(modules[1], call))
                given.append(call)
    if text := differs(found[0], found[1]):
        raise Uncounted(f"not twice alike: {text}")
    return given, found[0], dict(modules[0].state_dict())


def differs(wanted: Any, found: Any, path: str = "") -> str:
    """Return where and how two values differ; empty if they do not, or cannot be compared."""
    if isinstance(wanted, torch.Tensor):
        return f"{path} {text}" if (text := _tensors_differ(wanted, found)) else ""
    if type(wanted) is not type(found):
        return f"{path} {type(found).__name__}, eager has {type(wanted).__name__}"
    if isinstance(wanted, Called):
        return differs(vars(wanted), vars(found), path)
    if isinstance(wanted, dict):
        first, second = ({str(name): item for name, item in each.items()} for each in (wanted, found))
        return _items_differ(first, second, path)
    if isinstance(wanted, list | tuple):
        return _items_differ(dict(enumerate(wanted)), dict(enumerate(found)), path)
    if isinstance(wanted, bool | int | str | bytes | type(None)):
        return "" if wanted == found else f"{path} {found!r}, eager has {wanted!r}"
    if isinstance(wanted, float):
        same = wanted == found or wanted != wanted != found or abs(wanted - found) <= WIDE * abs(wanted)
        return "" if same else f"{path} {found!r}, eager has {wanted!r}"
    return ""


def _items_differ(wanted: dict[Any, Any], found: dict[Any, Any], path: str) -> str:
    if list(wanted) != list(found):
        return f"{path} keys {list(found)[:6]}, eager has {list(wanted)[:6]}"
    texts = (differs(value, found[name], f"{path}[{name}]") for name, value in wanted.items())
    return next(filter(None, texts), "")


def _tensors_differ(wanted: torch.Tensor, found: Any) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{type(found).__name__}, eager has a tensor"
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(found, name) != getattr(wanted, name):
            return f"{name} {getattr(found, name)}, eager has {getattr(wanted, name)}"
    if wanted.layout is not torch.strided or not wanted.numel():
        return ""
    if wanted.is_complex():
        wanted, found = torch.view_as_real(wanted.resolve_conj()), torch.view_as_real(found.resolve_conj())
    a, b = wanted.detach().double(), found.detach().double()
    finite = a.isfinite()
    if not a[~finite].nan_to_num(nan=0.5).equal(b[~finite].nan_to_num(nan=0.5)):
        return "infinities or NaNs elsewhere"
    error = (a - b)[finite].abs().nan_to_num(torch.inf)
    if not error.numel():
        return ""
    allowed = TOLERANCE.get(wanted.dtype, WIDE * wanted.is_floating_point()) * float(a[finite].abs().max())
    return (
        "" if float(error.max()) <= allowed else f"values by {float(error.max()):.3g}, allowed {allowed:.3g}"
    )


def said(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Late` after some seconds."""

    def late(*_: Any) -> None:
        raise Late(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(case: Case, seconds: float) -> tuple[str, list[str]]:
    """Return the outcome of a case (one of `OUTCOMES`), and what is to be said of it."""
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with limited(seconds):
                given, wanted, state = eager(case)
        except (Uncounted, Late) as error:
            return "uncounted", [said(error)]
        try:
            with limited(seconds):
                outcome, notes = compared(case, given, wanted, state)
        except Late as error:
            return "late", [str(error)]
        ours = {str(each.message)[:300] for each in warned if issubclass(each.category, LadderWarning)}
    return outcome, [*notes, *sorted(ours)]


def compared(
    case: Case, given: list[Arguments], wanted: list[Called], state: dict[str, torch.Tensor]
) -> tuple[str, list[str]]:
    """Make the calls by a compiled module; return the outcome and reasons."""
    module = case.module()
    fast = ladder.compile(module)
    for number, (call, expected) in enumerate(zip(given, wanted, strict=True)):
        try:
            found = called(fast, call)
        except Exception as error:
            return "raised", [f"call {number}: {said(error)}"]
        if text := differs(expected, found):
            return "different", [f"call {number}:{text}"]
    if text := differs(state, dict(module.state_dict())):
        return "different", [f"module:{text}"]
    breaks = sorted({f"{user_line(record.where)}: {record.split}" for record in fast.records if record.split})
    if fast.outcome == "whole":
        return ("refused" if fast.refused else "right"), list(fast.refused)
    lines = (line.strip() for line in fast.explain().splitlines())
    told = [line for line in lines if "without capture" in line or "not recorded" in line]
    return fast.outcome, breaks or told


def taken_by_torch(case: Case) -> str:
    """Return why torch's capture takes no whole graph; empty if it takes one."""
    torch._dynamo.reset()
    fast = torch.compile(case.module(), backend="eager", fullgraph=True)
    try:
        with torch.no_grad():
            called(fast, case.calls()[0])
    except Exception as error:
        return said(error)
    return ""
