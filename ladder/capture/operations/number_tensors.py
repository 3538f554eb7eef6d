"""Tensors of numbers: of open ones, as a time step is, the graph makes them; those of arrays are copied.

Plans have numbers as constants. A fraction that changes from call to call, as a temperature does, becomes a
tensor before each run: the operators that meet it most often compute with that, in the type in which torch
computes with a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ladder.capture.heap.nodes import Dynamic
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import is_fixed
from ladder.capture.python.frames import NULL
from ladder.capture.python.words import words
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a

MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})

MOST = 8
"""Numbers of one tensor: each is an operator."""

EXACT = frozenset({torch.int64, torch.float32, torch.float64})
"""Types in which every number that can be open is what Python's is, or rounded alike."""

Operator = Callable[[Interpreter, Any, Any, Any], Any]


def with_number_tensors(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Operator
) -> Any:
    """Return what an operator gives that makes a tensor of numbers, or takes one for a number that is open.

    run: Runs a tensor operator.
    Returns `NULL` where it does neither.
    """
    made = _made_of_numbers(vm, function, args, kwargs, run)
    return made if made is not NULL else _computed_with_tensor(vm, function, args, kwargs, run)


def _made_of_numbers(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Operator
) -> Any:
    """Return the tensor that `function` makes of a number or a list of some, filled with what is open.

    What it copies of an array that is the same in each run is a tensor that the record holds.

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


WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Type of elements -> the one in which torch multiplies and divides them by a number."""


class Meaning(NamedTuple):
    """What a function of a tensor and a number is of two tensors.

    turned: Whether its second operand comes first. compares: Whether it gives truth values.
    in_place: Whether it writes into its first operand.
    """

    function: Any
    turned: bool = False
    compares: bool = False
    in_place: bool = False


def _meanings() -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    for names, of in (
        ("add __add__ __radd__", Meaning(torch.add)),
        ("sub __sub__ subtract", Meaning(torch.sub)),
        ("rsub __rsub__", Meaning(torch.sub, turned=True)),
        ("mul __mul__ __rmul__ multiply", Meaning(torch.mul)),
        ("truediv __truediv__ true_divide div divide", Meaning(torch.div)),
        ("__rtruediv__", Meaning(torch.div, turned=True)),
        ("add_ iadd __iadd__", Meaning(torch.Tensor.add_, in_place=True)),
        ("sub_ subtract_ isub __isub__", Meaning(torch.Tensor.sub_, in_place=True)),
        ("mul_ multiply_ imul __imul__", Meaning(torch.Tensor.mul_, in_place=True)),
        ("div_ divide_ true_divide_ itruediv __itruediv__", Meaning(torch.Tensor.div_, in_place=True)),
        *((f"{name} __{name}__", Meaning(getattr(torch, name), compares=True)) for name in COMPARISONS),
    ):
        found |= dict.fromkeys(words(names), of)
    return found


COMPARISONS = words("lt le gt ge eq ne")
MEANINGS = _meanings()
"""Name of a function -> what it is of two tensors."""

SUMS = frozenset({torch.add, torch.sub, torch.Tensor.add_, torch.Tensor.sub_})
"""Functions for which torch rounds numbers to the type of 16-bit elements, on CPUs."""


def _computed_with_tensor(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Operator
) -> Any:
    """Return what an operator makes of a tensor and a fraction that is left open, given as a tensor.

    Returns `NULL` where it is no such operator: it then takes what the number is.
    """
    meaning = MEANINGS.get(getattr(function, "__name__", ""))
    if meaning is None or kwargs or len(args) != 2 or vm.heap.numbers or vm.aside or tensors.maps_rows():
        return NULL
    places = [at for at, item in enumerate(args) if _is_open_fraction(item)]
    x: Any = args[1 - places[0]] if len(places) == 1 else None
    if not tensors.is_plain_tensor(x) or x.layout is not torch.strided or x.is_complex():
        return NULL
    first, meant = (places[0] == 0) != meaning.turned, meaning.function
    if x.dtype is torch.bool and meant is torch.sub:  # refused, which a tensor of numbers would not be
        return NULL
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    wide = WIDE.get(dtype)
    if meaning.compares or (meant in SUMS and x.device.type == "cpu"):
        wide = dtype if dtype in WIDE else None
    if wide is None or (meaning.in_place and (first or wide is not x.dtype)):
        return NULL
    number = _filled(vm, args[places[0]], wide, x.device)
    if meaning.in_place:
        return run(vm, meant, (x, number), {})
    x = _converted(vm, x, dtype, run)
    if first and meant is torch.div:  # as torch divides a number
        meant, x = torch.mul, run(vm, torch.reciprocal, (x,), {})
    x = _converted(vm, x, wide, run)
    result = run(vm, meant, (number, x) if first else (x, number), {})
    return result if meaning.compares else _converted(vm, result, dtype, run)


def _converted(vm: Interpreter, x: torch.Tensor, dtype: torch.dtype, run: Operator) -> Any:
    return x if x.dtype is dtype else run(vm, torch.Tensor.to, (x, dtype), {})


def _filled(vm: Interpreter, number: Dynamic, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of a number, which matched runs make before the graph."""
    key = number.var, dtype, device
    if key not in vm.heap.filled:
        held = filled(number.value, dtype, device)
        text = (
            f"{vm.heap.constant(filled)}({number.var}, {vm.heap.constant(dtype)}, {vm.heap.constant(device)})"
        )
        vm.heap.meet(held, text, f"a tensor of {vm.heap.guard.paths[number.var]}", stable=False)
        vm.heap.filled[key] = held
    return vm.heap.filled[key]


def filled(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without axes, infinite where its type ends before; on a GPU nothing waits for it."""
    made = torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype)
    return made if device.type == "cpu" else torch.full((), made.item(), dtype=dtype, device=device)


def _is_open_fraction(value: Any) -> bool:
    return type(value) is Dynamic and type(value.value) is float and value.counted is None


def _is_open(number: Any) -> bool:
    return type(number) is Dynamic and number.symbol is not None
