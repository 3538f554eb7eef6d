"""TVM's import without the errors that it meets in its own libraries and passes over.

The first error that TVM's libraries raise in a process reads and sorts the symbols of all its libraries,
torch's too, for a backtrace: more work than the rest of the import. So while TVM is imported, what it looks
up and does not find is refused in Python, with the same outcome.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

ABSENT = "tvm.runtime.disco"
"""A module that TVM imports where it can: TVM's wheel has no library of it."""

OPERATORS = "tvm.ir._ffi_api"
"""Where TVM's Python finds the functions that look up operators and note attributes of them."""


def import_tvm() -> None:
    """Import TVM, unless it is imported already or not installed: what needs it then says so.

    Only one thread may do so at a time, as those that hold `ladder.lower.tvm_lock.tvm_lock`.
    """
    if "tvm" not in sys.modules and find_spec("tvm") is not None:
        with _quiet():
            import tvm  # noqa: F401


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have TVM's import in the block find in Python what is not there."""
    import tvm_ffi
    from tvm_ffi import registry

    published, listed = tvm_ffi.init_ffi_api, registry.list_global_func_names
    replaced: dict[str, Any] = {}

    def publish(namespace: str, target_module_name: str | None = None) -> None:
        published(namespace, target_module_name)
        if target_module_name == OPERATORS:
            functions = vars(sys.modules[OPERATORS])
            replaced.update({name: functions[name] for name in _CAREFUL})
            functions.update({name: careful(functions) for name, careful in _CAREFUL.items()})

    hidden = ABSENT not in sys.modules
    if hidden:
        sys.modules[ABSENT] = None  # type: ignore[assignment]  # as Python marks what cannot be imported
    tvm_ffi.init_ffi_api = publish
    registry.list_global_func_names = _kept_names()
    try:
        yield
    finally:
        tvm_ffi.init_ffi_api = published
        registry.list_global_func_names = listed
        if hidden:
            sys.modules.pop(ABSENT, None)
        if replaced:
            vars(sys.modules[OPERATORS]).update(replaced)


def _kept_names() -> Callable[[], list[str]]:
    """Return what lists TVM's functions: fifty modules ask for their names, and few add to them."""
    import tvm_ffi

    list_names, kept = tvm_ffi.get_global_func("ffi.FunctionListGlobalNamesFunctor"), list[str]()

    def names() -> list[str]:
        name_at = list_names()
        if name_at(-1) != len(kept):
            kept[:] = map(name_at, range(name_at(-1)))
        return kept

    return names


def _finding(functions: dict[str, Any]) -> Callable[[str], Any]:
    """Return what looks up an operator by its name."""
    find, list_names, known = functions["GetOp"], functions["ListOpNames"], set[str]()

    def checked(name: str) -> Any:
        if name not in known and len(names := list_names()) > len(known):
            known.update(names)
        if name not in known:
            raise AttributeError(f"Operator {name} is not registered")
        return find(name)

    return checked


def _noting(functions: dict[str, Any]) -> Callable[[str, str, Any, int], None]:
    """Return what notes an attribute of an operator, but nothing twice: that would be an error."""
    note, find, attribute = (functions[name] for name in ("RegisterOpAttr", "GetOp", "OpGetAttr"))

    def checked(name: str, key: str, value: Any, level: int) -> None:
        if not isinstance(value, str) or attribute(find(name), key) != value:
            note(name, key, value, level)

    return checked


_CAREFUL: dict[str, Callable[[dict[str, Any]], Callable[..., Any]]] = {
    "GetOp": _finding,
    "RegisterOpAttr": _noting,
}
"""Function of TVM -> makes one of Python that calls it only where it succeeds."""
