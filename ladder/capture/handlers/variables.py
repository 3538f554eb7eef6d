"""Globals, cells and imports."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from ladder.capture.heap.nodes import CaptureError, Node, dynamic_parts
from ladder.capture.interpreter.interpreter import IMPORT, Interpreter
from ladder.capture.interpreter.recording import opaque
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.modeled import is_loaded, loaded
from ladder.capture.operations.objects import settled
from ladder.capture.operations.operators import delete_subscript
from ladder.capture.python.frames import NULL, Frame


def load_global(vm: Interpreter, frame: Frame, name: str) -> Any:
    """Return a global or builtin."""
    for names, home in ((frame.names, frame.names.get("__name__", "globals")), (frame.builtins, "builtins")):
        if name in names and not vm.recording:
            return names[name]
        if vm.recording:
            node = vm.heap.pin(names)
            if node.is_known(name):
                if name in names:
                    return names[name]
                continue
            if name in names:
                return vm.heap.load(node, name, names[name], f"{node.var}[{name!r}]", f"{home}.{name}")
            vm.heap.absent(node, name, f"{name!r} not in {node.var}", f"{home}.{name}")
    raise NameError(f"name '{name}' is not defined", name=name)


def store_global(vm: Interpreter, frame: Frame, name: str, value: Any) -> None:
    """Assign a global."""
    value = settled(vm, value, keep=True)
    if vm.recording:
        with vm.stopping():
            node = vm.heap.pin(frame.names)
            if name not in frame.names:
                vm.heap.absent(node, name, f"{name!r} not in {node.var}", name)
            vm.heap.assign(node, name, f"{node.var}[{name!r}]", value)
    frame.names[name] = vm.held(value)


def delete_global(vm: Interpreter, frame: Frame, name: str) -> None:
    """Delete a global."""
    if name in frame.names:
        delete_subscript(vm, frame.names, name)
        return
    if vm.recording:
        node = vm.heap.pin(frame.names)
        vm.heap.absent(node, name, f"{name!r} not in {node.var}", name)
    raise NameError(f"name '{name}' is not defined", name=name)


def made_cell(vm: Interpreter, cell: types.CellType, value: Any) -> None:
    """Register a new cell of `value`, which may be or hold dynamic scalars; `NULL` if it is empty."""
    if vm.recording:
        uses: set[str] = set()
        kind = vm.heap.constant(types.CellType)
        try:
            inside = "" if value is NULL else vm.heap.reference(value, uses)
        except CaptureError:
            vm.plain(value)
            vm.heap.hidden(cell, vm.here())
            return
        node = vm.heap.fresh(cell, f"{kind}({inside})", uses)
        if dynamic_parts(value):
            node.wrote("contents", value)


def load_cell(vm: Interpreter, frame: Frame, name: str) -> Any:
    """Return the contents of a cell."""
    cell = frame.slots[name]
    value = _contents(cell)
    if vm.recording:
        with vm.stopping():
            value = _read_cell(vm, vm.heap.node(cell), value)
    if value is not NULL:
        return value
    where = "where it is not associated with a value"
    if name in frame.code.co_freevars:
        raise NameError(f"cannot access free variable '{name}' {where} in enclosing scope", name=name)
    raise UnboundLocalError(f"cannot access local variable '{name}' {where}")


def _contents(cell: types.CellType) -> Any:
    """Return what a cell holds, `NULL` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return NULL


def _read_cell(vm: Interpreter, node: Node, value: Any) -> Any:
    """Note that `value` is in a cell, or that it is empty."""
    heap = vm.heap
    if node.is_known("contents"):
        return value
    path = heap.guard.path(node.var)
    if value is NULL:
        heap.absent(
            node, "contents", f"{heap.constant(_contents)}({node.var}) is {heap.constant(NULL)}", path
        )
        return NULL
    return heap.load(node, "contents", value, f"{node.var}.cell_contents", path)


def store_cell(vm: Interpreter, cell: types.CellType, value: Any) -> None:
    """Assign a cell."""
    value = settled(vm, value, keep=True)
    if vm.recording:
        with vm.stopping():
            node = vm.heap.node(cell)
            vm.heap.assign(node, "contents", f"{node.var}.cell_contents", value)
    cell.cell_contents = vm.held(value)


def delete_cell(vm: Interpreter, cell: types.CellType) -> None:
    """Empty a cell."""
    if vm.recording:
        with vm.stopping():
            node = vm.heap.node(cell)
            node.wrote("contents")
            vm.heap.change(f"del {node.var}.cell_contents", [node], set())
    del cell.cell_contents


def import_module(vm: Interpreter, frame: Frame, name: str, names: Any, level: int) -> Any:
    """Import; a module already imported is found in `sys.modules`, which is guarded."""
    whole = importlib.util.resolve_name("." * level + name, frame.names.get("__package__"))
    top = whole if names or level else name.partition(".")[0]
    if vm.recording and (names or not level) and is_loaded(whole, top, *_submodules(whole, names or ())):
        return loaded(vm, whole, top)
    vm.meet_import()
    arguments: tuple[Any, ...] = (name, frame.names, {}, names, level)
    return opaque(vm, frame.builtins["__import__"], arguments, {}, "push", IMPORT)


def _submodules(whole: str, names: tuple[str, ...]) -> list[str]:
    """Return the modules that an import of `names` from the package `whole` must load."""
    held = vars(sys.modules[whole]) if is_loaded(whole) else {}
    if "__path__" not in held or "__getattr__" in held:
        return []
    return [f"{whole}.{name}" for name in names if name not in held]


def import_from(vm: Interpreter, module: Any, name: str) -> Any:
    """Return an attribute of a module as ``from module import name`` does."""
    try:
        return load_attr(vm, module, name)
    except AttributeError:
        try:
            exec(f"from {module.__name__} import {name}")  # which may load it; its error says more
        except ImportError as error:
            raise error.with_traceback(None) from None
        return load_attr(vm, module, name)
