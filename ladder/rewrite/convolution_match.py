"""Pattern match of quantized convolutions: `Gemm` values with windows."""

from __future__ import annotations

from dataclasses import replace

from ladder.ir.convolution import as_convolution, windows_of
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph, Node
from ladder.rewrite.gemm_match import NORMALISE, Recogniser
from ladder.rewrite.passes import run_passes
from tile_types.errors import ShapeError


def as_window_gemm(graph: Graph) -> Gemm:
    """Recognise ``epilogue(row_scale * convolution(x, decode(B)) * factor + bias + residual)``.

    Raises LadderError if the graph is not that.
    """
    normal = run_passes(graph, NORMALISE)
    if len(normal.outputs) != 1:
        raise ShapeError(f"a convolution has one result, graph {graph.name!r} has {len(normal.outputs)}")
    return _WindowRecogniser(normal).gemm()


class _WindowRecogniser(Recogniser):
    """Peels a normalised graph from its output to the convolution."""

    def gemm(self) -> Gemm:
        result = self.graph.tile(self.graph.outputs[0])
        epilogue, value = self.epilogue(self.below_converts(self.graph.outputs[0]))
        added, value = self.added(value)
        vectors, value = self.factors(value)
        node = self.graph.producer(value)
        if node.operator != "contract":
            raise self.unrecognised(node)
        form = as_convolution(self.graph, node)
        if not form.last or form.groups > 1 or form.rank > 2:
            raise ShapeError("kernels convolve images of one group, channels last")
        activation, shape = self.graph.tile(node.inputs[0]).ttype.name, self.graph.tile(node.inputs[1]).shape
        n, *taps, channels = (int(str(extent)) for extent in shape)
        k = channels
        for tap in taps:
            k *= tap
        weight = self.weight(self.below_reshapes(node.inputs[1]), activation, k)
        self.use(node.inputs[0])
        self.require_all_used()
        factors = len(vectors) - (not weight["scale"])  # the scale of a row is one as well
        if factors not in (0, 1):
            raise self.unrecognised(node)
        found = Gemm(n, k, activation=activation, output=result.ttype.name, epilogue=epilogue, **weight)
        return replace(
            found,
            bias="bias" in added,
            factor=factors > 0,
            residual="residual" in added,
            windows=None if form.are_points else windows_of(form),
        )

    def use(self, value: str) -> None:
        node = self.graph.producer(value)
        if node.operator != "input":
            raise self.unrecognised(node)
        self.used.add(node.name)

    def factors(self, value: str) -> tuple[list[str], str]:
        """Return the vectors that multiply what the convolution gives: scales of rows, and others."""
        found: list[str] = []
        while (node := self.graph.producer(value)).operator == "mul":
            vector, value = self.peel_vector(node, lambda tile: tile.ttype.name == "float32")
            found.append(vector)
        return found, value

    def below_reshapes(self, value: str) -> str:
        """Skip what only changes the shape of the weight."""
        while (node := self.graph.producer(value)).operator == "reshape":
            value = node.inputs[0]
        return value

    def added(self, value: str) -> tuple[set[str], str]:
        """Return what is added: a bias, and a tensor like the result."""
        found: set[str] = set()
        while (node := self.graph.producer(value)).operator == "add":
            role, value = self.peel_added(node)
            if role in found or (role == "residual" and "bias" in found):
                raise self.unrecognised(node)
            found.add(role)
        return found, value

    def peel_added(self, node: Node) -> tuple[str, str]:
        for other, rest in (node.inputs, node.inputs[::-1]):
            source = self.graph.producer(self.below_converts(other))
            shape = self.graph.tile(other).shape
            role = {1: "bias", len(node.tile.shape): "residual"}.get(len(shape))
            fits = shape == node.tile.shape[-len(shape) :]
            if source.operator == "input" and role and fits:
                self.require_type_of_result(source)
                self.used.add(source.name)
                return role, self.below_converts(rest)
        raise self.unrecognised(node)
