"""The stages of an ONNX model in the making: plans, and between them nodes that torch runs.

A node that reads what the plan in the making computes ends that plan; one that does not goes before it.
Values of plans that have ended are values of the call, and enter later plans as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

from ladder.frontend.importer import identifier
from ladder.frontend.onnx_late import Late, info_of_tile, shape_of, tensor_info
from ladder.frontend.onnx_stages import NodeStage, Piece, Staged
from ladder.frontend.onnx_values import Known
from ladder.ir.extents import size_names as names_in
from ladder.runtime.onnx_ops.values import value_of
from tile_types.tile import Extent

Tensor = Callable[[Any], str]
"""Returns a value as one of the plan in the making."""


class LateOfPiece(Late):
    """A value that a plan before this point computes.

    name, info: As of any.
    piece, value: The plan, and the value there.
    """

    def __init__(self, name: str, info: Any, piece: Piece, value: str) -> None:
        super().__init__(name, info)
        object.__setattr__(self, "piece", piece)
        object.__setattr__(self, "value", value)

    piece: Piece
    value: str


class Flow:
    """Stages in the making.

    name: Of the model's graph.
    precise: Whether each operator's result is rounded to its type.
    """

    def __init__(self, name: str, precise: bool) -> None:
        self.name, self.precise = identifier(name) or "model", precise
        self.stages: list[Piece | NodeStage] = []
        self.stored: dict[str, Any] = {}
        """Values that stages read and none makes."""
        self.homes: dict[str, tuple[str, int]] = {}
        """Size -> value of the call and axis that show it."""
        self.named: set[str] = set()
        """Names within the shapes of values of the call."""
        self.fresh = 0
        self.piece = self._next_piece()
        """The plan in the making, which is the last stage."""

    def _next_piece(self) -> Piece:
        piece = Piece(self.name + (f"_{len(self.stages)}" if self.stages else ""), self.precise)
        self.stages.append(piece)
        return piece

    def number(self) -> int:
        """Return a number that was not given before."""
        self.fresh += 1
        return self.fresh

    def size(self) -> str:
        """Return a name for a size that no value of a call has: branches read those of the model."""
        while (found := f"u{self.number()}") in self.named:
            pass
        return found

    def show(self, name: str, shape: Sequence[Extent]) -> None:
        """Note which sizes a value of a call shows."""
        self.named.update(names_in(shape))
        for axis, extent in enumerate(shape):
            if isinstance(extent, str) and extent.isidentifier():
                self.homes.setdefault(extent, (name, axis))

    def is_shown(self, extent: Extent | None) -> bool:
        """Tell whether an extent is known, or follows from sizes that are: rules name others as they like."""
        return extent is not None and set(names_in((extent,))) <= set(self.homes)

    def late(self, name: str, info: Any) -> Late:
        """Return a result of a stage; extents that are not known become sizes."""
        shape = shape_of(info)
        if shape is not None:
            named = [
                extent if extent is not None and self.is_shown(extent) else self.size() for extent in shape
            ]
            self.show(name, named)
            info = tensor_info(info.tensor_type.elem_type, named)
        return Late(name, info)

    def expose(self, name: str, value: Any, tensor: Tensor) -> None:
        """See to it that a value is among those of a call."""
        if isinstance(value, Known) and not value.symbolic:
            self.stored[name] = value_of(value.array)
        elif isinstance(value, LateOfPiece):
            value.piece.wanted[name] = value.value
        elif not isinstance(value, Late):
            self.piece.wanted[name] = tensor(value)

    def add(self, stage: NodeStage, values: dict[str, Any], tensor: Tensor) -> None:
        """Add a node as a stage; ``values`` are those of the model so far, by name."""
        for name in stage.reads:
            if not self._is_there(name, values[name]):
                self.expose(name, values[name], tensor)
        if any(name in self.piece.wanted for name in stage.reads):
            self.stages.append(stage)
            self._close(values)
        else:
            self.stages.insert(len(self.stages) - 1, stage)

    def _is_there(self, name: str, value: Any) -> bool:
        """Tell whether a value of the plan in the making is what the call brings under that name."""
        return isinstance(value, str) and self.piece.entered.get(name) == value

    def _close(self, values: dict[str, Any]) -> None:
        """End the plan in the making: its values are those of the call from here on."""
        before, self.piece = self.piece, self._next_piece()
        for name, value in values.items():
            if isinstance(value, str):
                info = info_of_tile(before.im.tile(value))
                there = before.entered.get(name) == value
                values[name] = Late(name, info) if there else LateOfPiece(name, info, before, value)

    def called(self, name: str, value: Any, version: int) -> Any:
        """Return a value under a name that later stages can ask for."""
        if not isinstance(value, Late) or value.name == name:
            return value
        if isinstance(value, LateOfPiece):
            return LateOfPiece(name, value.info, value.piece, value.value)
        same = onnx.helper.make_node("Identity", [value.name], [name])
        stage = NodeStage(same, (value.name,), {"": version}, "it is another name")
        self.stages.insert(len(self.stages) - 1, stage)
        return Late(name, value.info)

    def staged(
        self, title: str, inputs: Mapping[str, Any], results: Mapping[str, Any], tensor: Tensor
    ) -> Staged:
        """Return the stages; results are values of the model by name."""
        outputs = tuple(results)
        known = {n: v for n, v in results.items() if isinstance(v, Known) and not v.symbolic}
        for name in outputs:
            if name not in known:
                self.expose(name, results[name], tensor)
        stages = self._needed(outputs)
        if len(stages) == 1 and isinstance(stages[0], Piece) and tuple(stages[0].reads) == tuple(inputs):
            whole = stages[0].finished(self.homes, known, outputs, whole=True)
            return Staged(title, inputs, outputs, (whole,), {})
        self.stored |= {name: value_of(value.array) for name, value in known.items()}
        finished = tuple(
            stage
            if isinstance(stage, NodeStage)
            else stage.finished(self.homes, {}, tuple(stage.wanted), whole=False)
            for stage in stages
        )
        return Staged(title, inputs, outputs, finished, self.stored)

    def _needed(self, outputs: Sequence[str]) -> list[Piece | NodeStage]:
        """Return the stages that results depend on; plans give what others read."""
        needed, found = set(outputs), list[Piece | NodeStage]()
        homes = {name for name, _ in self.homes.values()}
        for stage in reversed(self.stages):
            if isinstance(stage, Piece):
                stage.wanted = {n: v for n, v in stage.wanted.items() if n in needed}
                reads: Sequence[str] = stage.reads if stage.wanted else ()
            else:
                used = (needed | homes) & set(stage.node.output)
                reads = stage.reads if used else ()
                if not used:
                    continue
            if isinstance(stage, NodeStage) or stage.wanted:
                needed |= set(reads)
                found.append(stage)
        return found[::-1]
