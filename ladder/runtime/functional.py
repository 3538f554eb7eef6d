"""Functional forms of operators of others that write arguments, which graphs without writes can hold.

A form takes the tensors in whose memory the operator writes, and where in it each of its operands lies; it
writes into copies, and returns them behind the operator's own results. So operands may overlap, be views, or
be written several times.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ladder.forks import renewed
from ladder.partition.subgraphs import FORMS, JOINT
from ladder.runtime.model.program import ImportRefused

_Library: Any = torch.library.Library  # its methods have no types
_registered: dict[tuple[str, str], tuple[Any, Any]] = {}
"""Names of a form -> its operator, and what holds its registration."""
_lock = renewed(threading.Lock())
_copied: Any = torch._prims_common.clone_preserve_strides


def has_form(function: Any) -> bool:
    """Tell whether an operator writes arguments in a way that torch does not make functional itself."""
    own = function.namespace in ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")
    return bool(function._schema.is_mutable) and not own


def functional_form(function: Any) -> Any:
    """Return ``(Tensor[] bases, SymInt[] places, int[] own, ...) -> Tensor[]`` of an operator.

    `apart` gives its arguments: operands that lie in bases are None among the operator's. Bases whose numbers
    are ``own`` are written themselves, and no copies of them: see `ladder.partition.scatter`.
    """
    name, overload = function._schema.name.replace("::", JOINT), function._overloadname
    with _lock:
        known, library = _registered.get((name, overload), (None, None))
        if known is not function:
            if library is not None:
                library._destroy()  # of an operator that was registered anew
            _registered[name, overload] = function, _defined(function, name)
    return getattr(getattr(getattr(torch.ops, FORMS), name), overload)


def _defined(function: Any, name: str) -> Any:
    """Register the form of an operator, and return what holds the registration."""
    schema = function._schema
    arguments = str(schema).partition("(")[2].rpartition(") -> ")[0]
    optional = re.sub(r"Tensor(\([^()]*\))?\??", "Tensor?", arguments)
    full = f"{name}.{schema.overload_name}" if schema.overload_name else name
    library = _Library(FORMS, "FRAGMENT")
    library.define(
        f"{full}(Tensor[] bases, SymInt[] places, int[] own, {optional}) -> Tensor[]",
        tags=tuple(function.tags),
    )

    def run(bases: Any, places: Sequence[int], own: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        copies = [base if at in own else _copied(base) for at, base in enumerate(bases)]
        given = _with_operands(function, named(function, args, kwargs), copies, places)
        return [*_fresh(function, function(**given)), *copies]

    library.impl(full, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{FORMS}::{full}", run, lib=library)
    return library


def original(target: str) -> str:
    """Return the name of the operator whose form is called ``target``."""
    return target.partition(".")[2].replace(JOINT, ".", 1)


def named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name."""
    return {**{a.name: v for a, v in zip(function._schema.arguments, args, strict=False)}, **kwargs}


def _fresh(function: Any, results: Any) -> list[torch.Tensor]:
    """Return the tensors among results that are no arguments."""
    several = results if len(function._schema.returns) > 1 else (results,)
    own = [v for v, item in zip(several, function._schema.returns, strict=False) if item.alias_info is None]
    return [value for value in tree_leaves(own) if isinstance(value, torch.Tensor)]


def own_results(function: Any, given: Mapping[str, Any], stated: Any, made: Sequence[torch.Tensor]) -> Any:
    """Return an operator's results, as it states them, out of what its form gave.

    Raises ImportRefused if there are others than tensors, or parts of arguments.
    """
    returns, own = function._schema.returns, iter(made)
    several = stated if len(returns) > 1 else (stated,)

    def taken(value: Any) -> Any:
        if value is not None and not isinstance(value, torch.Tensor):
            raise ImportRefused(f"{function} writes arguments and returns {value!r}")
        return None if value is None else next(own)

    def shown(item: Any) -> Any:
        sets = ((a.name, a.alias_info) for a in function._schema.arguments if a.alias_info is not None)
        name = next((n for n, info in sets if info.before_set == item.alias_info.before_set), None)
        if not item.alias_info.is_write or name is None:
            raise ImportRefused(f"{function} writes arguments and returns a view")
        return given[name]

    found = [
        tree_map(taken, value) if item.alias_info is None else shown(item)
        for value, item in zip(several, returns, strict=False)
    ]
    return tuple(found) if len(returns) > 1 else found[0] if found else None


def apart(
    function: Any, given: Mapping[str, Any], whole: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[Any], dict[str, Any]]:
    """Return bases, places and the remaining arguments of a form.

    given: The operator's arguments by name.
    whole: Tensor -> the one that has all of its memory.
    """
    arguments = function._schema.arguments
    bases: dict[int, torch.Tensor] = {}
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            operands = [x for x in _items(given.get(argument.name)) if isinstance(x, torch.Tensor)]
            bases.update((memory_of(x), whole(x)) for x in operands)
    places: list[Any] = []
    rest = dict(given)
    for at, argument in enumerate(arguments):
        left = [*_items(given.get(argument.name))]
        for item, operand in enumerate(left):
            if isinstance(operand, torch.Tensor) and memory_of(operand) in bases:
                number = [*bases].index(memory_of(operand))
                begin = operand.storage_offset() - bases[memory_of(operand)].storage_offset()
                places += [at, item, number, operand.dim(), *operand.shape, *operand.stride(), begin]
                left[item] = None
                rest[argument.name] = left if isinstance(given[argument.name], list | tuple) else None
    return [*bases.values()], places, rest


def _with_operands(
    function: Any, given: dict[str, Any], bases: Sequence[torch.Tensor], places: Sequence[Any]
) -> dict[str, Any]:
    """Return the operator's arguments, with those that lie in bases."""
    found = {name: list(value) if isinstance(value, list | tuple) else value for name, value in given.items()}
    rest = iter(places)
    for at in rest:
        item, number, rank = (next(rest) for _ in range(3))
        shape, steps = ([next(rest) for _ in range(rank)] for _ in range(2))
        base, name = bases[number], function._schema.arguments[at].name
        operand = base.as_strided(shape, steps, base.storage_offset() + next(rest))
        if isinstance(found.get(name), list):
            found[name][item] = operand
        else:
            found[name] = operand
    return found


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def memory_of(value: torch.Tensor) -> int:
    """Return what tells the memory of a tensor from others'."""
    return int(value.untyped_storage()._cdata)


def hint_of(extent: Any) -> int:
    """Return a number, or the one that a symbol stood for at first."""
    return extent if isinstance(extent, int) else int(extent.node.hint)
