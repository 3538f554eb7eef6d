"""Tensors of numbers: of open ones, as a time step is, the graph makes them; those of arrays are copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ladder.capture.heap.nodes import Dynamic
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import is_fixed
from ladder.capture.python.frames import NULL
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a

MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})

MOST = 8
"""Numbers of one tensor: each is an operator."""

EXACT = frozenset({torch.int64, torch.float32, torch.float64})
"""Types in which every number that can be open is what Python's is, or rounded alike."""

Operator = Callable[[Interpreter, Any, Any, Any], Any]


def number_tensor(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Operator
) -> Any:
    """Return the tensor that `function` makes of a number or a list of some, filled with what is open.

    What it copies of an array that is the same in each run is a tensor that the record holds.

    run: Runs a tensor operator.
    Returns `NULL` where no number is open, or not all are whole or fractions: torch then takes what they are.
    """
    if function in (torch.tensor, torch.as_tensor) and len(args) == 1 and is_a(args[0], np.ndarray):
        return _of_array(vm, function, args[0], kwargs, run)
    if function not in MAKERS or len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return NULL
    if not vm.heap.shapes or tensors.maps_rows():
        return NULL
    given = vm.heap.items(args[0]) if type(args[0]) is list else args[0]
    numbers = list(given) if type(given) in (list, tuple) else [given]
    if len(numbers) > MOST or not any(_is_open(number) for number in numbers):
        return NULL
    known = [number.value if type(number) is Dynamic else number for number in numbers]
    if not all(type(number) in (int, float) for number in known):
        return NULL
    dtype = kwargs.get("dtype") or torch.tensor(known).dtype
    if dtype not in EXACT:
        return NULL
    options = {**kwargs, "dtype": dtype}
    if len(numbers) == 1:
        shape = (1,) if type(given) in (list, tuple) else ()
        return run(vm, torch.full, (shape, numbers[0]), options)
    return run(vm, torch.stack, ([run(vm, torch.full, ((), number), options) for number in numbers],), {})


def _of_array(vm: Interpreter, function: Any, array: Any, options: Mapping[str, Any], run: Operator) -> Any:
    """Return a tensor that copies an array; `NULL` where it does not, or another run may find another."""
    numbers = array.dtype.kind in "biufc" and options.keys() <= {"dtype", "device"}
    if vm.aside or tensors.maps_rows() or not numbers or not is_fixed(vm, array):
        return NULL
    held = torch.tensor(array)
    same = not array.flags.c_contiguous or (options.get("dtype") or held.dtype) is held.dtype
    if function is torch.as_tensor and same:
        return NULL
    name = vm.heap.constant(held)
    vm.heap.meet(held, vm.heap.guard.bind(name, name), name, stable=True)
    return run(vm, torch.Tensor.to, (held,), {**options, "copy": True})


def _is_open(number: Any) -> bool:
    return type(number) is Dynamic and number.symbol is not None
