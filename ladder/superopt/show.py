"""Drawings of graphs: a program beside what was found for it, as one self-contained page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.graph import Axis, Graph, Node
from ladder.superopt.generator.report import Report, VerifiedGraph

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 38, 24, 34, 16
BEND = 130
"""How far an edge bends, in pixels."""
COLOURS = {
    "input": "#dfe7f5", "load": "#cfe8d5", "store": "#cfe8d5", "accumulate": "#f7e3b5",
    "matmul": "#f3cfd0", "concat": "#e6d6f2",
}  # fmt: skip
"""Fill by operator; others are white."""

DETAILS = {
    "load": {"grid": "imap", "loop": "fmap"}, "store": {"grid": "omap"}, "accumulate": {"kind": "kind"},
    "constant": {"value": "value"},
}  # fmt: skip
"""Operator -> attributes that are shown -> how they are called; empty ones are not."""


@dataclass(frozen=True)
class Box:
    """A node's place in a drawing, in pixels."""

    node: Node
    x: float
    y: float


def svg(graph: Graph) -> str:
    """Draw one level of a graph: a row per depth, edges from operand to operator."""
    boxes = _layout(graph)
    width = max(box.x for box in boxes.values()) + WIDTH + MARGIN + BEND / 2
    height = max(box.y for box in boxes.values()) + HEIGHT + MARGIN
    edges = [
        _edge(boxes[graph.producer(value).name], boxes[node.name])
        for node in graph.nodes
        for value in node.inputs
    ]
    shapes = [_box(graph, box) for box in boxes.values()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' font-family="sans-serif" font-size="11">{"".join(edges)}{"".join(shapes)}</svg>'
    )


def _layout(graph: Graph) -> dict[str, Box]:
    depth: dict[str, int] = {}
    rows: dict[int, list[Node]] = {}
    for node in graph.nodes:
        depth[node.name] = 1 + max((depth[graph.producer(v).name] for v in node.inputs), default=-1)
        rows.setdefault(depth[node.name], []).append(node)
    widest = max(len(row) for row in rows.values())
    boxes = {}
    for level, row in rows.items():
        indent = (widest - len(row)) * (WIDTH + GAP_X) / 2
        for column, node in enumerate(row):
            x = MARGIN + indent + column * (WIDTH + GAP_X)
            boxes[node.name] = Box(node, x, MARGIN + level * (HEIGHT + GAP_Y))
    return boxes


def _edge(source: Box, target: Box) -> str:
    """Draw an edge; one that skips rows passes beside the boxes between."""
    x1, y1, x2, y2 = source.x + WIDTH / 2, source.y + HEIGHT, target.x + WIDTH / 2, target.y
    aside = BEND if y2 - y1 > GAP_Y and abs(x2 - x1) < WIDTH else 0
    above, below = (y1 + min(GAP_Y, (y2 - y1) / 2), y2 - min(GAP_Y, (y2 - y1) / 2))
    path = f"M{x1:.0f},{y1:.0f} C{x1 + aside:.0f},{above:.0f} {x2 + aside:.0f},{below:.0f} {x2:.0f},{y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#888"/>'


def _box(graph: Graph, box: Box) -> str:
    node = box.node
    shape = "×".join(map(str, node.tile.shape)) or "scalar"
    title = f"{node.operator}{_detail(graph, node)}"
    colour = COLOURS.get(node.operator, "#ffffff")
    middle = box.x + WIDTH / 2
    return (
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}"'
        f' stroke="#555"/><text x="{middle:.0f}" y="{box.y + 15:.0f}" text-anchor="middle">'
        f'{html.escape(title)}</text><text x="{middle:.0f}" y="{box.y + 30:.0f}" text-anchor="middle"'
        f' fill="#555">%{html.escape(node.name)}: {node.tile.ttype.name}[{shape}]</text>'
    )


def _detail(graph: Graph, node: Node) -> str:
    """Return the attribute that tells most."""
    attributes = node_attributes(node, graph)
    shown = DETAILS.get(node.operator, {})
    parts = [f"{label}={attributes[name]}" for name, label in shown.items() if attributes[name] != ()]
    return f" {' '.join(parts)}" if parts else ""


def page(report: Report, limit: int = 8) -> str:
    """Return an HTML page: counts, the program, and the found graphs, cheapest first."""
    counts = report.counts
    reasons = "".join(f"<li>{html.escape(why)}: {n}</li>" for why, n in sorted(counts.reasons.items()))
    facts = {
        "states explored": counts.states, "pruned": counts.pruned, "candidates": counts.candidates,
        "verified": counts.verified, "rejected": counts.rejected,
        "seconds": f"{report.seconds:.1f}", "complete": report.complete,
    }  # fmt: skip
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    original = f"<div><p>the program</p>{svg(report.program.graph())}</div>"
    found = "".join(_section(number, one, original) for number, one in enumerate(report.found[:limit], 1))
    name = html.escape(report.program.name)
    return (
        f"<!doctype html><meta charset='utf-8'><title>{name}</title><style>body{{font-family:sans-serif;"
        "margin:2em}th{text-align:left;padding-right:1em}.side{display:flex;gap:2em;flex-wrap:wrap}</style>"
        f"<h1>{name}</h1><p>{html.escape(report.program.doc)}</p><table>{rows}</table>"
        f"<p>Rejected because:</p><ul>{reasons or '<li>nothing was rejected</li>'}</ul>"
        f"{found or original}"
    )


def _section(number: int, found: VerifiedGraph, original: str) -> str:
    """Draw a found graph beside the program."""
    proof = found.certificate
    blocks = [node.body for node in found.graph.nodes if node.body is not None]
    drawings = "".join(f"<div><p>{_dimensions(body)}</p>{svg(body)}</div>" for body in blocks)
    return (
        f"<h2>Graph {number}</h2><p>Equal with error ≤ {proof.error:.1e}: degree"
        f" {proof.bound.degree if proof.bound else '?'}, {proof.rounds} rounds, at extents {found.extents},"
        f" which prove all. Floating point: error {found.stability.error:.1e}, the program's own"
        f" {found.stability.original:.1e}. {found.cost / 1024:.0f} KiB loaded per unit.</p>"
        f"<div class='side'>{original}{drawings}</div>"
    )


def _dimensions(body: Graph) -> str:
    def shown(axes: Sequence[Axis]) -> str:
        return ", ".join(f"{axis.name}={axis.extent}" for axis in axes) or "none"

    return f"block graph {html.escape(body.name)}: grid {shown(body.grid)}; loop {shown(body.loops)}"
