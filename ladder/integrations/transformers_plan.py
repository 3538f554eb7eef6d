"""transformers' ``tp_plan`` for quantized layers: each is quantized whole, then cut.

So shards equal the whole: transformers would cut weights before they are quantized. The rules of layers that
Ladder quantizes are taken out of a model's plan while it is loaded, and carried out by the styles of
`ladder.integrations.distributed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ladder.api.linear import Linear
from ladder.api.linear_modules import bias_shard
from ladder.integrations.distributed import ColwiseLinear, RowwiseLinear, VocabularyShard, connected
from tile_types import QuantizedTensor
from tile_types.errors import LadderError, unknown_name
from tile_types.shards import COLUMNS, ROWS, shard


class Cut(NamedTuple):
    """How a style cuts a layer: the axis of its weight, the number of matrices joined in it, our style."""

    axis: int
    joined: int
    style: ColwiseParallel | RowwiseParallel

    def parts(self, rows: int) -> tuple[int, ...] | None:
        """Return the rows of the joined matrices; None for one matrix."""
        return None if self.joined == 1 else (rows // self.joined,) * self.joined


_GATHERED = Cut(ROWS, 1, ColwiseLinear(output_layouts=Replicate()))
_SPLIT = Cut(COLUMNS, 1, RowwiseLinear(input_layouts=Replicate()))

STYLES: dict[str, Cut | None] = {
    "colwise": Cut(ROWS, 1, ColwiseLinear()),
    "packed_colwise": Cut(ROWS, 2, ColwiseLinear()),
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "rowwise": Cut(COLUMNS, 1, RowwiseLinear()),
    "rowwise_rep": _SPLIT,
    "rowwise_split_input": _SPLIT,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}
"""Name in a plan -> how the layer is cut; None for one that every process holds whole."""


def wildcard(name: str) -> str:
    """Return the name of a module as plans have it, with ``*`` for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class LayerPlan:
    """The rules for quantized layers of one model.

    model: The model that is loaded.
    layers: Names of its layers that will be quantized; their rules are taken out of the model's plan.
    """

    def __init__(self, model: Any, layers: Iterable[str]) -> None:
        self.model = model
        self.whole: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
        linear = (name for name, module in model.named_modules() if type(module) is torch.nn.Linear)
        quantized = set(layers)
        others = {wildcard(name) for name in linear if name not in quantized}
        self.styles = {
            name: rule for name in quantized if (rule := self._rule(name, wildcard(name))) is not None
        }
        ruled = {wildcard(name) for name in self.styles}
        self.mixed = ruled & others
        """Rules for layers of which some are quantized: these cannot be cut."""
        taken = (*(ruled - others), *self.styles)
        model._tp_plan = {
            name: style
            for name, style in self.whole.items()
            if name.removesuffix(".weight").removesuffix(".bias") not in taken
        }

    def _rule(self, *names: str) -> str | None:
        return next((self.whole[name] for name in names if name in self.whole), None)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The devices of tensor parallelism, once transformers has made them; None without."""
        manager = getattr(self.model, "_mesh_manager", None)
        mesh = getattr(self.model, "_device_mesh", None) if manager is None else manager.get_mesh("tp")
        if mesh is not None and mesh.ndim > 1:
            mesh = mesh["tp"]
        return None if mesh is None or mesh.size() == 1 else mesh

    def restore(self) -> None:
        """Give the model its plan back: caches ask it how many heads a process has."""
        self.model._tp_plan = self.whole
        mesh = self.mesh
        for name, module in list(self.model.named_modules()) if mesh is not None else ():
            rule = self._rule(name, wildcard(name))
            if rule is not None and isinstance(getattr(module, "weight", None), DTensor):
                _make_local(self.model, name, rule, mesh)  # type: ignore[arg-type]

    def cut(self, name: str) -> Cut | None:
        """Return how a layer is cut; None if it is whole.

        Raises UnknownNameError if its style is none of `STYLES`.
        Raises LadderError if its rule is for layers that are not quantized, too.
        """
        style = self.styles.get(name) if self.mesh is not None else None
        if style is not None and wildcard(name) in self.mixed:
            raise LadderError(
                f"the tp_plan has one rule for {wildcard(name)}: quantize all of these, or none"
            )
        if style is not None and style not in STYLES:
            raise unknown_name(f"style of the quantized layer {name}", style, STYLES)
        return None if style is None else STYLES[style]

    def refuse_stacks(self, name: str) -> None:
        """Raise `LadderError` for stacked experts that would have to be cut."""
        if self.mesh is not None:
            raise LadderError(
                f"{name}: stacked experts are not cut by a tp_plan yet; `shard_experts` of"
                " ladder.integrations.distributed cuts their matrices"
            )

    def shard(self, name: str, matrix: QuantizedTensor) -> QuantizedTensor:
        """Return what this process holds of a layer's weight."""
        cut, mesh = self.cut(name), self.mesh
        if cut is None or mesh is None:
            return matrix
        return shard(matrix, cut.axis, mesh.get_local_rank(), mesh.size(), cut.parts(matrix.shape[0]))

    def bias(self, name: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return what this process adds of a layer's bias."""
        cut, mesh = self.cut(name), self.mesh
        if cut is None or mesh is None or bias is None:
            return bias
        return bias_shard(bias, cut.axis, mesh.get_local_rank(), mesh.size(), cut.parts(bias.shape[0]))

    def connect(self, name: str, layer: Linear) -> None:
        """Let a layer take and give tensors as its style says."""
        cut, mesh = self.cut(name), self.mesh
        if cut is not None and mesh is not None:
            connected(layer, mesh, cut.axis, cut.style)


def _make_local(model: Any, name: str, rule: str, mesh: DeviceMesh) -> None:
    """Let an embedding or a linear layer that transformers has cut compute with tensors of its process alone.

    transformers' own way passes by `DTensor`, which no graph holds. What it has cut otherwise stays as it is.
    """
    module: Any = model.get_submodule(name)
    extent, weight = module.weight.shape[0], module.weight
    if rule == "embedding_rowwise" and type(module) is torch.nn.Embedding:
        model.set_submodule(name, VocabularyShard(weight.to_local(), extent, mesh))
    cut, is_linear = STYLES.get(rule), type(module) is torch.nn.Linear
    if cut is None or not is_linear or (cut is _GATHERED and extent % mesh.size()):
        return
    for key, value in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, torch.nn.Parameter(value.to_local(), requires_grad=False))
    if cut.axis == COLUMNS and mesh.get_local_rank() > 0:
        module.bias = None
    module.__dict__.pop("forward", None)  # transformers' way
    connected(module, mesh, cut.axis, cut.style)
