"""Recurrent layers by kernels of ours: one product of all inputs, then the steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph, Node
from ladder.ir.recurrent import FOUR, Recurrent, as_recurrent, operands_of
from ladder.lower.chain.panels import panels
from ladder.partition.native_parts import DOT_PRODUCTS
from ladder.partition.subgraphs import call_of
from ladder.runtime.build import Job, function_job
from ladder.runtime.compile import target_of
from ladder.runtime.model.entry_calls import Operand, bind_entry, ready
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.rows import known_registers, rows_job
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from ladder.runtime.stored_codes import stays
from targets import TileDevice, get_device

WEIGHTS = ("w", "r", "b", "w_s", "w_z", "r_s", "r_z")
"""Operands that are packed."""


def layer_of(graph: Graph) -> tuple[Recurrent, Node]:
    """Return the layer of a part, and its node."""
    node = call_of(graph)
    return as_recurrent(graph, node), node


def recurrent_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel that a layer wants."""
    form, _ = layer_of(graph)
    name = f"ladder_recurrent_{hashlib.sha256(repr(form).encode()).hexdigest()[:10]}"

    def emit(name: str) -> Any:
        from ladder.lower.cpu.recurrent import emit_recurrent  # TVM, which exported models run without

        return emit_recurrent(form, known_registers(device), DOT_PRODUCTS in device.features, name)

    return function_job({"recurrent": repr(form)}, name, device, emit)


def recurrent_jobs(graph: Graph, device: TileDevice) -> list[Job]:
    """Return the kernels that a layer wants: of its steps and, of float32, of what inputs give to gates."""
    form, node = layer_of(graph)
    own = recurrent_job(graph, device)
    if form.codes:
        return [own]
    inputs = graph.tile(operands_of(node)["w"]).shape[2]
    return [own, rows_job(gates_graph(form, int(str(inputs))), device)]


def gates_graph(form: Recurrent, inputs: int) -> Graph:
    """Return what inputs give to all gates: their product with the weight, and the bias."""
    wide = len(form.backward) * form.gates * form.padded
    g = GraphBuilder("gates")
    x = g.input("x", "float32", ("rows", inputs))
    weight = g.input("weight", "float32", (wide, inputs))
    bias = g.input("bias", "float32", (wide,))
    return g.finish(g.add("add", g.add("matmul", x, weight, transpose_b=True, type="float32"), bias))


