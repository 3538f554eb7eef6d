"""Calibration: scales and codes chosen so that products of example inputs err least.

The squared error of a row's products is ``d H dᵀ`` with d the error of its weights and H the second moments
of the inputs. Scales are searched against H's diagonal (as AWQ weighs magnitudes: Lin et al., 2023), with
either sign where a type reaches further on one side (two's complement). Codes are chosen one column after
the other, the most active first; what a column errs the columns not yet chosen make up for (GPTQ: Frantar
et al., 2022). Any element type up to 8 bits goes through its table of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ladder.api import quantization
from tile_types.arrays import as_torch
from tile_types.errors import LadderError, ValueRangeError, require_kind
from tile_types.quantize import FLOAT_SCALE_TYPES, quantize
from tile_types.quantized import QuantizedTensor
from tile_types.scaling import native

FACTORS = (1.0, 2.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7, 0.65, 0.6, 0.5)
"""Scales that are tried, over the one that `ladder.quantize` takes. The larger one is for powers of two, with
which the largest magnitude of a block may saturate (OCP MX v1.0 §6.3)."""

DAMPING = 0.01
"""Added to H's diagonal, over its mean: inputs that examples lack are not free."""

SMALLEST = 2.0**-126
"""No scale becomes less, whatever its type."""

BLOCK = 64
"""Columns whose errors are passed on at once."""


