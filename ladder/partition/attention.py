"""Attention subgraphs: a kernel of ours where it is predicted to be at least as fast as torch's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ladder.ir.attention import Attention, as_attention, head_problem, open_extents
from ladder.ir.extents import bind, size_names
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import Subgraph, part_of
from schedules.attention import PROBES, AnySchedule, Choice, choose, has_kernels, serving
from targets import TileDevice
from tile_types.errors import LadderError, ShapeError

OPEN_REASON = "sizes are open: each call takes the kernel, or torch's, that is predicted to be fastest"


def attention_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph:
    """Return the part of an ``attention`` node: kind ``attention``, or ``library`` and why it is torch's."""
    if on_cpu(graph, node, device) is not None:
        return part_of("attention", graph, node, CPU_REASON)
    reason = refusal(graph, node, device)
    kind, text = ("library", f"torch's: {reason}") if reason else ("attention", "")
    if kind == "attention" and device is not None:
        text = OPEN_REASON if is_open(graph, node) else chosen(graph, node, device)[1].reason
    return part_of(kind, graph, node, text)


def node_of(graph: Graph) -> Node:
    """Return the ``attention`` node of a part."""
    return next(node for node in graph.nodes if node.operator == "attention")


CPU_REASON = "by a kernel where scores are few, else by torch's"

MOST_PACKED, SCORED = 1 << 16, 60
"""Elements of keys and values up to which attention on a CPU is ours: packing them takes longer than what
torch's takes beside its products. Of products, by which torch's is a little faster, so many count as one."""

WIDEST = 256
"""Elements of a value's head, whose vectors are unrolled."""


def on_cpu(graph: Graph, node: Node, device: TileDevice | None) -> Attention | None:
    """Return the problem that a kernel of a CPU computes; None if there is none."""
    if device is None or device.kind != "llvm":
        return None
    try:
        form = as_attention(graph, node, ("float32",), alike=False)
    except LadderError:
        return None
    q, k, *rest = (graph.tile(value).shape for value in node.inputs)
    plain = not form.position and form.mask in ("", "bool", "float32")
    masked = all(mask[-1:] == k[-2:-1] for mask in rest[1:])
    if not plain or not masked or q[0] != k[0] or not isinstance(rest[0][-1], int) or rest[0][-1] > WIDEST:
        return None
    sizes = [extent for extent in (q[0], q[-2], k[-2]) if isinstance(extent, int)]
    return form if len(sizes) < 3 or are_few(form, sizes, rest[0][-1]) else None


def are_few(form: Attention, sizes: Sequence[int], width: int) -> bool:
    """Tell whether a kernel of a CPU is faster than torch's for batch, tokens and keys, none of which is 0.

    width: Elements of a value's head.
    """
    batch, tokens, keys = sizes
    packed = batch * keys * (form.size + width)
    products = packed * tokens * form.heads
    return products > 0 and packed * form.kv_heads + products // SCORED <= MOST_PACKED


def refusal(graph: Graph, node: Node, device: TileDevice | None) -> str:
    """Say why a kernel of ours does not serve; empty if it does."""
    if device is None or not has_kernels(device):
        return "no kernel of ours runs on this device"
    if 0 in open_extents(graph, node):
        return "there is nothing to attend to"
    try:
        if is_open(graph, node):
            return "" if served(graph, node, device)[1] else "it is predicted to be faster at all sizes"
        _, choice = chosen(graph, node, device)
    except LadderError as error:
        return str(error)
    return choice.reason if choice.is_torchs else ""


def is_open(graph: Graph, node: Node) -> bool:
    """Tell whether batch, tokens or keys depend on symbolic sizes."""
    return any(isinstance(extent, str) for extent in open_extents(graph, node))


def served(graph: Graph, node: Node, device: TileDevice) -> tuple[Attention, list[AnySchedule]]:
    """Return the problem of open sizes and the schedules that serve it, none where torch's always does.

    Raises LadderError if no kernel computes it.
    """
    form, extents = _with_heads(as_attention(graph, node)), open_extents(graph, node)
    names = size_names(extents)
    cases = {
        tuple(int(str(bind(str(extent), dict(zip(names, sizes, strict=True))))) for extent in extents)
        for sizes in product(PROBES, repeat=len(names))
    }
    return form, serving(form, device, [(b, t, k) for b, t, k in sorted(cases) if min(b, t, k) > 0])


def chosen(graph: Graph, node: Node, device: TileDevice) -> tuple[Attention, Choice]:
    """Return the problem and its schedule.

    Raises LadderError if no kernel computes it.
    """
    form = _with_heads(as_attention(graph, node))
    batch, tokens, keys = (int(str(extent)) for extent in open_extents(graph, node))
    return form, choose(form, device, (batch, tokens, keys))


def _with_heads(form: Attention) -> Attention:
    """Return a problem whose heads kernels of GPUs take; raises ShapeError for others."""
    if problem := head_problem(form):
        raise ShapeError(problem)
    return form
