"""Attention by kernels of ours: which one, and its arguments; and torch's for the same operator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ladder.ir.attention import AXES, Attention, as_attention, open_extents
from ladder.ir.attention_row import operand_names
from ladder.ir.build import node_attributes
from ladder.ir.extents import MOST_COUNTED
from ladder.ir.graph import Graph, Node
from ladder.partition.attention import chosen, is_open, node_of, on_cpu, served
from ladder.runtime.build import Job, function_job
from ladder.runtime.kernel import ALIGNMENT
from ladder.runtime.model.arguments import span_of
from ladder.runtime.model.memory import rounded_up
from ladder.runtime.operator import attend
from schedules.attention import AnySchedule, best, next_best
from targets import TileDevice
from tile_types.errors import ShapeError

ALIGNED = ("q", "k", "v", "out")
"""Tensors that kernels access in wide pieces."""


def arguments(form: Attention, given: Mapping[str, torch.Tensor], without: str = "") -> list[Any]:
    """Return a kernel's arguments: sizes, strides, and every tensor as the one axis of its elements.

    form: What the kernel computes.
    given: ``q``, ``k``, ``v``, ``out`` as ``[batch, heads, tokens, size]``, and what `Attention.tensors`
        names; any strides but along the last axis, extents 1 are shared.
    without: A tensor that the kernel makes itself.
    Raises ShapeError if offsets do not fit 32 bits, or the last axis is not contiguous.
    """
    out, k = given["out"], given["k"]
    numbers = {"batch": out.shape[0], "tokens": out.shape[2], "keys": k.shape[2]}
    flat = []
    for name in form.tensors(without):
        tensor = given[name]
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(f"attention needs contiguous rows of {name}, got strides {tensor.stride()}")
        span = elements_spanned(tensor)
        if span > MOST_COUNTED:
            raise ShapeError(f"attention's {name} spans {span} elements; offsets have 32 bits")
        for axis, extent, stride in zip(AXES[name], tensor.shape, tensor.stride(), strict=False):
            numbers[f"{name}_{axis}"] = 0 if extent == 1 else stride
        flat.append(
            (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).as_strided((span,), (1,))
        )
    return [*(numbers[name] for name in form.numbers(without)), *flat]


def elements_spanned(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first of a tensor to its last, those between included."""
    first, end = span_of(tensor)
    return (end - first) // tensor.element_size()


def attention_jobs(graph: Graph, device: TileDevice) -> list[Job]:
    """Return the kernels that a part wants: one, or where sizes are open those that serve it."""
    node = node_of(graph)
    if device.kind == "llvm":
        return [_cpu_job(graph, device)]
    if not is_open(graph, node):
        return [attention_job(graph, device)]
    form, schedules = served(graph, node, device)
    return [job_of(form, one, device, partial(next_best, form, device, one)) for one in schedules]


def attention_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel that a part of known sizes wants: one per problem and schedule."""
    node = node_of(graph)
    form, choice = chosen(graph, node, device)
    batch, tokens, keys = (int(str(extent)) for extent in open_extents(graph, node))
    others = partial(next_best, form, device, choice.schedule, (batch, tokens, keys))
    return job_of(form, choice.schedule, device, others)


def job_of(
    form: Attention,
    schedule: AnySchedule,
    device: TileDevice,
    others: Callable[[], Sequence[AnySchedule]] = tuple,
) -> Job:
    """Return the kernel of a schedule.

    others: Returns the schedules that take its place where it spills.
    """
    name = f"ladder_attention_{hashlib.sha256(f'{form}{schedule}'.encode()).hexdigest()[:10]}"

    def emit(name: str) -> Any:
        from ladder.lower.build import ATTENTION, resolve

        return resolve(ATTENTION, "target kind", device.kind)(form, device, schedule, name)

    facts = {"attention": str(form), "schedule": str(schedule)}
    return function_job(
        facts, name, device, emit, others=lambda: (job_of(form, other, device) for other in others())
    )


def _cpu_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel of a CPU: one per problem serves all sizes."""
    node = node_of(graph)
    form, width = on_cpu(graph, node, device), int(str(graph.tile(node.inputs[2]).shape[-1]))
    assert form is not None  # or the part were torch's
    facts = {"attention": str(form), "width": width, "turned": node_attributes(node)["turned"]}
    name = f"ladder_attention_{hashlib.sha256(repr(facts).encode()).hexdigest()[:10]}"

    def emit(name: str) -> Any:
        from ladder.lower.cpu.attention import emit_attention

        return emit_attention(form, width, facts["turned"], name)

    return function_job(facts, name, device, emit)


Call = Callable[..., torch.Tensor]


def attention_call(entries: Sequence[Any], graph: Graph, device: TileDevice) -> Call:
    """Return ``(inputs..., out) -> result`` of a part: ``out``, or where torch's is faster a new tensor."""
    node, names = node_of(graph), [node.name for node in graph.inputs]
    call = _call_by_sizes(entries, graph, device) if is_open(graph, node) else _call_of(entries[0], graph)
    order = [names.index(value) for value in node.inputs]  # q, k and v may be one tensor
    if order == [*range(len(names))]:
        return call
    return lambda *tensors: call(*(tensors[at] for at in order), tensors[-1])


