"""Attention subgraphs: a kernel of ours where it is predicted to be at least as fast as torch's."""

from __future__ import annotations

from itertools import product

from ladder.ir.attention import Attention, as_attention, open_extents
from ladder.ir.extents import bind, size_names
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import Subgraph, part_of
from schedules.attention import PROBES, AnySchedule, Choice, choose, has_kernels, serving
from targets import TileDevice
from tile_types.errors import LadderError

OPEN = "sizes are open: each call takes the kernel, or torch's, that is predicted to be fastest"


def attention_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph:
    """Return the part of an ``attention`` node: kind ``attention``, or ``library`` and why it is torch's."""
    reason = refusal(graph, node, device)
    kind, text = ("library", f"torch's: {reason}") if reason else ("attention", "")
    if kind == "attention" and device is not None:
        text = OPEN if is_open(graph, node) else chosen(graph, node, device)[1].reason
    return part_of(kind, graph, node, text)


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
    return choice.reason if choice.seconds > choice.library else ""


def is_open(graph: Graph, node: Node) -> bool:
    """Tell whether batch, tokens or keys depend on symbolic sizes."""
    return any(isinstance(extent, str) for extent in open_extents(graph, node))


def served(graph: Graph, node: Node, device: TileDevice) -> tuple[Attention, list[AnySchedule]]:
    """Return the problem of open sizes and the schedules that serve it, none where torch's always does.

    Raises LadderError if no kernel computes it.
    """
    form, extents = as_attention(graph, node), open_extents(graph, node)
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
    form = as_attention(graph, node)
    batch, tokens, keys = (int(str(extent)) for extent in open_extents(graph, node))
    return form, choose(form, device, batch, tokens, keys)
