"""What a container as a whole held: the checks of its extent and keys, and where each entry is read."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from ladder.capture.heap.guard import Guard
from ladder.capture.heap.nodes import Node
from ladder.capture.heap.table import WHOLE
from ladder.capture.values.kinds import is_a, kind_among

Entry = tuple[Any, Any, str, str]
"""Key, what lies there, text that reads it, and its path."""


def sequence_entries(guard: Guard, node: Node, items: list[Any]) -> Iterator[Entry]:
    """Check the length of a list, tuple or deque; yield its items."""
    value, var, path = node.obj, node.var, guard.path(node.var)
    base: Any = next(kind for kind in (list, tuple, deque) if is_a(value, kind))
    size, entry = len(items), f"{guard.constant(base)}.__getitem__({var}, {{}})"
    text = f"{guard.constant(base.__len__)}({var}) == {size}"
    guard.check(text, f"len({path}) == {size}", f"len({path})")
    if type(value) is base:
        entry = f"{var}[{{}}]"
    for index, item in enumerate(items):
        yield index, item, entry.format(index), f"{path}[{index}]"
    if base is deque:
        guard.check(f"{var}.maxlen == {value.maxlen}", f"{path}.maxlen")


def dict_entries(guard: Guard, node: Node, entry: dict[Any, Any]) -> Iterator[Entry]:
    """Check the keys of a dictionary and their order; yield its values."""
    var, path, keys = node.var, guard.path(node.var), list(entry)
    if node.pinned and type(node.obj) is dict:
        guard.table.add(node.obj, WHOLE, keys, path)
    else:
        # Types first: comparing keys of other types may run code of the user's.
        guard.check(_kinds(guard, var, keys), f"{path}: types of keys")
        guard.check(f"list({var}) == {guard.constant(keys)}", f"{path} has the keys {keys}")
    exact = type(node.obj) in (dict, OrderedDict)
    for key in keys:
        constant = guard.constant(key)
        text = f"{var}[{constant}]" if exact else f"dict.__getitem__({var}, {constant})"
        yield key, entry[key], text, f"{path}[{key!r}]"


def check_elements(guard: Guard, node: Node, elements: Any) -> None:
    """Check the elements of a set."""
    var, path = node.var, guard.path(node.var)
    items = guard.constant(elements)
    guard.check(_kinds(guard, var, elements), f"{path}: types")
    guard.check(f"list({var}) == {items}", f"{path} has the same elements")


def _kinds(guard: Guard, var: str, elements: Iterable[Any]) -> str:
    kind = kind_among(elements)
    return f"[*map({guard.constant(kind)}, {var})] == {guard.constant([*map(kind, elements)])}"
