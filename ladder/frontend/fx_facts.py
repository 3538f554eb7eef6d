"""Cache key of an fx graph: all facts that decide its import, as JSON-able data.

Facts are for graphs as capture makes them: operators of torch and of Ladder on tensors and numbers. What
cannot be named in another process (functions of a program, tensors held by the graph) has no facts. Symbolic
sizes are told by their expressions and by what is known of their symbols, see `facts_of_symbols`.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx

_NATIVES = tuple(getattr(torch._C, f"_{name}") for name in ("nn", "linalg", "fft", "special"))
HOMES: tuple[Any, ...] = (torch, torch.nn.functional, *_NATIVES, torch._C, operator, math, builtins)
"""Where functions that graphs call are found by name."""

OPERATORS = ("aten", "prims", "ladder")
"""Namespaces of registered operators whose meaning the versions of torch and Ladder decide."""

SETTINGS: tuple[Any, ...] = (
    *(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype),
    *(torch._C._get_deterministic_algorithms, torch._C._get_cudnn_enabled, torch._C._get_mkldnn_enabled),
    *(torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack),
    torch.is_autocast_cache_enabled,
)
"""What reads the state of torch on which tracing depends."""


TENSORS = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
"""Types of examples of which an import reads all but the elements."""


class Unnameable(Exception):
    """Something in a graph has no name in other processes."""


def facts_of(module: torch.fx.GraphModule, examples: Sequence[Any]) -> dict[str, Any] | None:
    """Return what decides the import of a graph for arguments like these; None if that has no name.

    examples: One argument per placeholder.
    """
    try:
        return {
            "nodes": [_node(node) for node in module.graph.nodes],
            "examples": [_example(value) for value in examples],
            "objects": _first([id(value) for value in examples]),
            "memory": _first([_memory(value) for value in examples]),
            "symbols": facts_of_symbols(examples),
            "state": [repr(read()) for read in SETTINGS],
            "autocast": autocast_facts(),
            "torch": torch.__version__,
        }
    except Unnameable:
        return None


def facts_of_symbols(examples: Sequence[Any]) -> dict[str, Any]:
    """Return what is known of the symbols in the sizes of examples; empty where sizes are numbers."""
    fakes = (value for value in examples if isinstance(value, torch._subclasses.FakeTensor))
    env = next((value.fake_mode.shape_env for value in fakes), None)
    if env is None:
        return {}
    return {
        "guards": [str(guard.expr) for guard in env.guards],
        "replacements": sorted([str(old), str(new)] for old, new in env.replacements.items()),
        "ranges": sorted([str(symbol), str(found)] for symbol, found in env.var_to_range.items()),
    }


def autocast_facts() -> list[Any]:
    """Return whether autocast is on, and its type, per kind of device."""
    kinds = ("cpu", "cuda")
    return [[torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))] for kind in kinds]


def _first(keys: Sequence[int]) -> list[int]:
    """Return for each key where it is met first."""
    seen: dict[int, int] = {}
    return [seen.setdefault(key, at) for at, key in enumerate(keys)]


def _memory(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else id(value)


def _node(node: torch.fx.Node) -> list[Any]:
    if node.op in ("get_attr", "call_module"):
        raise Unnameable(node.op)
    target = _function(node.target) if node.op == "call_function" else str(node.target)
    return [node.name, node.op, target, _value(node.args), _value(node.kwargs)]


@cache
def _function(target: Any) -> str:
    """Return the name by which a function is found again."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(target)
        if name.partition(".")[0] in OPERATORS:
            return f"torch.ops.{name}"
        raise Unnameable(name)
    name = getattr(target, "__name__", "")
    owner = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    home = next((home for home in HOMES if getattr(home, name, None) is target), None)
    if home is None or owner not in ("torch", "_operator", "operator", "math", "builtins"):
        raise Unnameable(repr(target))
    return f"{home.__name__}.{name}"


_PLAIN = (bool, int, str, type(None))
_PRINTED = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))
_SEQUENCES = (tuple, list, torch.Size, torch.fx.immutable_collections.immutable_list)


def _value(value: Any) -> Any:
    """Return an argument so that other values, and values of other types, are other data."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _PRINTED:
        return {kind.__name__: repr(value)}
    if isinstance(value, torch.fx.Node):
        return {"%": value.name}
    if kind in _SEQUENCES:
        return {kind.__name__: [_value(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[str(key), _value(item)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [_value(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, torch._ops.OpOverload):
        return {"operator": _function(value)}
    if kind is torch.SymInt:
        return {"symbol": [str(value.node.expr), value.node.hint]}
    raise Unnameable(repr(value))


def _example(value: Any) -> Any:
    """Return what an import reads of an argument: of tensors all but the elements."""
    if not isinstance(value, torch.Tensor):
        return _value(value)
    if type(value) not in TENSORS or value.layout is not torch.strided:
        raise Unnameable(repr(type(value)))
    return {
        "tensor": [
            *(type(value).__name__, isinstance(value, torch.nn.Parameter)),
            *(str(value.dtype), str(value.device)),
            *map(_value, (value.shape, value.stride(), value.storage_offset())),
            *(value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()),
        ]
    }
