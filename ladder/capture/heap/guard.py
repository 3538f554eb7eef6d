"""The guard of a record: conditions on what a call finds, and the names that its code uses.

Each line binds a variable or is a condition; what is read of objects that stay is in a `Table`. The same
variables and constants are used by the mock, so both are one function's code.
"""

from __future__ import annotations

from typing import Any

from ladder.capture.heap.nodes import Check
from ladder.capture.heap.table import Table
from ladder.capture.values.aliasing import are_apart
from ladder.capture.values.kinds import same_value
from ladder.capture.values.tensors import STATE, autocast_state, torch_state


class Guard:
    """Conditions, in order, and the variables and constants of the code.

    space: Name of a constant -> the object; the globals of the generated code.
    paths: Variable -> what it is in the program, as people read it.
    state, autocast: What `torch_state` and `autocast_state` gave where the segment began.
    calls_cached: Whether a condition calls a function behind `functools.cache`.
    """

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.paths: dict[str, str] = {}
        self.table = Table()
        self.keep: list[Any] = []
        self.state: tuple[Any, ...] = ()
        self.autocast: tuple[Any, ...] = ()
        self.autocast_met = False
        self.calls_cached = False
        self._names: dict[int, str] = {}
        self._count = 0
        self._apart: list[str] = []
        self._are_apart: Check | None = None

    def release(self) -> None:
        """Drop all references to objects."""
        self.space, self.keep, self.table = {}, [], Table()

    def fresh_name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def constant(self, value: Any) -> str:
        """Return text that denotes `value` itself in the generated code."""
        if value is None or value is True or value is False:
            return repr(value)
        if type(value) is int and 0 <= value < 256:
            return repr(value)  # the same object wherever it is written; strings need not be
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._names)}"
            self.space[name] = value
            self.keep.append(value)
        return name

    def path(self, var: str) -> str:
        """Return what a variable is in the program, or its name."""
        return self.paths.get(var, var)

    def check(self, text: str, why: str, path: str | None = None, holds: int = 0) -> None:
        """Add the condition `text`; `holds`: the id of the object that must be where it was."""
        self.checks.append(Check(text, None, why, path, holds))

    def bind(self, expression: str, why: str) -> str:
        """Add the assignment of `expression` to a new variable; return the variable."""
        var = self.fresh_name()
        self.paths[var] = why
        self.checks.append(Check(expression, var, why, None))
        return var

    def check_value(self, var: str, value: Any, name: str, path: str | None) -> None:
        """Add that variable `var`, which people know as `name`, holds exactly the scalar `value`."""
        kind, constant = self.constant(type(value)), self.constant(value)
        text = f"type({var}) is {kind} and {same_value(var, value, constant)}"
        self.check(text, f"{name} == {value!r}", path)
        self.checks[-1].number = path is not None and type(value) in (int, float)

    def begin_apart(self) -> None:
        """Let `keep_apart` compare with none of the tensors so far."""
        self._apart, self._are_apart = [], None

    def keep_apart(self, var: str) -> None:
        """Add that the tensor `var` shares no memory with the others for which this was called."""
        if var not in self._apart:
            self._apart.append(var)
            self.checks = [check for check in self.checks if check is not self._are_apart]
            self.check(f"{self.constant(are_apart)}(({', '.join(self._apart)},))", "tensors share no memory")
            self._are_apart = self.checks[-1]

    def check_extents(self, text: str) -> None:
        """Add the condition `text` on extents that are left open: where it fails, others may differ too."""
        self.check(text, text)
        self.checks[-1].number = True

    def meet_state(self) -> None:
        """Add that the state of torch is what it is now; that of autocast only where it is on."""
        self.state, self.autocast = torch_state(), autocast_state()
        reads = "".join(f"{self.constant(read)}(), " for read in STATE)
        self.check(f"({reads}) == {self.constant(self.state)}", "the state of torch")
        if self.state[-1]:
            self.meet_autocast()

    def meet_autocast(self) -> None:
        """Add that the state of autocast at entry is what it was, once."""
        if self.autocast_met:
            return
        self.autocast_met = True
        text = f"{self.constant(autocast_state)}() == {self.constant(self.autocast)}"
        self.check(text, "the state of autocast")
