"""Calls on codes of 8 bits as steps: products, convolutions and rounding by kernels of ours.

Where shapes and weights are known, all arguments are bound once; else the operators' functions are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.partition.subgraphs import call_of
from ladder.runtime import byte_products
from ladder.runtime.build import Job
from ladder.runtime.compile import target_of
from ladder.runtime.model.entry_calls import Operand, bind_entry
from ladder.runtime.model.library import library_run
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from ladder.runtime.stored_codes import BYTES, stays
from targets import TileDevice, get_device

Values = list[str | None]
"""Values of the plan that a node reads; None is left out."""


def codes_jobs(graph: Graph, device: TileDevice) -> list[Job]:
    """Return the kernels that a call wants, in the order of their use."""
    node = call_of(graph)
    unsigned = graph.tile(node.inputs[0]).ttype.name == "uint8"
    facts: Mapping[str, tuple[int, ...]] = {
        "rounding": (),
        "byte_product": (byte_products.depth_of(device),),
    }
    packing = (byte_products.depth_of(device), unsigned)
    kinds = KERNELS[str(node_attributes(node)["target"])]
    return [byte_products.codes_job(device, kind, *facts.get(kind, packing)) for kind in kinds]


def _depth(memory: Workspace) -> int:
    return byte_products.depth_of(get_device(target_of(memory.owner.where)))


def bind_codes(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a node on codes."""
    node = call_of(step.part.graph)
    given = node_attributes(node)
    outside = step.part.outside
    read: Values = [None if a is None else outside[node.inputs[a[1]]] for a in given["arguments"]]
    tiles = memory.owner.plan.tiles
    known = memory.settles(step) and all(
        prod(memory.now.numbers(tiles[value].shape)()) for value in (*step.part.inputs, *step.part.outputs)
    )
    entries = [memory.owner.kernels[name] for name in step.entry.split()]
    bound = _BINDERS[given["target"]](memory, step, entries, read) if known else None
    return bound or by_torch(memory, step)


