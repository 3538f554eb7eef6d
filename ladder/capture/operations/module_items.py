"""What ``torch.nn.Module.__getattr__`` finds: a parameter, buffer or part of a module, read as it reads them.

Models ask for one at every other step: to interpret that method takes longer than all else that they do.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.containers import dict_read
from ladder.capture.operations.functions import meet_function
from ladder.capture.python.frames import NULL
from ladder.capture.python.words import words

HOMES = ("_parameters", "_buffers", "_modules")
"""Names of the dictionaries that are asked, in order."""
MODULE_GET = torch.nn.Module.__getattr__
_NAMES = frozenset(words("__dict__ AttributeError type __name__"))


def looks_up(function: Any) -> bool:
    """Tell whether a function does what `module_item` does where it finds something.

    Its code names nothing else that it could read, and what it gives for objects with some of the
    dictionaries tells in which order it looks.
    """
    code = function.__code__
    texts = [value for value in code.co_consts if type(value) is str and value.startswith("_")]
    if not _NAMES.issuperset(code.co_names) or tuple(texts) != HOMES or code.co_freevars:
        return False
    return all(_finds(function, held) for held in range(1, 1 << len(HOMES)))


def _finds(function: Any, held: int) -> bool:
    """Tell whether what is in several dictionaries, bits of `held`, is found in the first of them."""
    probe = types.SimpleNamespace()
    chosen = [home for at, home in enumerate(HOMES) if held >> at & 1]
    for home in HOMES:
        vars(probe)[home] = {"item": home} if home in chosen else {}
    whole = function(probe, "item")
    for home in set(HOMES) - {*chosen}:
        del vars(probe)[home]
    try:
        function(probe, "other")
    except AttributeError:
        return bool(whole == function(probe, "item") == chosen[0])
    return False


_CODE = MODULE_GET.__code__ if looks_up(MODULE_GET) else None


def module_item(vm: Interpreter, function: Any, inside: Any, name: str) -> Any:
    """Return what a function finds for `name` if it is that method; `NULL` if it must be interpreted.

    inside: The dictionary of the module.
    """
    point = vm.point
    if function.__code__ is not _CODE or not vm.recording or type(inside) is not dict:
        return NULL
    if point is None or point.poisoned or vm.store.left_out:
        return NULL
    try:
        meet_function(vm, function)
        return _item(vm, inside, name)
    except CaptureError:
        return NULL


def _item(vm: Interpreter, inside: dict[str, Any], name: str) -> Any:
    for home in HOMES:
        if _is_lifted(vm, inside, home):
            return NULL
        held = dict_read(vm, inside, "get", (home, NULL))
        if held is NULL:
            continue
        if type(held) is not dict or _is_lifted(vm, held, name):
            return NULL
        found = dict_read(vm, held, "get", (name, NULL))
        if found is not NULL:
            return found
    return NULL


def _is_lifted(vm: Interpreter, owner: dict[str, Any], key: str) -> bool:
    """Say whether the guard leaves open what is at a key, which the method reads in several ways."""
    lifted = vm.heap.lifted
    return bool(lifted) and f"{vm.heap.guard.path(vm.heap.node(owner).var)}[{key!r}]" in lifted