@dataclass
class Moments:
    """Second moments of the inputs of one layer.

    total: float32 ``[K, K]``: the sum of ``xᵀ x`` over rows.
    rows: How many rows.
    left_out: How many more were not finite.
    """

    total: torch.Tensor
    rows: int = 0
    left_out: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Take the rows of an input ``[..., K]``; those that are not finite are left out."""
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        finite = flat[flat.isfinite().all(1)]
        self.total += finite.T @ finite
        self.rows += len(finite)
        self.left_out += len(flat) - len(finite)


def observe(
    model: torch.nn.Module, layers: Iterable[torch.nn.Module], batches: Iterable[Any]
) -> dict[torch.nn.Module, Moments]:
    """Run a model on examples and return the second moments of what its layers get.

    model: Run as it is, without gradients.
    layers: Those to watch.
    batches: Arguments of one call each: a tensor, a tuple or list of arguments, or a dict of named ones.
    Raises LadderError if there is no batch.
    Raises ValueRangeError if a layer got rows and none of them is finite.
    """
    require_kind(batches, Iterable, "calibration takes example inputs, one call of the model each")
    moments: dict[torch.nn.Module, Moments] = {}
    count = 0
    with watching(layers, moments), torch.no_grad():
        for batch in batches:
            count += 1
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple | list) else (batch,)))
    if not count:
        raise LadderError("calibration needs at least one batch of inputs")
    for name, layer in model.named_modules():
        if layer in moments and moments[layer].left_out and not moments[layer].rows:
            raise ValueRangeError(
                f"calibration: all {moments[layer].left_out} rows that {name or 'the model'} got hold NaN or"
                " infinity; check the examples, and that the model computes them in a type wide enough"
            )
    return moments


@contextmanager
def watching(layers: Iterable[torch.nn.Module], moments: dict[torch.nn.Module, Moments]) -> Iterator[None]:
    """Add up what layers get while the block runs."""

    def note(layer: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = next(iter((*inputs, *named.values())), None)
        if not isinstance(x, torch.Tensor):
            return  # the layer's own call says what is wrong
        if layer not in moments:
            k = x.shape[-1]
            moments[layer] = Moments(torch.zeros(k, k, dtype=torch.float32, device=x.device))
        moments[layer].add(x)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def calibrated(weight: torch.Tensor, moments: Moments, ttype: str, **options: Any) -> QuantizedTensor:
    """Quantize a matrix so that products of the observed inputs err least.

    weight: ``[N, K]``.
    moments: Of the inputs.
    ttype, **options: As in `ladder.quantize`.
    Returns: Of the same form as `ladder.quantize` gives. On the observed inputs no row's products err more
        than with that.
    """
    plain = quantize(weight.detach(), ttype, **options)
    if plain.scale is None or plain.ttype.elem_bits > 8 or not moments.rows:
        return plain
    wide, second = weight.detach().double(), moments.total.double() / moments.rows
    first = Grid.of(plain)
    scale = _searched(wide, second.diagonal(), first, plain)
    grid = first.rescaled(scale)
    places = _compensated(wide, second, grid)
    before, after = (_errors(found - wide, second) for found in (_decoded(plain), grid.decode(places)))
    worse = after > before
    if plain.block[0] > 1:  # rows share scales: all of them, or none
        worse = (after.sum() > before.sum()).expand(len(worse))
    codes = torch.where(worse[:, None], plain.codes().to(torch.int64), grid.codes[places])
    kept = torch.where(worse[:: plain.block[0], None], plain.scale.double(), scale)
    return QuantizedTensor.from_codes(
        codes.to(torch.uint8),
        plain.ttype,
        plain.block,
        scale=native(kept, plain.scale_type),
        zero=plain.zero,
        zero_kind=plain.zero_kind,
        tensor_scale=plain.tensor_scale,
        scale_type=plain.scale_type,
        type_name=plain.type_name,
    )


@dataclass(frozen=True)
class Grid:
    """Values that the elements of a matrix can take: ``(value - zero) * scale`` for every value of the type.

    values, codes: Of the type, finite, in ascending order of the values; float64 and int64.
    block: Rows and columns that share a scale.
    factor: Of the whole matrix.
    scale, zero: float64 ``[N, K]``, the factor included.
    """

    values: torch.Tensor
    codes: torch.Tensor
    block: tuple[int, int]
    factor: float
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> Grid:
        """Return the grid of a quantized matrix."""
        where = tensor.storage.device
        values = torch.from_numpy(tensor.ttype.probe_values()).double()
        order = values.argsort(stable=True)
        codes = torch.from_numpy(tensor.ttype.valid_codes().astype("int64"))
        factor = 1.0 if tensor.tensor_scale is None else float(tensor.tensor_scale)
        nothing = torch.zeros(tensor.shape, dtype=torch.float64, device=where)
        grid = cls(values[order].to(where), codes[order].to(where), tensor.block, factor, nothing, nothing)
        zero = nothing if tensor.zero is None else grid.spread(tensor.zero)
        return replace(grid, zero=zero).rescaled(tensor.scale)

    def spread(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return ``[N, K]`` from one number per block."""
        rows, columns = self.zero.shape
        wide = blocks.double().repeat_interleave(min(self.block[0], rows), 0)[:rows]
        return wide.repeat_interleave(min(self.block[1], columns), 1)[:, :columns]

    def per_block(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the sum over each block of ``[N, K]``."""
        rows, columns = elements.shape
        height, width = min(self.block[0], rows), min(self.block[1], columns)
        padded = torch.nn.functional.pad(elements, (0, -columns % width, 0, -rows % height))
        return padded.view(padded.shape[0] // height, height, -1, width).sum((1, 3))

    def rescaled(self, scale: Any) -> Grid:
        """Return the grid with other scales, one per block."""
        return replace(self, scale=self.spread(scale) * self.factor)

    def nearest(self, weight: torch.Tensor, columns: Any = slice(None)) -> torch.Tensor:
        """Return where the value nearest to each weight stands among `values`."""
        units = weight / self.scale[:, columns] + self.zero[:, columns]
        middles = (self.values[1:] + self.values[:-1]) / 2
        return torch.bucketize(units, middles)

    def decode(self, places: torch.Tensor, columns: Any = slice(None)) -> torch.Tensor:
        """Return what elements become."""
        return (self.values[places] - self.zero[:, columns]) * self.scale[:, columns]


def _decoded(tensor: QuantizedTensor) -> torch.Tensor:
    return as_torch(tensor.dequantize("float64"))


def _errors(errors: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each row's products with the inputs."""
    return ((errors @ second) * errors).sum(1)


def _searched(
    weight: torch.Tensor, importance: torch.Tensor, grid: Grid, plain: QuantizedTensor
) -> torch.Tensor:
    """Return float64 scales, one per block, whose rounding errs least where inputs are large."""
    start = as_torch(plain.scale).double()
    signed = plain.scale_type in FLOAT_SCALE_TYPES and plain.zero is None and not _symmetric(grid)
    best, least = start, torch.full_like(start, torch.inf)
    for factor in (sign * factor for factor in FACTORS for sign in ((1, -1) if signed else (1,))):
        trial = native((start * abs(factor)).clamp_min(SMALLEST), plain.scale_type).double()
        trial = trial if factor > 0 else -trial
        tried = grid.rescaled(trial)
        errors = grid.per_block((tried.decode(tried.nearest(weight)) - weight).square() * importance)
        best, least = torch.where(errors < least, trial, best), torch.minimum(errors, least)
    return best


def _symmetric(grid: Grid) -> bool:
    """Tell whether the type reaches as far below 0 as above."""
    return bool(grid.values[0] == -grid.values[-1])


def _compensated(weight: torch.Tensor, second: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Choose values column by column, the most active first; later columns make up for earlier ones.

    Returns: int64 ``[N, K]``: where each value stands in the grid.
    """
    order = second.diagonal().argsort(descending=True)
    back = _triangle(second[order][:, order])
    rest, places = (
        weight[:, order].clone(),
        torch.zeros(weight.shape, dtype=torch.int64, device=weight.device),
    )
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        passed = torch.zeros(len(weight), end - begin, dtype=weight.dtype, device=weight.device)
        for at in range(begin, end):
            column = [int(order[at])]
            chosen = grid.nearest(rest[:, at : at + 1], column)
            places[:, column] = chosen
            error = (rest[:, at : at + 1] - grid.decode(chosen, column)) / back[at, at]
            rest[:, at + 1 : end] -= error * back[at, at + 1 : end]
            passed[:, at - begin] = error[:, 0]
        rest[:, end:] -= passed @ back[begin:end, end:]
    return places


def _triangle(second: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of damped second moments.

    Raises LadderError if no damping makes them positive definite: the inputs are not finite.
    """
    mean = second.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    eye = torch.eye(len(second), dtype=second.dtype, device=second.device)
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        factor, failed = torch.linalg.cholesky_ex(second + damping * mean * eye)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            found: torch.Tensor
            found, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return found
    raise LadderError("the second moments of a layer's inputs are not positive: are its inputs finite?")


def quantized_matrix(
    matrix: torch.Tensor, weight: str, *, clip: bool = False, moments: Moments | None = None, **options: Any
) -> QuantizedTensor:
    """Quantize a weight ``[N, K]`` as a layer does; parameters as in `Linear.from_linear`."""
    options = {name: value for name, value in options.items() if value is not None}
    if moments is not None:
        return calibrated(matrix, moments, weight, **options)
    matrix = quantization.clipped(matrix, weight, **options) if clip else matrix
    quantized: QuantizedTensor = quantization.quantize(matrix, weight, **options)
    return quantized