def by_gates(form: Recurrent, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[directions, gates, padded, ...]`` of ``[directions, gates * hidden, ...]``: zeros beyond."""
    shape = (len(form.backward), form.gates, form.hidden, *weight.shape[2:])
    found = weight.new_zeros(*shape[:2], form.padded, *shape[3:])
    found[:, :, : form.hidden] = weight.reshape(shape)
    return found


@dataclass(frozen=True)
class Packed:
    """A layer's weights as its kernel takes them.

    matrix, bias: What multiplies inputs, ``[inputs, directions * gates * padded]``, and what is added to
        that.
    state: What multiplies the state, ``[directions, hidden, gates * padded]``, and what is added to its
        product for the last gate.
    """

    matrix: torch.Tensor
    bias: torch.Tensor
    state: tuple[torch.Tensor, ...]


def packed(form: Recurrent, given: Mapping[str, torch.Tensor]) -> Packed:
    """Return a layer's weights as its kernel takes them."""
    count, w = len(form.backward), given["w"]
    b = given["b"] if "b" in given else w.new_zeros(count, 2 * form.gates * form.hidden)
    outer, inner = (by_gates(form, half) for half in b.chunk(2, 1))
    last = inner[:, -1].clone()
    if form.inside:
        inner[:, -1] = 0
    matrix = by_gates(form, w).reshape(-1, w.shape[2]).t()
    state = by_gates(form, given["r"]).reshape(count, -1, form.hidden).transpose(1, 2).contiguous()
    return Packed(matrix, (outer + inner).reshape(-1), (state, last))


def gates_of(form: Recurrent, made: Packed, x: torch.Tensor) -> torch.Tensor:
    """Return what inputs give to all gates."""
    return torch.addmm(made.bias, x.reshape(-1, x.shape[2]), made.matrix)


def bind_recurrent(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a layer; weights that stay are packed once, for all frames of the plan."""
    from tvm_ffi import from_dlpack

    entries = [memory.owner.kernels[name] for name in step.entry.split()]
    graph, entry, known = step.part.graph, entries[0], memory.owner.layers
    form, node = layer_of(graph)
    outside = step.part.outside
    values = {role: outside[name] for role, name in operands_of(node).items()}
    ways: tuple[Any, Any] = (packed_codes, gates_of_codes) if form.codes else (packed, gates_of)
    pack, gates = ways
    weights = {role: values[role] for role in WEIGHTS if role in values}
    slot = {role: memory.slot[value] for role, value in values.items()}
    kept = {role: memory.known(value) for role, value in weights.items() if value in memory.constants}
    stays = {role: tensor for role, tensor in kept.items() if tensor is not None}
    if len(stays) == len(weights) and values["r"] not in known:
        known[values["r"]] = pack(form, stays)
    whole: Any = known.get(values["r"])
    if len(entries) > 1 and whole is not None and "lengths" not in values and memory.settles(step):
        bound = _of_known_sizes(memory, step, entries, whole, values)
        if bound is not None:
            return bound
    held = None if whole is None else tuple(map(from_dlpack, whole.state))
    outputs = [(memory.slot[value], memory.target(value)) for value in step.part.outputs]

    def run(slots: Slots) -> None:
        given = {role: slots[at] for role, at in slot.items()}
        made = whole or pack(form, given)
        found = [target() for _, target in outputs]
        _layer(form, entry, lambda: (gates(form, made, given["x"]), *(held or made.state)), given, found)
        for (place, _), value in zip(outputs, found, strict=True):
            slots[place] = value

    return run


def _of_known_sizes(
    memory: Workspace, step: PlanStep, entries: Sequence[Any], made: Packed, values: Mapping[str, str]
) -> Bound | None:
    """Return the calls of both kernels of a layer whose weights stay; None where there are no steps."""
    form, _ = layer_of(step.part.graph)
    count, kept = len(form.backward), memory.owner.in_order
    steps, batch, inputs = memory.now.numbers(memory.owner.plan.tiles[values["x"]].shape)()
    if not steps or not batch:
        return None
    key = values["w"], "gates"
    if key not in kept:
        kept[key] = panels(made.matrix.t(), known_registers(get_device(target_of(memory.owner.where))))
    gates = torch.empty(steps * batch, made.matrix.shape[1])
    x = Operand(values["x"], (steps * batch, inputs))
    first = bind_entry(memory, entries[1], (steps * batch,), (x, kept[key], made.bias), (gates,))

    def state() -> torch.Tensor:
        return torch.zeros(count, batch, form.hidden)

    roles = ("h", "c") if form.cell == "LSTM" else ("h",)
    begins = [Operand(values[role]) if role in values else state() for role in roles]
    shown = [*map(Operand, step.part.outputs)]
    ends = [state() for _ in range(len(roles) + 1 - len(shown))]
    lengths = torch.full((batch,), steps, dtype=torch.int32)
    then = bind_entry(memory, entries[0], (), (gates, *made.state, lengths, *begins), (*shown, *ends))

    def run(slots: Slots) -> None:
        first(slots)
        then(slots)

    return run


def _layer(
    form: Recurrent,
    entry: Any,
    first_arguments: Callable[[], tuple[torch.Tensor, ...]],
    given: Mapping[str, torch.Tensor],
    found: list[torch.Tensor],
) -> None:
    """Compute a layer into its first results; what a node does not name is computed and dropped."""
    steps, batch = given["x"].shape[:2]
    count = len(form.backward)
    if not steps or not batch:
        _nothing(found, given)
        return
    lengths = given.get("lengths")
    lengths = whole_lengths(batch, steps) if lengths is None else ready(lengths.to(torch.int32))
    roles = ("h", "c") if form.cell == "LSTM" else ("h",)
    empty = [torch.zeros(count, batch, form.hidden) for role in roles if role not in given]
    first = [ready(given[role]) if role in given else empty.pop() for role in roles]
    ends = [torch.empty(count, batch, form.hidden) for _ in range(len(roles) + 1 - len(found))]
    entry(*first_arguments(), lengths, *first, *found, *ends)


@lru_cache(maxsize=64)
def whole_lengths(batch: int, steps: int) -> Any:
    """Return the lengths of sequences that all have the same, as kernels take them; they only read it."""
    from tvm_ffi import from_dlpack

    return from_dlpack(torch.full((batch,), steps, dtype=torch.int32))


def _nothing(found: list[torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Give the results of sequences without steps, or of none: states are as before, 0 by stated lengths."""
    for value, role in zip(found[1:], ("h", "c"), strict=False):
        value.copy_(given[role]) if role in given and "lengths" not in given else value.zero_()


# Weights of recurrent layers that are codes of 8 bits, as their kernel takes them; gates of inputs
@dataclass(frozen=True)
class Coded:
    """A layer's weights.

    matrices: Per direction what multiplies inputs: codes ``[inputs, gates * hidden]``, scale, zero point.
    bias: What is added to that, ``[directions * gates * padded]``.
    state: What multiplies the state: codes in words, their sums, zero points and scales, per column.
    """

    matrices: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    bias: torch.Tensor
    state: tuple[torch.Tensor, ...]


def packed_codes(form: Recurrent, given: Mapping[str, torch.Tensor]) -> Coded:
    """Return the weights of a layer as its kernel takes them."""
    from ladder.runtime.onnx_ops.integers import SIGN, signed

    count, width = len(form.backward), form.gates * form.hidden
    w, r, scale = given["w"], given["r"], given["r_s"].reshape(count, -1)
    bias = given["b"] if "b" in given else scale.new_zeros(count, 2 * width)
    matrices = tuple((w[at].clone(), given["w_s"][at], given["w_z"][at]) for at in range(count))
    for codes, _, _ in matrices:
        stays(codes)
    outer, inner = (by_gates(form, half) for half in bias.chunk(2, 1))
    shift = SIGN if r.dtype == torch.uint8 else 0
    zero = (given["r_z"].to(torch.int32) - shift).reshape(count, -1).expand(count, width)
    codes = signed(r.contiguous())
    sums = codes.sum(1, dtype=torch.int32) - zero * form.hidden
    factors = (by_gates(form, x).reshape(count, -1) for x in (sums, zero, scale.expand(count, width)))
    columns = by_gates(form, codes.transpose(1, 2)).reshape(count, -1, form.hidden)
    words = (
        F.pad(columns, (0, -form.hidden % FOUR)).reshape(count, columns.shape[1], -1, FOUR).transpose(1, 2)
    )
    whole = words.reshape(count, words.shape[1], -1)
    return Coded(matrices, (outer + inner).reshape(-1), (whole, *factors))


def gates_of_codes(form: Recurrent, made: Coded, x: torch.Tensor) -> torch.Tensor:
    """Return what inputs give to all gates: the inputs are rounded to codes by their range."""
    from ladder.runtime.onnx_ops.integers import whole_product
    from ladder.runtime.onnx_ops.quantized import dynamic

    codes, scale, zero = dynamic(x.reshape(-1, x.shape[2]))
    parts = [
        whole_product(codes, w, zero, w_zero).float() * (scale * w_scale)
        for w, w_scale, w_zero in made.matrices
    ]
    found = torch.stack(parts, 1).reshape(len(codes), len(parts), form.gates, form.hidden)
    return F.pad(found, (0, form.padded - form.hidden)).flatten(1) + made.bias
