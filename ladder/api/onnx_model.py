"""ONNX models as callables: imported once, built for the device of the first call."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ladder.api.problem import gemm_for
from ladder.frontend.onnx_branches import BRANCHES, BranchedStage, graph_model, handed_on, outside
from ladder.frontend.onnx_file import OnnxFile, open_onnx
from ladder.frontend.onnx_import import import_stages, one_error
from ladder.frontend.onnx_late import shape_of
from ladder.frontend.onnx_stages import Imported, NodeStage, Staged
from ladder.ir.extents import show_shape
from ladder.ir.graph import Graph
from ladder.runtime.compile import target_of
from ladder.runtime.model.build import build_model
from ladder.runtime.model.program import Program, Source
from ladder.runtime.model.staged import IfStage, PlanStage, StagedModel, TorchStage, Wanted, require_wanted
from ladder.runtime.model.whole import WholeModel, by_name
from ladder.runtime.onnx_ops.evaluate import bound_node
from ladder.runtime.onnx_ops.specialized import Specialized, form_of
from ladder.runtime.onnx_ops.values import given_value
from ladder.runtime.packed import pack
from targets import get_device
from tile_types.errors import DeviceError, LadderError

CPU = torch.device("cpu")


class OnnxModel:
    """A model from an ONNX file; call it with its inputs, by position or by name.

    Parameters
    ----------
    source
        Path of the file, or an ``onnx.ModelProto``.
    precise
        Whether each operator's result is rounded to its type, see `compile`.
    shapes
        Input -> the shape that it has in every call, see `compile`.
    given
        Initializers that are inputs too and that each call gives; others have the file's values. A call that
        names one makes such a model by itself, of the file as it is then.

    Raises
    ------
    ArtifactError
        If the file is truncated, or its external data is missing.
    ImportRefused
        If it uses an operator, a version or a form that is not supported; the message names it.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Any,
        precise: bool = False,
        shapes: Mapping[str, Sequence[int]] | None = None,
        given: Collection[str] = (),
    ) -> None:
        with one_error(source):
            file = without(open_onnx(source), given)
        self._defaults = defaults_of(file.model.graph)
        self._again = partial(OnnxModel, source, precise, shapes) if self._defaults else None
        self._given: dict[frozenset[str], OnnxModel] = {}
        """Initializers that calls gave -> the model of such calls."""
        self.staged = import_stages(file, gemm_for, precise, shapes)
        self._built: dict[torch.device, WholeModel | StagedModel] = {}
        self._special: dict[torch.device, Sequence[Specialized]] = {}
        """Device -> what makes models for shapes of calls, if there are several stages for all shapes."""
        stated = all(map(is_stated, self.staged.inputs.values()))
        self._file = None if stated or self.staged.single else kept(file, source)
        self._precise = precise

    @property
    def imported(self) -> Imported:
        """The model as one plan, for any device.

        Raises
        ------
        ImportRefused
            If it runs in several stages; the message says why.
        """
        return self.staged.one("what was asked for")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(self.staged.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return self.staged.outputs

    @property
    def graph(self) -> Graph:
        """The tile graph, as imported."""
        return self.imported.program.graph

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Run on the device of the arguments.

        Returns
        -------
        The output, or a tuple of them.

        Raises
        ------
        ShapeError, DTypeError
            If an argument does not fit; the message names it.
        """
        if own := self._defaults.intersection(named):
            return self._giving(own)(**by_name((*self.inputs, *own), arguments, named))
        where = CPU
        for value in arguments or named.values():
            if isinstance(value, torch.Tensor):
                where = value.device
                break
        if self._file is not None:
            inputs = self.staged.inputs
            if arguments or named.keys() != inputs.keys():
                named = by_name(self.inputs, arguments, named)
            values = {name: given_value(named[name]) for name in inputs}
            arguments, named = (*values.values(),), {}
            form = form_of(arguments)
            for special in self._special.get(where) or self._of_shapes(where):
                model = special.of(arguments, form)
                if model is not None:
                    return model(*arguments)
            general = self._built.get(where) or self.on(where)
            return general.of(values) if isinstance(general, StagedModel) else general(*arguments)
        return (self._built.get(where) or self.on(where))(*arguments, **named)

    def _giving(self, own: frozenset[str]) -> OnnxModel:
        """Return the model of calls that give some initializers."""
        if own not in self._given:
            assert self._again is not None  # there are such initializers
            self._given[own] = self._again(own)
        return self._given[own]

    def _of_shapes(self, where: torch.device) -> Sequence[Specialized]:
        if self._file is None:
            return ()
        if where not in self._special:
            self._special[where] = of_shapes(self._file, self._precise, self.staged, where)
        return self._special[where]

    def on(self, device: torch.device | str) -> WholeModel | StagedModel:
        """Return the model built for a device, building it on first use.

        Raises
        ------
        LadderError
            If a part has no executor there; the message names it.
        """
        where = place_of(device)
        if where not in self._built:
            self._built[where] = build_staged(self.staged, where)
        return self._built[where]

    def whole(self, device: torch.device | str) -> WholeModel:
        """Return the model built for a device, as one plan.

        Raises
        ------
        ImportRefused
            If it runs in several stages; the message says why.
        """
        found = self.on(device)
        if not isinstance(found, WholeModel):
            self.staged.one("a plan on its own")
        assert isinstance(found, WholeModel)  # or it was just refused
        return found

    def plan(self, device: torch.device | str = "cpu") -> str:
        """Return the plan for a device as text: one line per step, with what executes it.

        If calls brought shapes that have plans of their own, these.
        """
        where = place_of(device)
        found = [each.models for each in self._of_shapes(where)]
        texts = [
            f"inputs {', '.join(show_shape(shape) for _, shape in form)}:\n{model.plan()}"
            for models in found
            for form, model in models.items()
            if isinstance(model, WholeModel | StagedModel)
        ]
        return "\n".join(texts) or self.on(device).plan()

    def export(
        self, path: str | os.PathLike[str], device: torch.device | str = "cpu", *, sign: Any = None
    ) -> Path:
        """Write the model, built for a device, to one file that `ladder.load` runs without a compiler.

        ``sign`` is an Ed25519 key that signs the file, see `ladder.runtime.signing`.
        """
        from ladder.runtime.model.saved import save_model

        return save_model(self.whole(device), path, sign)

    def to_onnx(self, path: str | os.PathLike[str], *, external: bool | None = None) -> Path:
        """Write the tile graph, with its tTypes as attributes, as an ONNX model; see `export_onnx`."""
        from ladder.frontend.onnx_export import export_onnx

        return export_onnx(self.staged.one("to_onnx"), path, external=external)


def build_staged(staged: Staged, where: torch.device) -> WholeModel | StagedModel:
    """Build an imported model for a device: one plan where it is one."""
    if staged.single is not None:
        return build_imported(staged.single, where)
    stages = [
        PlanStage(build_imported(stage, where), stage.inputs, stage.outputs)
        if isinstance(stage, Imported)
        else node_stage(stage, staged, where)
        for stage in staged.stages
    ]
    inputs = {name: wanted_of(info) for name, info in staged.inputs.items()}
    stored = {
        name: value.to(where) if isinstance(value, torch.Tensor) else value
        for name, value in staged.stored.items()
    }
    return StagedModel(inputs, staged.outputs, stages, stored, where, staged.title)


MOST_SHAPES = 4
"""Sets of shapes for which a model has plans of its own."""


def defaults_of(graph: Any) -> frozenset[str]:
    """Return the inputs whose values a graph stores, for calls that give none."""
    return frozenset(info.name for info in graph.input) & {tensor.name for tensor in graph.initializer}


def without(file: OnnxFile, given: Collection[str]) -> OnnxFile:
    """Return a file without the values of some inputs."""
    if not given:
        return file
    model = type(file.model)()
    model.CopyFrom(file.model)
    left = [tensor for tensor in model.graph.initializer if tensor.name not in given]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)
    return replace(file, model=model)


def kept(file: OnnxFile, source: Any) -> OnnxFile:
    """Return a file that stays what it is, whatever the caller does with a model in memory."""
    if isinstance(source, str | os.PathLike):
        return file
    model = type(file.model)()
    model.CopyFrom(file.model)
    return replace(file, model=model)


def of_shapes(
    file: OnnxFile, precise: bool, general: Staged, where: torch.device
) -> tuple[Specialized, Specialized]:
    """Return what makes models for the shapes of calls: of the first at once, of others that come again.

    Where shapes are known, more becomes one plan; if it does not, there is no such model.
    """
    wanted = {name: wanted_of(info) for name, info in general.inputs.items()}

    def make(given: Mapping[str, torch.Tensor]) -> WholeModel | StagedModel | None:
        require_wanted(wanted, given)
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        try:
            found = import_stages(file, gemm_for, precise, shapes)
        except LadderError:
            return None  # the model for all shapes runs, or says what is wrong
        return build_staged(found, where) if len(found.stages) < len(general.stages) else None

    names = tuple(general.inputs)
    return Specialized(names, make, patience=1), Specialized(names, make, patience=2, most=MOST_SHAPES - 1)


def node_stage(stage: NodeStage, staged: Staged, where: torch.device) -> TorchStage:
    """Return a node that torch runs; graphs of its own are models."""
    precise = any(isinstance(other, Imported) and other.program.precise for other in staged.stages)

    def special(graph: Any) -> Specialized:
        return specialized(graph, stage, staged.stored, where, precise)

    node = bound_node(stage.node, stage.versions, special)
    if not isinstance(stage, BranchedStage):
        return TorchStage(node, stage.reads, stage.why)

    def make(taken: bool) -> WholeModel | StagedModel | None:
        return built_or_none(stage.models[taken], where, precise)

    graphs = {attribute.name: attribute.g for attribute in stage.node.attribute}
    branches = {taken: special(graphs[name]) for taken, name in BRANCHES.items()}
    handed = {taken: handed_on(graphs[name], staged.stored) for taken, name in BRANCHES.items()}
    return IfStage(node, stage.reads, stage.why, make, branches, handed)


def specialized(
    graph: Any, stage: NodeStage, stored: Mapping[str, Any], where: torch.device, precise: bool
) -> Specialized:
    """Return what makes a graph of a node a model for the types and shapes of a call.

    A branch is one from its first call on; the body of a loop from the second on that has the same shapes.
    """
    inputs = [info.name for info in graph.input]
    names = [name for name in (*inputs, *outside(graph)) if name in inputs or name not in stored]

    def make(given: Mapping[str, torch.Tensor]) -> WholeModel | StagedModel | None:
        return built_or_none(graph_model(graph, stage.versions, given, stored), where, precise)

    return Specialized(names, make, patience=2 if inputs else 1)


def built_or_none(model: Any, where: torch.device, precise: bool) -> WholeModel | StagedModel | None:
    """Return a model of a node's graph; None if it can be none: the node runs it, or says what is wrong."""
    try:
        return build_staged(import_stages(model, gemm_for, precise), where)
    except LadderError:
        return None


def wanted_of(info: Any) -> Wanted:
    """Return what an input of an ONNX type must be."""
    kind = str(info.WhichOneof("value")).removesuffix("_type")
    if kind != "tensor":
        return Wanted(kind)
    shape = shape_of(info)
    known = shape is not None and all(extent is not None for extent in shape)
    fits = tuple(extent for extent in shape or () if extent is not None) if known else None
    return Wanted(kind, int(info.tensor_type.elem_type), fits)


def is_stated(info: Any) -> bool:
    """Tell whether an input is a tensor whose extents are all known."""
    shape = wanted_of(info).shape
    return shape is not None and all(isinstance(extent, int) for extent in shape)


def build_imported(imported: Imported, where: torch.device) -> WholeModel:
    """Build an imported model for a device: pack its weights, plan, compile."""
    device = get_device(target_of(where))
    stored: list[torch.Tensor] = []
    positions: list[tuple[int, ...]] = []
    for weight in imported.weights:
        arrays = pack(weight.gemm, device, weight.value.to(where)).tensors
        first = len(imported.inputs) + len(stored)
        positions.append(tuple(range(first, first + len(arrays))))
        stored += [array.to(where) for array in arrays]
    first = len(imported.inputs) + len(stored)
    stored += [tensor.to(where) for tensor in imported.program.held]
    sources = {name: _placed(source, positions, first) for name, source in imported.program.sources.items()}
    results = tuple(
        item if isinstance(item, int) else (item[0].to(where),) for item in imported.program.results
    )
    count = len(imported.inputs) + len(stored)
    program = replace(imported.program, sources=sources, held=(), results=results, arguments=count)
    return whole_model(program, where, imported, stored)


def whole_model(
    program: Program, where: torch.device, imported: Imported, stored: list[torch.Tensor]
) -> WholeModel:
    """Compile a program whose tensors beyond its inputs are ``stored``."""
    built = build_model(program, where)
    parameters: Mapping[str, Any] = {name: {"tensor": at} for at, name in enumerate(imported.inputs)}
    several = [{"tensor": at} for at in range(len(imported.outputs))]
    results: Any = several[0] if len(several) == 1 else {"tuple": several}
    libraries = {name: kernel.library for name, kernel in built.kernels.items()}
    return WholeModel(built.graph, built.executable, parameters, results, stored, imported.limits, libraries)


def _placed(source: Source, weights: list[tuple[int, ...]], held: int) -> Source:
    """Return where a value comes from as positions among the arguments of the plan."""
    if source.kind in ("weight", "part"):
        return replace(source, at=weights[source.at[0]])
    return Source("argument", (held + source.at[0],)) if source.kind == "held" else source


def place_of(device: Any) -> torch.device:
    """Return a device with its number.

    Raises DeviceError for what is none that torch has here.
    """
    try:
        return torch.empty(0, device=device).device
    except (TypeError, RuntimeError, AssertionError) as error:
        given = type(device).__name__ if isinstance(device, torch.Tensor) else repr(device)
        raise DeviceError(
            f"an ONNX model is built for a device that torch has, such as 'cpu' or 'cuda', got {given};"
            " it needs no example inputs"
        ) from error
