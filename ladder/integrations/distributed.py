"""torch.distributed: layers and experts cut over the devices of a mesh, for ``parallelize_module``.

Each process holds its shard, packed for its device, and what lies between shards is a collective of
torch.distributed: an operator that graphs and plans contain, and CUDA graphs replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ladder.api.linear import Linear
from ladder.runtime.model.graphs import release_collectives
from tile_types import QuantizedTensor
from tile_types.errors import ShapeError, unknown_name
from tile_types.shards import COLUMNS, ROWS, borders, shard

__all__ = [
    "ColwiseLinear",
    "RowwiseLinear",
    "VocabularyShard",
    "connected",
    "only_own",
    "own_experts",
    "release_collectives",
    "shard_experts",
]

FEATURES = Shard(-1)
"""Where columns of activations are."""


class Between:
    """Turns a tensor that lies over a mesh in one way into one that lies in another.

    mesh: Of one axis.
    source, wanted: How it lies, and how it shall: `Replicate`, `Shard` or, of the source, `Partial`
        (summands).
    local: Whether the result is this process's tensor, not a `DTensor`.
    """

    def __init__(self, mesh: DeviceMesh, source: Placement, wanted: Placement, local: bool = True) -> None:
        self.mesh, self.source, self.wanted, self.local = mesh, source, wanted, local
        self.group = mesh.get_group().group_name
        self.index, self.count = mesh.get_local_rank(), mesh.size()
        self.steps = steps(source, wanted)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[self.source]).to_local()
        for step in self.steps:
            x = step(self, x)
        return x if self.local else DTensor.from_local(x, self.mesh, [self.wanted], run_check=False)

    def before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Turn the first argument of a module: a forward pre-hook."""
        return (self(arguments[0]), *arguments[1:])

    def after(self, module: torch.nn.Module, arguments: Any, result: torch.Tensor) -> torch.Tensor:
        """Turn a module's result: a forward hook."""
        return self(result)

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, for each of them."""
        return _awaited(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))

    def gathered(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the parts of all processes, joined along an axis."""
        first = x.movedim(axis, 0).contiguous()
        operator = torch.ops._c10d_functional.all_gather_into_tensor
        return _awaited(operator(first, self.count, self.group)).movedim(0, axis)

    def scattered(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return this process's part of the sum over all processes, along an axis."""
        first = x.movedim(axis, 0).contiguous()
        operator = torch.ops._c10d_functional.reduce_scatter_tensor
        return _awaited(operator(first, "sum", self.count, self.group)).movedim(0, axis)

    def own(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return this process's part along an axis of what every process holds."""
        first, last = borders(x.shape[axis], self.index, self.count)
        return x.narrow(axis, first, last - first)


Step = Callable[[Between, torch.Tensor], torch.Tensor]


def _awaited(begun: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(begun)  # type: ignore[no-any-return]


def steps(source: Placement, wanted: Placement) -> list[Step]:
    """Return what turns a tensor that lies as ``source`` into one as ``wanted``.

    Raises ShapeError if nothing does.
    """
    if source == wanted:
        return []
    match source, wanted:
        case Partial(), Replicate():
            return [Between.reduced]
        case Partial(), Shard(dim=axis):
            return [lambda between, x: between.scattered(x, axis)]
        case Shard(dim=axis), Replicate():
            return [lambda between, x: between.gathered(x, axis)]
        case Replicate(), Shard(dim=axis):
            return [lambda between, x: between.own(x, axis)]
        case Shard(), Shard():
            return [*steps(source, Replicate()), *steps(Replicate(), wanted)]
    raise ShapeError(f"a tensor that lies as {source} cannot be turned to {wanted}")


class ColwiseLinear(ColwiseParallel):
    """`ladder.Linear` by outputs: a style of ``parallelize_module``; other modules as torch's style has them.

    Every process holds the whole layer before, and its shard after.

    parts: Outputs of the layers that are joined in one, such as queries, keys and values; each is cut.
    **layouts: ``input_layouts``, ``output_layouts`` and ``use_local_output``, as in torch's style.
    """

    def __init__(self, *, parts: Sequence[int] | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.parts = parts

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        if self.output_layouts != (FEATURES,) and module.out_features % device_mesh.size():
            raise ShapeError(f"{device_mesh.size()} unequal shards of {module.out_features} are not gathered")
        module.shard(ROWS, device_mesh.get_local_rank(), device_mesh.size(), self.parts)
        return connected(module, device_mesh, ROWS, self)


class RowwiseLinear(RowwiseParallel):
    """`ladder.Linear` by inputs: a style of ``parallelize_module``; other modules as torch's style has them.

    Every process holds the whole layer before, and its shard after; the sum of all processes' results is the
    layer's. Parameters as in torch's style.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        module.shard(COLUMNS, device_mesh.get_local_rank(), device_mesh.size())
        return connected(module, device_mesh, COLUMNS, self)


def connected(
    module: torch.nn.Module, mesh: DeviceMesh, axis: int, style: ColwiseParallel | RowwiseParallel
) -> torch.nn.Module:
    """Let a layer that holds a shard take its input, and give its result, as a style says.

    axis: Of the weight, along which it is cut: `ROWS` (0) or `COLUMNS` (1).
    """
    (given,), (wanted,) = style.input_layouts, style.output_layouts
    takes, makes = (Replicate(), FEATURES) if axis == ROWS else (FEATURES, Partial())
    module.register_forward_pre_hook(Between(mesh, given, takes).before)
    module.register_forward_hook(Between(mesh, makes, wanted, style.use_local_output).after)
    return module


class VocabularyShard(torch.nn.Module):
    """A process's rows of an embedding: it looks up its tokens, and the sum over all processes is the result.

    weight: Its rows, as `torch.chunk` cuts the whole.
    extent: Rows of the whole.
    """

    def __init__(self, weight: torch.Tensor, extent: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.first, self.last = borders(extent, mesh.get_local_rank(), mesh.size())
        self.total = Between(mesh, Partial(), Replicate())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., D]`` for tokens ``[...]``."""
        ids = input
        own = (ids >= self.first) & (ids < self.last)
        rows = torch.nn.functional.embedding(torch.where(own, ids - self.first, 0), self.weight)
        return self.total(torch.where(own[..., None], rows, 0))


def shard_experts(
    weights: Sequence[QuantizedTensor], by: str, index: int, count: int
) -> list[QuantizedTensor]:
    """Return what device ``index`` of ``count`` holds of all experts' matrices, for `ladder.GroupedMatmul`.

    weights: One matrix [N, K] per expert.
    by: ``"experts"``: whole matrices of its experts; ``"rows"`` or ``"columns"``: its shard of every matrix.
    Raises ShapeError if they cannot be cut so.
    """
    if by == "experts":
        first, last = borders(len(weights), index, count)
        return list(weights[first:last])
    axes = {"rows": ROWS, "columns": COLUMNS}
    if by not in axes:
        raise unknown_name("way to cut experts", by, ("experts", *axes))
    return [shard(weight, axes[by], index, count) for weight in weights]


def own_experts(offsets: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return the offsets [E/count + 1] of a device's experts, from those of all [E + 1], cut by experts."""
    first, last = borders(offsets.shape[0] - 1, index, count)
    return offsets[first : last + 1]


def only_own(y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return results [T, N] with zeros for tokens of other devices' experts, so that all devices' add up.

    ``offsets`` are those of `own_experts`.
    """
    token = torch.arange(y.shape[0], device=y.device)
    return torch.where(((token >= offsets[0]) & (token < offsets[-1]))[:, None], y, 0)
