"""Quantization of whole models by rule, and the report of what became of every layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ladder.api.cache import KVCache, require_stored
from ladder.api.calibration import Moments, observe
from ladder.api.conv import Conv, refusal
from ladder.api.grouped_linear import GroupedLinear
from ladder.api.linear import Linear
from ladder.api.linear_modules import is_linear
from ladder.api.quantization import quantize as quantize_matrix
from ladder.api.saved_settings import note_settings
from ladder.api.stacked_experts import held, holder, install, is_experts, quantized_layers, stacks
from ladder.ir.gemm import Gemm
from tile_types import TType, get_type
from tile_types import quantize as quantize_array
from tile_types.errors import DTypeError, LadderError, ShapeError, require_kind, require_options, unknown_name
from tile_types.multiples import own_name

Filter = Callable[[str, torch.nn.Module], bool]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Report on one layer: quantized, or why not.

    name, module: Qualified name and class.
    weight, activation: Types that it multiplies now.
    before, after: Bytes of the weight.
    reason: Why it was left as it is; empty if it was quantized.
    observed: Rows of example inputs that its codes were chosen by; 0: rounded to nearest.
    """

    name: str
    module: str
    weight: str
    activation: str
    before: int
    after: int
    reason: str = ""
    observed: int = 0


@dataclass(frozen=True)
class Report:
    """Report on every layer of a model: quantized, or why not.

    rows: One per module with a weight.
    caches: Names of KV caches and the type that they store.
    unused: Patterns of skips that named no layer.
    """

    rows: tuple[Row, ...]
    caches: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[Row, ...]:
        """Rows of the layers that were quantized."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def kept(self) -> tuple[Row, ...]:
        """Rows of the layers that were left as they are."""
        return tuple(row for row in self.rows if row.reason)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return asdict(self)

    def __str__(self) -> str:
        before, after = (sum(getattr(row, side) for row in self.rows) for side in ("before", "after"))
        lines = [
            f"{len(self.quantized)} of {len(self.rows)} layers quantized,"
            f" {before / 1e6:.2f} MB of weights -> {after / 1e6:.2f} MB"
        ]
        wide = max((len(row.module) for row in self.rows), default=0)
        for row in self.rows:
            types = f"{row.weight} x {row.activation}"
            lines.append(f"  {row.name:40} {row.module:{wide}} {types:24} {row.reason}".rstrip())
        lines += [f"  {name:40} KVCache {ttype}" for name, ttype in self.caches]
        lines += [f"  pattern {pattern!r} names no layer" for pattern in self.unused]
        return "\n".join(lines)


_reports: weakref.WeakKeyDictionary[torch.nn.Module, Report] = weakref.WeakKeyDictionary()


def quantization(model: torch.nn.Module) -> Report:
    """Return what `quantize_` did to a model.

    Raises
    ------
    LadderError
        If the model was not quantized in this process.
    """
    require_kind(model, torch.nn.Module, "quantization describes an nn.Module")
    found = _reports.get(model)
    if found is None:
        raise LadderError("this model was not quantized here: call ladder.quantize_(model, ...) first")
    return found


def quantize(weight: Any, /, ttype: TType | str | None = None, **options: Any) -> Any:
    """Quantize a matrix, or a copy of a model; see `tile_types.quantize` for every option.

    Parameters
    ----------
    weight
        Real ``[N, K]``: a torch tensor or parameter on any device, or a numpy array. A
        ``torch.nn.Module`` is copied and the copy quantized by rule, see `quantize_`.
    ttype
        Type or its name, e.g. ``"int4"``, ``"nf4"``, ``"mxfp4"``.
    **options
        ``group_size``, ``block``, ``scale_type``, ``zero``, ``scaling``, ``granularity``.

    Returns
    -------
    `QuantizedTensor` in canonical packing, where ``weight`` lives; of a model: the quantized copy.

    Raises
    ------
    LadderError
        A subclass says what is wrong: an unknown type (the nearest name is suggested), a group
        size that cannot be, NaN or infinity (with its position).
    """
    if hasattr(weight, "named_modules"):
        named = {} if ttype is None else {"weight": get_type(ttype).name}
        return quantize_(deepcopy(weight), **(options | named))
    if ttype is None:
        raise DTypeError("quantize(weight, ttype): a matrix needs the type to quantize to")
    return quantize_matrix(weight, ttype, **options)


def quantize_(
    model: torch.nn.Module,
    weight: str = "int4",
    *,
    filter: Filter | None = None,
    skip: str | Sequence[str] = (),
    overrides: Mapping[str, Options | str | None] | None = None,
    kv_cache: str | None = None,
    calibration: Iterable[Any] | None = None,
    convolutions: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """Replace the ``torch.nn.Linear`` layers of a model by quantized `Linear` layers, in place, by rule.

    transformers' `Conv1D` too; stacked experts become `GroupedLinear`. Options: ladder/api/README.md.

    Parameters
    ----------
    model
        The model; a bare ``Linear`` cannot be replaced in itself, use `Linear.from_linear`.
    weight
        Type of the weights, or its name.
    filter
        ``filter(qualified_name, module)`` says which layers to replace; by default all.
    skip, overrides
        Patterns (``"*.mlp.*"``) of names that stay as they are; pattern -> a weight type, options or None.
        A layer that stands in several places has all their names.
    kv_cache, convolutions
        Type in which `KVCache` modules store keys and values; whether `Conv` replaces convolutions too.
    calibration
        Example inputs, one call of the model each, for which weights are chosen to err least.
    **options
        For `Linear.from_linear`: ``group_size``, ``zero``, ``activation``, ``clip``, ``scale_type``, ...

    Returns
    -------
    The model; `quantization` tells what became of each layer.

    Raises
    ------
    LadderError
        If a layer cannot be quantized so; its name is in the notes, and no layer has been replaced.
    """
    _require_model(model)
    if kv_cache is not None:
        require_stored(kv_cache)
    skip, overrides = _required_rules(filter, skip, overrides, options)
    plan = _Rules({"weight": weight, **options}, filter, skip, overrides, convolutions, model)
    if calibration is not None:
        plan.observe(model, calibration)
    replaced: dict[torch.nn.Module, Linear | Conv] = {}
    experts: dict[torch.nn.Module, dict[str, GroupedLinear]] = {}
    plan.require_known(model)
    rows = [plan.row(model, name, module, replaced, experts) for name, module in _weighted(model)]
    _put_in_place(model, replaced, experts)
    rows[:0] = _rows_before(model, rows)
    _reports[model] = Report(tuple(rows), _caches_stored_as(kv_cache, model), plan.unused())
    note_settings(model)
    return model


def _rows_before(model: torch.nn.Module, rows: list[Row]) -> list[Row]:
    """Return what earlier calls said of layers that `rows` do not name, as they are replaced."""
    told, before = {row.name for row in rows}, _reports.get(model)
    return [row for row in before.rows if row.name not in told] if before is not None else []


def _require_model(model: torch.nn.Module) -> None:
    """Raise unless layers of a model can be replaced in it."""
    require_kind(model, torch.nn.Module, "quantize_ takes a torch.nn.Module")
    if is_linear(model):
        raise ShapeError(f"{type(model).__name__}: no layer replaces itself, use ladder.Linear.from_linear")


def _required_rules(
    filter: Any, skip: Any, overrides: Any, options: Options
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return patterns and overrides; raises `DTypeError` unless they are texts and a filter is a function."""
    if filter is not None and not callable(filter):
        raise DTypeError(f"filter must be a function of a layer's name and the layer, got {filter!r}")
    require_kind(skip, Iterable, "skip is a pattern of names, or several")
    overrides = {} if overrides is None else overrides
    require_kind(overrides, Mapping, "overrides maps patterns of names to options")
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    for label, patterns in (("skip", skip), ("overrides", overrides)):
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise DTypeError(f"{label} takes patterns of names, such as '*.mlp.*', got {pattern!r}")
    for each in overrides.values():
        require_kind(each, (str, Mapping, type(None)), "overrides gives a type, options by name, or None")
    for each in (*overrides.values(), options):
        named = [name for name in each if name != "weight"] if isinstance(each, Mapping) else ()
        require_options("option of a layer", named, Linear.from_linear, quantize_array)
    return skip, dict(overrides)


