"""Programs whose kernels are block graphs: built, loaded, and called with torch tensors."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ladder.ir.graph import Graph, Node
from ladder.ir.parser import parse as parse_graph
from ladder.ir.printer import print_graph
from ladder.lower.blocks import BlockSchedule, emitter_for
from ladder.lower.blocks.analysis import gemm_of
from ladder.runtime.build import Job, Kernel, find_or_build, function_job, load_entry
from ladder.runtime.compile import family_of, runs_code_of, target_of
from ladder.runtime.kernel import in_memory
from ladder.runtime.packed import PackedWeight, layout_of, own_order, pack
from ladder.runtime.threads import keep_apart
from tile_types.arrays import torch_dtype
from tile_types.errors import DeviceError, DTypeError, ScheduleError, ShapeError
from tile_types.quantized import QuantizedTensor

if TYPE_CHECKING:
    import torch

    from ladder.ir.gemm import Gemm
    from targets import TileDevice

ALIGNMENT = 16
"""Alignment of tensors in bytes, which vector copies need."""


@dataclass(frozen=True)
class Lowering:
    """A kernel graph and how its block graphs are lowered.

    graph: A kernel graph with known extents; every operator is a block graph.
    schedules: One per block graph, in order.
    constants: Inputs of the graph that are never written while the program may run, such as weights: kernels
        then read them before the kernels launched before have ended. None unless the caller vouches for it.
    """

    graph: Graph
    schedules: tuple[BlockSchedule, ...]
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        others = [node for node in self.graph.nodes if node.operator not in ("input", "block")]
        if others:
            names = ", ".join(f"%{node.name} ({node.operator})" for node in others)
            raise ScheduleError(
                f"kernels are lowered from block graphs, {self.graph.name!r} also has {names}"
            )
        unknown = set(self.constants) - {node.name for node in self.graph.inputs}
        if unknown:
            raise ScheduleError(f"no inputs of {self.graph.name!r}: {', '.join(sorted(unknown))}")
        if len(self.schedules) != len(self.blocks):
            raise ScheduleError(f"{len(self.schedules)} schedules for {len(self.blocks)} block graphs")

    @property
    def text(self) -> str:
        """Everything that decides the kernels; `parse` reads it back."""
        plans = [asdict(plan) for plan in self.schedules]
        facts = {"graph": print_graph(self.graph), "schedules": plans, "constants": self.constants}
        return json.dumps(facts)

    @staticmethod
    def parse(text: str) -> Lowering:
        """Return what `text` says.

        Raises ValueError, KeyError, TypeError, LadderError if it says something else.
        """
        facts = json.loads(text)
        plans = tuple(BlockSchedule(**plan) for plan in facts["schedules"])
        return Lowering(parse_graph(facts["graph"]), plans, tuple(facts["constants"]))

    @property
    def blocks(self) -> tuple[Node, ...]:
        return tuple(node for node in self.graph.nodes if node.operator == "block")

    @property
    def operand(self) -> str:
        """Type of the inputs that are not quantized."""
        types = [node.tile.ttype for node in self.graph.inputs]
        return next((ttype.name for ttype in types if not ttype.is_block), "")

    def gemm(self, node: Node) -> Gemm:
        """Return what decides the packed arrays of a quantized input."""
        return gemm_of(node.tile.ttype, node.tile.known_shape, self.operand)

    def packed(self, number: int, matrix: QuantizedTensor, device: TileDevice) -> PackedWeight:
        """Return a quantized matrix ``[N, K]`` as kernels for a device stream input ``number``.

        Raises ShapeError if the matrix is not what the program was built for.
        """
        return pack(self.gemm(self.graph.inputs[number]), device, matrix)

    def jobs(self, device: TileDevice) -> list[Job]:
        """Return what is to be built, one job per kernel."""
        return [
            _job(node, plan, device, constants_of(node, self.constants))
            for node, plan in zip(self.blocks, self.schedules, strict=True)
        ]


def constants_of(node: Node, constants: Collection[str]) -> tuple[str, ...]:
    """Return the inputs of a block graph that are constants of the kernel graph."""
    assert node.body is not None
    inner = zip(node.body.inputs, node.inputs, strict=True)
    return tuple(own.name for own, outer in inner if outer in constants)


def _job(node: Node, schedule: BlockSchedule, device: TileDevice, constants: tuple[str, ...]) -> Job:
    body = node.body
    assert body is not None
    facts = {
        "block": print_graph(body),
        "schedule": json.dumps(asdict(schedule)),
        "constants": " ".join(constants),
    }
    digest = hashlib.sha256("".join(facts.values()).encode()).hexdigest()[:10]

    def emit(name: str) -> Any:
        return emitter_for(device)(body, device, schedule, name, constants)

    return function_job(facts, f"ladder_fused_{digest}", device, emit)


class Written:
    """Notices inputs that may have been written since the call before.

    Kernels load constants while those launched earlier may still run. A kernel of ours that writes a constant
    lets the next one start before it ends, so that a call after it must wait.

    numbers: Positions of the constants among the inputs.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._known: list[tuple[weakref.ref[Any], tuple[int, ...] | None]] = []

    def since(self, inputs: Sequence[torch.Tensor | PackedWeight]) -> bool:
        """Tell whether a constant is another than in the call before, or has another version, or has none."""
        given = [inputs[number] for number in self.numbers]
        versions = [_versions(tensor) for tensor in given]
        same = len(self._known) == len(given) and all(
            known() is tensor and before is not None and before == now
            for (known, before), tensor, now in zip(self._known, given, versions, strict=True)
        )
        if not same:
            self._known = [(weakref.ref(x), now) for x, now in zip(given, versions, strict=True)]
        return not same