def _call_by_sizes(entries: Sequence[Any], graph: Graph, device: TileDevice) -> Call:
    """Return a call that takes what is predicted to be fastest for its sizes, by classes of them."""
    node = node_of(graph)
    form, schedules = served(graph, node, device)
    calls = [_call_of(entry, graph) for entry in entries]
    library = library_attention(node)
    known: dict[tuple[int, int, int], int | None] = {}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        (batch, _, tokens, _), keys = tensors[0].shape, tensors[1].shape[-2]
        if not keys or not tensors[-1].numel():
            return library(*tensors[:-1])
        case = rounded_up(batch), rounded_up(tokens), rounded_up(keys)
        if case not in known:
            known[case] = best(form, device, schedules, case)
        found = known[case]
        return library(*tensors[:-1]) if found is None else calls[found](*tensors)

    return run


def _call_of(entry: Any, graph: Graph) -> Call:
    """Return the call of one kernel; tensors that it cannot read as they lie are copied."""
    node = node_of(graph)
    form, given = as_attention(graph, node), node_attributes(node)
    names, turned = operand_names(len(node.inputs), given), given["turned"]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        *operands, out = tensors
        found = {name: readable(name, x) for name, x in zip(names, operands, strict=True)}
        entry(*arguments(form, found | {"out": out.transpose(1, 2) if turned else out}))
        return out

    return run


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an operand with four axes, or two for positions, whose rows kernels can read."""
    if name == "mask":
        tensor = tensor[(None,) * (4 - tensor.ndim)]
    rows = tensor.stride()[:-1] if name in ALIGNED else ()
    width = ALIGNMENT // tensor.element_size()
    aligned = tensor.data_ptr() % ALIGNMENT == 0 and all(stride % width == 0 for stride in rows)
    dense_rows = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    if dense_rows and (aligned or name not in ALIGNED) and elements_spanned(tensor) <= MOST_COUNTED:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return heads or masks whose elements lie side by side: torch's fast functions take no others.

    What repeats along other axes than the last still does.
    """
    if not x.ndim or x.stride(-1) == 1:
        return x
    once = x[tuple(slice(1) if not step else slice(None) for step in x.stride()[:-1])]
    return once.contiguous().expand(x.shape)


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a mask that chooses adds to scores, its logarithm; torch would fill two tensors for it."""
    once = mask[tuple(slice(None) if step else slice(1) for step in mask.stride())]
    return once.to(dtype).log_().expand(mask.shape)


def _attend_by_four(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    """Return attention by four axes: torch's fast functions take no other number of them.

    None of a GPU takes a mask beside keys that serve groups of heads: these are repeated.
    """
    lead, groups = q.shape[:-3], q.shape[-3] // max(k.shape[-3], 1)
    if mask is not None and groups > 1 and q.is_cuda:
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    if len(lead) == 1 or not q.numel() or k.shape[:-3] != lead or v.shape[:-3] != lead:
        return attend(q, k, v, mask, *how)
    if mask is not None and any(extent > 1 for extent in mask.shape[:-3]):
        mask = mask.expand(*lead, *mask.shape[-3:])
    mine = None if mask is None else _by_four(mask)
    return attend(_by_four(q), _by_four(k), _by_four(v), mine, *how).view(*q.shape[:-1], v.shape[-1])


def _by_four(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose axes before the last three are one."""
    return x.reshape(-1, *x.shape[-3:])


def library_attention(node: Node) -> Callable[..., torch.Tensor]:
    """Return torch's attention for a node: positions become a mask, codes are decoded before."""
    given = node_attributes(node)
    names, how = operand_names(len(node.inputs), given), (given["causal"], given["scale"])

    def run(*operands: torch.Tensor) -> torch.Tensor:
        found = dict(zip(names, operands, strict=True))
        q, k, v = (in_order(found[name]) for name in ("q", "k", "v"))
        mask = found.get("mask")
        if "k_scale" in found:
            k, v = ((x.float() * found[f"{n}_scale"]).to(q.dtype) for n, x in (("k", k), ("v", v)))
        if "position" in found:
            keys = torch.arange(k.shape[-2], device=k.device)
            mask = keys < found["position"][:, None, :, None] + given["reach"]
        if mask is not None:
            chooses = mask.dtype == torch.bool
            mask = as_bias(mask, q.dtype) if chooses and q.is_cuda else mask if chooses else mask.to(q.dtype)
            mask = in_order(mask[(None,) * (q.ndim - mask.ndim)])  # torch's fastest kernels take no other
        if q.dtype == torch.float16 and q.device.type == "cpu":  # torch rounds scores there
            whole = None if mask is None or mask.dtype == torch.bool else mask.float()
            wide = attend(q.float(), k.float(), v.float(), mask if whole is None else whole, *how)
            out = wide.to(q.dtype)
        else:
            out = _attend_by_four(q, k, v, mask, *how)
        if given["strict"] and mask is not None:
            out = _nan_without_keys(out, mask)
        return out.transpose(1, 2) if given["turned"] else out

    return run


def _nan_without_keys(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return attention with NaN where a mask hides all keys by -inf: softmax of nothing."""
    if not mask.shape[-1]:
        return out
    hidden = mask.amax(-1, keepdim=True) == -math.inf
    return out.masked_fill(hidden, math.nan) if out.is_cuda or hidden.any() else out