def _caches_stored_as(kv_cache: str | None, model: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    """Set the type of the caches of a model, if one is given; return their names and types."""
    caches = [(name, module) for name, module in model.named_modules() if isinstance(module, KVCache)]
    if kv_cache is not None:
        for _, module in caches:
            module.set_type(kv_cache)
    return tuple((name, module.ttype) for name, module in caches)


def _put_in_place(
    model: torch.nn.Module,
    replaced: Mapping[torch.nn.Module, torch.nn.Module],
    experts: Mapping[torch.nn.Module, Mapping[str, GroupedLinear]],
) -> None:
    """Put layers where those stand that they replace, wherever a module holds one."""
    for parent in reversed(list(model.modules())):  # what stands on a layer before the layer
        for name, child in list(parent._modules.items()):
            if child is not None and child in replaced:
                _carry(child, replaced[child])
                setattr(parent, name, replaced[child])
    for stacked, layers in experts.items():
        install(stacked, layers)


_CARRIED = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""What callers set on a module beside its weight. Handles remove hooks from these very dicts."""


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _carry(module: torch.nn.Module, layer: torch.nn.Module) -> None:
    """Give a layer the mode and the hooks of the module that it replaces, and what else was put on it."""
    for name in _CARRIED:
        setattr(layer, name, getattr(module, name))
    for registry in _REGISTRIES:
        own = getattr(layer, registry)
        held = getattr(module, registry).items()
        own.update({name: value for name, value in held if name not in OPERANDS and not hasattr(layer, name)})
    vars(layer).update({name: value for name, value in vars(module).items() if not hasattr(layer, name)})


OPERANDS = ("weight", "bias")
"""What a layer multiplies by and adds. Hooks that compute one, as pruning does, keep it as an attribute."""


def _weighted(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    experts = [module for module in model.modules() if is_experts(module)]
    within = {holder(module, stack) for module in experts for stack in stacks(module)} - {*experts}
    found = ((name, module) for name, module in model.named_modules() if module not in within)
    return [(name, module) for name, module in found if _weights(module)]


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's own parameters but vectors: matrices, stacks of them, filters, tables."""
    if is_experts(module):
        return [weight for name in stacks(module) if (weight := held(module, name)) is not None]
    own = () if isinstance(module, Linear) else module._parameters.values()
    return [each for each in own if each is not None and (is_lazy(each) or each.dim() > 1)]


def _nbytes(weights: Sequence[torch.Tensor]) -> int:
    """Return the bytes of weights; those of lazy modules have none before the first call."""
    return sum(0 if is_lazy(each) else each.nbytes for each in weights)


class _Rules:
    """Which options apply to which layer."""

    def __init__(
        self,
        options: dict[str, Any],
        filter: Filter | None,
        skip: tuple[str, ...],
        overrides: dict[str, Options | str | None],
        convolutions: bool,
        model: torch.nn.Module,
    ) -> None:
        self.convolutions = convolutions
        self.options, self.filter, self.skip, self.overrides = options, filter, skip, overrides
        self.names: dict[torch.nn.Module, list[str]] = {}
        """Every name of every module: one that is shared has several."""
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.used: set[str] = set()
        self.moments: dict[torch.nn.Module, Moments] = {}

    def observe(self, model: torch.nn.Module, batches: Iterable[Any]) -> None:
        """Run the model on examples and keep what the layers to quantize get."""
        linear = [(name, m) for name, m in _weighted(model) if is_linear(m)]
        layers = [module for name, module in linear if isinstance(self.chosen(name, module), dict)]
        self.moments = observe(model, layers, batches)

    def unused(self) -> tuple[str, ...]:
        """Return the patterns of skips that named no layer."""
        return tuple(pattern for pattern in self.skip if pattern not in self.used)

    def require_known(self, model: torch.nn.Module) -> None:
        """Raise UnknownNameError for an override that named no layer: its options would be lost."""
        quantized = (module for module in model.modules() if isinstance(module, Linear | Conv))
        found = chain((module for _, module in _weighted(model)), quantized)
        layers = {name for module in found for name in self.names[module]}
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in layers):
                raise unknown_name(f"layer of {type(model).__name__} in overrides", pattern, layers)

    def row(
        self,
        model: torch.nn.Module,
        name: str,
        module: torch.nn.Module,
        replaced: dict[torch.nn.Module, Linear | Conv],
        experts: dict[torch.nn.Module, dict[str, GroupedLinear]],
    ) -> Row:
        """Quantize a layer, or say why it stays."""
        weights = _weights(module)
        dtype, nbytes = str(weights[0].dtype).removeprefix("torch."), _nbytes(weights)
        kind = type(module).__name__
        chosen = self.chosen(name, module)
        if isinstance(chosen, str):
            return Row(name, kind, dtype, dtype, nbytes, nbytes, chosen)
        made: list[Linear | Conv]
        try:
            if is_experts(module):
                experts[module] = quantized_layers(module, **chosen)
                made = [*experts[module].values()]
            else:
                made = [replaced.setdefault(module, self.layer(module, chosen))]
        except LadderError as error:
            error.add_note(f"while quantizing layer {name!r} of {type(model).__name__}")
            raise
        gemm, after = made[0].problem, sum(layer.weight_nbytes for layer in made)
        observed = self.moments[module].rows if module in self.moments else 0
        stored = own_name(gemm.weight)
        if isinstance(gemm, Gemm) and gemm.scale:
            stored += f"_g{gemm.group_size}"
        return Row(name, kind, stored, gemm.activation, nbytes, after, observed=observed)

    def layer(self, module: torch.nn.Module, options: dict[str, Any]) -> Linear | Conv:
        """Quantize one layer, a linear one by what it got if examples were given."""
        if is_linear(module):
            return Linear.from_linear(module, moments=self.moments.get(module), **options)
        assert isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d)  # `chosen` gives options for no other
        return Conv.from_conv(module, **options)

    def chosen(self, name: str, module: torch.nn.Module) -> dict[str, Any] | str:
        """Return a layer's options, or the reason why it stays as it is."""
        for pattern in self.skip:
            if self.matches(module, pattern):
                self.used.add(pattern)
                return f"skipped: {pattern!r}"
        options = dict(self.options)
        for pattern, given in self.overrides.items():
            if self.matches(module, pattern):
                self.used.add(pattern)
                if given is None:
                    return f"overridden: {pattern!r} leaves it"
                options |= {"weight": given} if isinstance(given, str) else given
                break
        reason = self.unfit(module)
        if reason:
            return reason
        if self.filter is not None and not self.filter(name, module):
            return "the filter leaves it"
        return options

    def matches(self, module: torch.nn.Module, pattern: str) -> bool:
        """Tell whether one of a module's names fits a pattern."""
        return any(fnmatchcase(name, pattern) for name in self.names[module])

    def unfit(self, module: torch.nn.Module) -> str:
        """Say why a module is not replaced; empty if it is."""
        if "forward" in vars(module):
            return "its forward was replaced"
        if computed := [name for name in OPERANDS if name in vars(module)]:
            return f"its {computed[0]} is computed before each call"
        if is_linear(module) or is_experts(module):
            return ""
        if self.convolutions and isinstance(module, torch.nn.modules.conv._ConvNd):
            return refusal(module)
        return f"{type(module).__name__} is not torch.nn.Linear itself"