def _versions(given: torch.Tensor | PackedWeight) -> tuple[int, ...] | None:
    """Return how often each array of an input was written; None where torch does not count that."""
    arrays = given.tensors if isinstance(given, PackedWeight) else [given]
    return None if any(x.is_inference() for x in arrays) else tuple(x._version for x in arrays)


class Fused:
    """A loaded program.

    lowering: The kernels and their schedules.
    device: What they are built for.
    kernels: As they were built.
    """

    def __init__(self, lowering: Lowering, device: TileDevice, kernels: Sequence[Kernel]) -> None:
        self.lowering, self.device, self.kernels = lowering, device, tuple(kernels)
        self.family = family_of(device)
        self._packed: weakref.WeakKeyDictionary[QuantizedTensor, dict[int, PackedWeight]] = (
            weakref.WeakKeyDictionary()
        )
        self.entries = [load_entry(kernel, self.family) for kernel in kernels]
        names = [node.name for node in lowering.graph.inputs]
        self._written = Written([names.index(name) for name in lowering.constants])

    @staticmethod
    def build(lowering: Lowering, device: TileDevice) -> Fused:
        """Find the kernels in the cache, or compile them; then load them."""
        return Fused(lowering, device, find_or_build(lowering.jobs(device)))

    @property
    def resources(self) -> list[Mapping[str, Any]]:
        """The device compiler's report on each kernel."""
        return [report for kernel in self.kernels for report in kernel.manifest["resources"].values()]

    def packed(self, inputs: Sequence[Any]) -> list[torch.Tensor | PackedWeight]:
        """Return inputs with quantized matrices ``[N, K]`` packed for these kernels, each of them once.

        Raises ShapeError if a matrix is not what the program was built for.
        """
        return [
            self._pack(number, given) if isinstance(given, QuantizedTensor) else given
            for number, given in enumerate(inputs)
        ]

    def _pack(self, number: int, matrix: QuantizedTensor) -> PackedWeight:
        known = self._packed.setdefault(matrix, {})
        if number not in known:
            known[number] = self.lowering.packed(number, matrix, self.device)
        return known[number]

    def __call__(self, *inputs: torch.Tensor | PackedWeight) -> Any:
        """Run the kernels.

        *inputs: Contiguous tensors of the program's shapes and types, in order; quantized weights packed.
        Returns: The result, or a tuple of results.
        Raises ShapeError, DTypeError, DeviceError if an input is not what the program was built for.
        """
        import torch

        graph = self.lowering.graph
        values: dict[str, list[torch.Tensor]] = {}
        for node, given in zip(graph.inputs, inputs, strict=True):
            values[node.name] = self._arrays(node, given)
        where = inputs[0].device
        if where.type == "cpu":
            keep_apart()
        elif self._written.numbers and self._written.since(inputs):
            torch.empty(1, device=where).zero_()  # no early launch: it waits, and kernels wait for it
        shaped: dict[str, torch.Tensor] = {}
        for node, entry in zip(self.lowering.blocks, self.entries, strict=True):
            results = [
                torch.empty(tile.known_shape, dtype=torch_dtype(tile.ttype.name), device=where)
                for tile in node.tiles
            ]
            entry(
                *(array for name in node.inputs for array in values[name]),
                *(result.view(-1) for result in results),
            )
            values.update({name: [y.view(-1)] for name, y in zip(node.values, results, strict=True)})
            shaped.update(zip(node.values, results, strict=True))
        found = tuple(shaped[output] for output in graph.outputs)
        return found[0] if len(found) == 1 else found

    def _arrays(self, node: Node, given: Any) -> list[torch.Tensor]:
        """Return the kernels' arguments for an input, each as one axis."""
        if not node.tile.ttype.is_block:
            self._check(node, given)
            return [in_memory(given).view(-1)]
        gemm = self.lowering.gemm(node)
        layout = layout_of(gemm, self.family, own_order(gemm, self.device))
        if not isinstance(given, PackedWeight) or given.layout != layout:
            raise DTypeError(
                f"{node.name} is a quantized weight: pack it for [{layout}], e.g. by Fused.packed"
            )
        return [array.view(-1) for array in given.tensors]

    def _check(self, node: Node, tensor: torch.Tensor) -> None:
        tile = node.tile
        if tuple(tensor.shape) != tile.known_shape:
            raise ShapeError(f"{node.name} is {tuple(tensor.shape)}, the program takes {tile.known_shape}")
        if tensor.dtype != torch_dtype(tile.ttype.name):
            raise DTypeError(f"{node.name} is {tensor.dtype}, the program takes {tile.ttype.name}")
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            raise ShapeError(
                f"{node.name} is not contiguous from a multiple of {ALIGNMENT} bytes on; call .contiguous()"
            )
        if not runs_code_of(target_of(tensor.device), self.device.name):
            raise DeviceError(
                f"{node.name} is on {tensor.device}, the program was built for {self.device.name}"
            )