def by_torch(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of the operator, whose results are copied to where they belong."""
    run, read = library_run(step.part.graph, memory.now), memory.reads(step)
    for value in step.part.inputs:
        if value in memory.constants and (tensor := memory.known(value)) is not None:
            stays(tensor)
    targets = [(memory.slot[value], memory.target(value)) for value in step.part.outputs]

    def call(slots: Slots) -> None:
        found = run(*(slots[at] for at in read))
        for (place, target), value in zip(targets, found if len(targets) > 1 else (found,), strict=True):
            slots[place] = target().copy_(value)

    return call


def _constant(memory: Workspace, value: str | None) -> torch.Tensor | None:
    """Return codes that are the same in every call, which are kept as kernels take them."""
    tensor = memory.known(value) if value in memory.constants else None
    if tensor is None or tensor.dtype not in BYTES:
        return None
    stays(tensor)
    return tensor


def _in_turn(*calls: Bound) -> Bound:
    def run(slots: Slots) -> None:
        for call in calls:
            call(slots)

    return run


def _shape(memory: Workspace, value: str) -> tuple[int, ...]:
    return tuple(memory.now.numbers(memory.owner.plan.tiles[value].shape)())


def _rounding(memory: Workspace, step: PlanStep, entries: list[Any], read: Values) -> Bound | None:
    x, codes, scale, zero = str(read[0]), *step.part.outputs
    flat = (prod(_shape(memory, x)),)
    out = (Operand(codes, flat), Operand(scale, (1,)), Operand(zero, (1,)))
    return bind_entry(memory, entries[0], (), (Operand(x, flat),), out)


def _zero(memory: Workspace, codes: torch.dtype, value: str | None) -> Any:
    """Return the zero point as kernels take it; None if there is not one number."""
    if value is None:
        return torch.zeros(1, dtype=codes)
    return Operand(value, (1,)) if prod(_shape(memory, value)) == 1 else None


def _dtype(memory: Workspace, value: str) -> torch.dtype:
    found = getattr(torch, memory.owner.plan.tiles[value].ttype.name)
    assert isinstance(found, torch.dtype)
    return found


def _product(memory: Workspace, step: PlanStep, entries: list[Any], read: Values) -> Bound | None:
    from ladder.runtime.onnx_ops.integers import (
        has_dot_products,
        matrix_columns,
        signed_zero,
        takes_unsigned,
        unsigned_zero,
    )

    a, b, a_zero, b_zero = [*read, None, None][:4]
    matrix, less = _constant(memory, b), _constant(memory, b_zero)
    shape, zero = _shape(memory, str(a)), _zero(memory, _dtype(memory, str(a)), a_zero)
    if matrix is None or matrix.ndim != 2 or len(shape) < 2 or zero is None:
        return None
    if b_zero is not None and (less is None or less.numel() != 1):
        return None
    plain = has_dot_products() and takes_unsigned() and signed_zero(matrix, less) is None
    if plain and prod(shape) * matrix.shape[1] > MOST_PRODUCTS:
        return _by_dot_products(memory, step, matrix, str(a), a_zero)
    depth, rows = _depth(memory), (prod(shape[:-1]), shape[-1])
    left, right = byte_products.empty_words(rows[0], depth, rows[1]), matrix_columns(matrix, depth)
    made, factor = (left.words, left.sums, left.zeros), -unsigned_zero(matrix, less).reshape(1)
    first = bind_entry(memory, entries[0], (), (zero, Operand(str(a), rows)), made)
    out = Operand(step.part.outputs[0], (1, rows[0], matrix.shape[1]))
    *given, result = byte_products.arguments(left, factor, right.codes, right.at, out)
    return _in_turn(first, bind_entry(memory, entries[1], (), given, (result,)))


MOST_PRODUCTS = 1 << 19
"""Multiplications up to which a kernel of words is faster than the library's product of bytes."""


def _by_dot_products(
    memory: Workspace, step: PlanStep, matrix: torch.Tensor, a: str, zero: str | None
) -> Bound:
    """Return the library's product with a matrix of signed codes, less what one zero point adds."""
    from ladder.runtime.onnx_ops.integers import signed_columns

    codes, sums = signed_columns(matrix)
    out = step.part.outputs[0]
    left, place, target, less = (
        memory.slot[a],
        memory.slot[out],
        memory.target(out),
        memory.slot.get(zero or ""),
    )

    def call(slots: Slots) -> None:
        found = target()
        flat = found.view(-1, codes.shape[1])
        torch._int_mm(slots[left].reshape(-1, codes.shape[0]), codes, out=flat)
        if less is not None:
            flat.sub_(sums, alpha=int(slots[less]))
        slots[place] = found

    return call


def _convolution(memory: Workspace, step: PlanStep, entries: list[Any], read: Values) -> Bound | None:
    from ladder.runtime.onnx_ops.evaluate import operation_of_call
    from ladder.runtime.onnx_ops.integers import convolution_form, fills_blocks, weight_words

    x, w, x_zero, w_zero = [*read, None, None][:4]
    weight, less = _constant(memory, w), _constant(memory, w_zero)
    shape, zero = _shape(memory, str(x)), _zero(memory, _dtype(memory, str(x)), x_zero)
    if weight is None or len(shape) not in (3, 4) or zero is None or (less is None) != (w_zero is None):
        return None
    op = operation_of_call(call_of(step.part.graph))
    depth = _depth(memory)
    form = convolution_form(op, shape, weight.shape, depth) if fills_blocks(op, weight) else None
    if form is None:
        return None
    image, factor = memory.scratch.setdefault(form.image, form.space())
    given = (zero, Operand(str(x), form.codes))
    first = bind_entry(memory, entries[0], form.window.low, given, (image, factor))
    out = Operand(step.part.outputs[0], form.flat)
    left = weight_words(op, weight, less, depth)
    *factors, result = byte_products.arguments(left, factor, form.as_bytes(image), form.at, out)
    return _in_turn(first, bind_entry(memory, entries[1], (), factors, (result,)))


KERNELS: Mapping[str, tuple[str, ...]] = {
    "onnx.DynamicQuantizeLinear": ("rounding",),
    "onnx.MatMulInteger": ("words", "byte_product"),
    "onnx.ConvInteger": ("image", "byte_product"),
}
"""Calls -> what is emitted for them."""

_BINDERS: Mapping[str, Callable[[Workspace, PlanStep, list[Any], Values], Bound | None]] = {
    "onnx.DynamicQuantizeLinear": _rounding,
    "onnx.MatMulInteger": _product,
    "onnx.ConvInteger": _convolution,
}
"""Calls -> what binds their kernels; None where the operator's function serves."""
