"""transformers: `LadderConfig`, which quantizes while a model is loaded, and models of other tools' formats.

Importing this module registers the quantization method ``"ladder"``, also for models that were saved with it:
transformers has no entry point for that. It needs transformers 5. Linear layers and stacked experts
(`ladder.api.stacked_experts`) are quantized; embeddings stay, and those of other tools are dequantized.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import (
    AutoHfQuantizer,
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from ladder.api.linear import LINEAR_OPTIONS, Linear
from ladder.api.linear_modules import extents_of, is_linear, matrix_of
from ladder.api.quantization import quantize
from ladder.api.saved_settings import METHOD, keep_apart
from ladder.api.stacked_experts import (
    HOME,
    as_matrix,
    held,
    holder,
    install,
    is_experts,
    layers_from,
    number_of,
    stacks,
    uninstall,
)
from ladder.formats.checkpoint import Checkpoint
from ladder.formats.files import require
from ladder.integrations import transformers_experts as experts
from ladder.integrations.loading import (
    Settings,
    StoredMatrix,
    device_of,
    dtype_of,
    is_within,
    linear_layers,
    matrix_and,
    opened,
    require_computed,
    require_shape,
    require_unquantized,
    require_whole,
    settling,
)
from ladder.integrations.transformers_plan import LayerPlan
from ladder.runtime.threads import kernels_alone
from tile_types import QuantizedTensor
from tile_types.errors import CheckpointError, DeviceError, LadderError

GIVEN: ContextVar[Checkpoint | None] = ContextVar("given", default=None)
"""Quantized tensors of the model that is being loaded, where its files do not have the model's names."""


INPUTS = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "input_activation_scale", "output_activation_scale"),
)
"""What tools store of activations that are quantized by fixed scales."""


@register_quantization_config(METHOD)
class LadderConfig(Settings, QuantizationConfigMixin):  # type: ignore[misc]
    """How to quantize a model while it is loaded: ``quantization_config`` of ``from_pretrained``.

    By default the head stays as it is; parameters are those of `Settings`.

    Examples
    --------
    >>> config = LadderConfig("int4", group_size=128)
    >>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    """


class LadderQuantize(ConversionOps):  # type: ignore[misc]
    """Quantize one weight as soon as it is read, and keep no more than that."""

    def __init__(self, quantizer: LadderQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        full_layer_name: str = "",
        model: torch.nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Take the weight of a layer, or of each that a stored one is divided into.

        input_dict: Name in the model -> weight, perhaps in a list.
        Returns: Those that are not quantized, to be put into the model.
        """
        assert model is not None
        found = input_dict if len(input_dict) > 1 else {full_layer_name: next(iter(input_dict.values()))}
        kept = {}
        for full, value in found.items():
            if not self.quantizer.param_needs_quantization(model, full):
                kept[full] = value
                continue
            name = full if full in self.quantizer.stacks else full.removesuffix(".weight")
            self.quantizer.take_or_fail(model, name, value[0] if isinstance(value, list) else value)
            if missing_keys is not None:
                missing_keys.discard(full)
        return kept


@register_quantizer(METHOD)
class LadderQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantize linear layers while transformers loads them, or take those of a checkpoint as stored."""

    requires_calibration = False
    quantization_config: LadderConfig

    def __init__(self, quantization_config: LadderConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.held: dict[str, QuantizedTensor | StoredMatrix] = {}
        self.failed: LadderError | None = None
        self.linear: set[str] = set()
        self.tables: dict[str, torch.Tensor] = {}
        self.stacks: dict[str, tuple[str, str]] = {}
        self.device_map: Mapping[str, Any] | None = None
        self.plan: LayerPlan | None = None

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a parameter is the weight of a layer that is not skipped, of experts or of a table."""
        name, _, parameter = param_name.rpartition(".")
        known = param_name in self.stacks or param_name in self.tables
        return known or (parameter == "weight" and name in self.linear)

    def get_quantize_ops(self) -> LadderQuantize:
        """Return what quantizes a weight."""
        return LadderQuantize(self)

    def take_or_fail(self, model: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
        """Quantize a layer's weight, unless one has failed: transformers would collect errors as texts."""
        try:
            if self.failed is None:
                self.take(model, name, weight)
        except LadderError as error:
            self.failed = error
        if self.failed is not None:
            self._empty(model, name)

    def take(self, model: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
        """Quantize a layer's weight; the layer keeps its bias alone until loading has ended.

        Raises LadderError if it cannot be quantized so; the layer is named.
        """
        options, _ = self.quantization_config.split()
        plan = self.plan
        try:
            if name in self.stacks:
                path, stack = self.stacks[name]
                weight = as_matrix(model.get_submodule(path), stack, weight)
            else:
                weight = matrix_of(model.get_submodule(name), weight)
                require_shape(name, extents_of(model.get_submodule(name)), weight)
            whole = quantize(weight, self.quantization_config.weight, **options)
            self.held[name] = whole if plan is None else plan.shard(name, whole)
        except LadderError as error:
            raise type(error)(f"{name}: {error}") from error
        self._empty(model, name)

    def _empty(self, model: torch.nn.Module, name: str) -> None:
        """Take a weight away, so that transformers does not initialise what it takes to be missing."""
        path, stack = self.stacks.get(name, (name, "weight"))
        module = model.get_submodule(path)
        owner: Any = holder(module, stack)
        owner._is_hf_initialized = True
        # No rows, but a weight: modules initialise those of the layers, and of the experts, that they hold.
        shape = (0, 0, 0) if name in self.stacks else (0, extents_of(module)[1])
        weight: Any = torch.nn.Parameter(torch.empty(shape, device="cpu"), requires_grad=False)
        weight._is_hf_initialized = True
        setattr(owner, stack.rpartition(".")[2], weight)

    def _process_model_before_weight_loading(
        self, model: torch.nn.Module, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        self.device_map = device_map if isinstance(device_map, dict) else None
        config = self.quantization_config
        kept = self.get_modules_to_not_convert(model, config.modules_to_not_convert)
        skipped = (
            [] if self.pre_quantized else kept + list(getattr(model, "_keep_in_fp32_modules", None) or ())
        )
        self.linear, self.stacks = linear_layers(model, skipped), stacked_weights(model, skipped)
        if not self.pre_quantized:
            self._require_known(model, skipped)
            require_unquantized(checkpoint_files or ())
        require_computed(dtype_of(model), (*self.linear, *self.stacks))
        self.plan = LayerPlan(model, self.linear)
        self._refuse_missing(model)
        if self.pre_quantized:
            self._take_stored(model, checkpoint_files or ())

    def _require_known(self, model: torch.nn.Module, skipped: Iterable[str]) -> None:
        """Raise `LadderError` for experts of an unknown form, and for a model with nothing to quantize."""
        for name, module in model.named_modules():
            stacked = any(weight.ndim == 3 for weight in module.parameters(recurse=False))
            unknown = stacked and "Expert" in type(module).__name__ and not is_within(name, skipped)
            if unknown and not any(full.startswith(f"{name}.") for full in self.stacks):
                raise LadderError(
                    f"{name}: how {type(module).__name__} holds its experts is not known;"
                    f" modules_to_not_convert=[{name.rpartition('.')[2]!r}] leaves them as they are"
                )
        if not self.linear and not self.stacks:
            raise LadderError(f"{type(model).__name__} has no linear layer or expert to quantize")

    def _refuse_missing(self, model: Any) -> None:
        """Make loading fail if a weight could not be quantized, or if tensors are missing without excuse.

        What transformers ties, or lists as computed, may be missing; other tensors would be initialised at
        random, and a log alone would say so. Modules that the user named as not to be converted may be new,
        such as a head that is to be trained.
        """
        adjust = model._adjust_missing_and_unexpected_keys
        exempt = self.quantization_config.modules_to_not_convert or ()

        def adjust_and_check(info: Any) -> None:
            del model._adjust_missing_and_unexpected_keys
            adjust(info)
            if self.failed is not None:
                info.missing_keys.clear()
                info.mismatched_keys.clear()  # nor another error in place of this one
                raise self.failed
            held = {name if name in self.stacks else f"{name}.weight" for name in self.held}
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            held |= self.tables.keys() | {name for name, table in tied.items() if table in self.tables}
            self._fill_tables(model)
            lost = {name for name in info.missing_keys - held if not is_within(name, exempt)}
            info.missing_keys -= held | lost  # the error says it, no log beside it
            experts = {path for name, (path, _) in self.stacks.items() if name in self.held}
            info.unexpected_keys = {  # transformers renames what experts are stored by, and finds it nowhere
                name for name in info.unexpected_keys if not is_within(name, experts)
            }
            require_whole(getattr(model, "name_or_path", "") or "the checkpoint", model, lost)

        model._adjust_missing_and_unexpected_keys = adjust_and_check

    def _take_stored(self, model: torch.nn.Module, files: Iterable[str]) -> None:
        """Read the quantized layers of a checkpoint, and make transformers' loader pass over their arrays."""
        where, paths = getattr(model, "name_or_path", ""), [Path(file) for file in files]
        checkpoint = GIVEN.get() or opened(paths, where, partial(names_in, model))
        stored = names_in(model, checkpoint.layers)
        wanted = {name: [f"{name}.weight"] for name in self.linear if f"{name}.weight" in stored}
        for name, (path, stack) in self.stacks.items():
            wanted[name] = experts.sources(stack, number_of(model.get_submodule(path)), path, stored)
        for name, sources in wanted.items():
            if sources:
                extents = self._extents(model, name)
                names = [stored[source] for source in sources]
                self.held[name] = StoredMatrix(name, extents, checkpoint, names, experts.matrix_of)
                self._empty(model, name)
        self.tables = tables(model, stored, checkpoint)
        taken = {*self.tables, *(source for found in wanted.values() for source in found)}
        self._require_all(checkpoint, model, {stored[source] for source in taken})
        parts = {part.name for _, layer in checkpoint.layers.values() for part in layer.parts.values()}
        parts |= set(filter(partial(_is_of_inputs, checkpoint), checkpoint.plain))
        named = parts | set(names_in(model, parts))  # transformers compares what its rules make of them
        patterns = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in named}
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {f"^{name}$" for name in patterns}  # type: ignore[assignment]

    def _extents(self, model: torch.nn.Module, name: str) -> tuple[int, int]:
        """Return the extents of the matrix that a layer's, or a stack of experts', weight is."""
        if name not in self.stacks:
            return extents_of(model.get_submodule(name))
        path, stack = self.stacks[name]
        module = model.get_submodule(path)
        rows, columns = as_matrix(module, stack, held(module, stack)).shape
        return rows, columns

    def _fill_tables(self, model: Any) -> None:
        """Put the dequantized tables of embeddings into a model, and into heads that are tied to them."""
        for name, values in self.tables.items():
            path = name.removesuffix(".weight")
            values = values.to(device_of(self.device_map, path))
            model.get_submodule(path).weight = torch.nn.Parameter(values, requires_grad=False)
        if self.tables:
            model.tie_weights()

    def _require_all(self, checkpoint: Checkpoint, model: torch.nn.Module, taken: set[str]) -> None:
        """Raise `CheckpointError` if a quantized tensor has no place in the model, or none is quantized.

        Heads have none in a base model.
        """
        method = checkpoint.config.get("quant_method")
        none = f"{checkpoint.path}: no tensor is stored quantized, the configuration says {method!r}"
        require(bool(taken) or method is None, none)
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        is_base = any(name.startswith(prefix) for name in taken) and not hasattr(model, prefix[:-1])
        for name in checkpoint.layers:
            is_of_head = is_base and not name.startswith(prefix)
            if name not in taken and not is_of_head:
                raise CheckpointError(
                    f"{checkpoint.path}: {name} ({checkpoint.entry(name).format}) is no linear layer,"
                    f" embedding or expert of {type(model).__name__}"
                )

    @kernels_alone()
    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        options, plan = {"dtype": dtype_of(model), **self.quantization_config.split()[1]}, self.plan
        assert plan is not None  # made before weights were loaded
        for path in {path for name, (path, _) in self.stacks.items() if name in self.held}:
            plan.refuse_stacks(path)
            module = model.get_submodule(path)
            held = {
                stack: matrix_and(self.held.pop(f"{path}.{stack}"))
                for stack in stacks(module)
                if f"{path}.{stack}" in self.held
            }
            weights = {stack: matrix for stack, (matrix, _) in held.items()}
            layers = layers_from(module, weights, device=device_of(self.device_map, path), **options)
            for stack, (_, settle) in held.items():
                settle(layers[stack])
            install(module, layers)
        while self.held:
            name, found = self.held.popitem()
            matrix, settle = matrix_and(found)
            bias = plan.bias(name, model.get_submodule(name).bias)  # type: ignore[arg-type]
            if self.pre_quantized:
                matrix = plan.shard(name, matrix)
            where = device_of(self.device_map, name)
            layer = Linear.from_quantized(matrix, bias, device=where, **options)
            del matrix
            settle(layer)
            plan.connect(name, layer)
            model.set_submodule(name, layer)
        plan.restore()
        keep_apart(model)
        return model

    def update_device_map(self, device_map: Any) -> Any:
        """Raise `DeviceError` for modules that are to stay on a disk."""
        places = device_map.values() if isinstance(device_map, dict) else (device_map,)
        if "disk" in places:
            raise DeviceError(f"{METHOD!r} loads no module onto a disk; the map is {device_map}")
        return device_map

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Put layers of the model's own classes in place of quantized ones; adapters around them stay.

        Raises DeviceError if the model is divided over processes.
        """
        if self.plan is not None and self.plan.mesh is not None:
            raise DeviceError("a model that is divided over processes is not dequantized: load it whole")
        with torch.device("meta"):
            plain = type(model)._from_config(copy.deepcopy(model.config))
        name_of = str(dtype).removeprefix("torch.")  # configurations that were saved have names
        for name, module in list(model.named_modules()):
            own = name.replace(".base_layer", "")  # PEFT's name for what an adapter is around
            if is_experts(module) and hasattr(module, HOME):
                uninstall(module, plain.get_submodule(own), name_of)
            elif type(module) is Linear:
                layer = plain.get_submodule(own)
                matrix = module.canonical.dequantize(name_of)  # type: ignore[union-attr]
                layer.weight = torch.nn.Parameter(matrix_of(layer, matrix), requires_grad=False)
                layer.bias = None if module.bias is None else torch.nn.Parameter(module.bias.to(matrix.dtype))
                model.set_submodule(name, layer)
        return model

    def is_serializable(self) -> bool:
        """Tell whether a model can be saved: state dicts hold canonical storage, of one process a shard."""
        return self.plan is None or self.plan.mesh is None

    @property
    def is_trainable(self) -> bool:
        """Tell whether gradients pass through quantized layers."""
        return self.quantization_config.has_gradients


AutoHfQuantizer.merge_quantization_configs = settling(AutoHfQuantizer.merge_quantization_configs)


def stacked_weights(model: torch.nn.Module, skipped: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names of experts' stacked weights but those that are, or lie within, the skipped modules.

    Returns: Name -> that of the experts, and the weight's path below them.
    """
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    kept = [(name, module) for name, module in found if not is_within(name, skipped)]
    return {f"{name}.{stack}": (name, stack) for name, module in kept for stack in stacks(module)}


def tables(
    model: torch.nn.Module, stored: Mapping[str, str], checkpoint: Checkpoint
) -> dict[str, torch.Tensor]:
    """Dequantize tables of embeddings, to which heads may be tied, and layers (routers) that compute more.

    stored: Names in the model -> names in the checkpoint.
    Raises CheckpointError if a table is of another shape.
    """
    found = {}
    kinds = torch.nn.Embedding, torch.nn.Linear
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if weight in stored and isinstance(module, kinds) and not is_linear(module):
            found[weight] = checkpoint.dequantize(stored[weight], module.weight.dtype)
            have, want = list(found[weight].shape), list(module.weight.shape)
            require(have == want, f"{checkpoint.path}: {weight} is {have}, not {want}")
    return found


def _is_of_inputs(checkpoint: Checkpoint, name: str) -> bool:
    """Tell how a tool quantizes the inputs of a quantized layer, which Ladder's layers take as they are."""
    layer, _, part = name.rpartition(".")
    return part in INPUTS and f"{layer}.weight" in checkpoint.layers


def names_in(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return the names that a model has for stored tensors -> their names in the checkpoint.

    Of a stored name, what transformers' own rules for the architecture make of it, and of either with and
    without the base model's prefix, that name counts of which the fewest parts lead to no module.
    """
    base = getattr(model, "base_model_prefix", "")
    modules = {name for name, _ in model.named_modules()}
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def fit(name: str) -> tuple[int, int]:
        paths = [*accumulate(name.split("."), lambda path, part: f"{path}.{part}")]
        within = sum(path in modules for path in paths)
        return within - len(paths), within

    def named(name: str) -> str:
        renamed = name
        for rule in rules:
            renamed = rule.rename_source_key(renamed)[0]
        found = (name, renamed)
        bare = (one.removeprefix(f"{base}.") for one in found)
        return max((*found, *(f"{base}.{one}" for one in found if base), *bare), key=fit)

    return {named(name): name for name in stored}


def load_pretrained(model_class: Any, path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a model that another tool quantized, with Ladder's layers in place of the tool's.

    model_class: A class with ``from_pretrained``, such as ``AutoModelForCausalLM``.
    path: Folder, or name on the hub, of a model in a format that `ladder.load_checkpoint` reads; or a GGUF
        file (`ladder.integrations.gguf_models`).
    **kwargs: For ``from_pretrained``. ``activation`` is for `ladder.Linear`.
    Raises CheckpointError if the format is not known, or a quantized tensor is no layer of the model.
    """
    options = {name: kwargs.pop(name) for name in LINEAR_OPTIONS if name in kwargs}
    stored = LadderConfig("stored", **options).to_dict()
    if os.fspath(path).endswith(".gguf"):
        return _load_gguf(model_class, Path(path), stored, **kwargs)
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = stored
    return model_class.from_pretrained(path, config=config, **kwargs)


def _load_gguf(model_class: Any, path: Path, stored: dict[str, Any], **kwargs: Any) -> Any:
    """Load a model from a GGUF file."""
    from ladder.integrations.gguf_models import model_of

    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
    dtype = torch.float32 if dtype in (None, "auto") else getattr(torch, str(dtype).removeprefix("torch."))
    found, config, checkpoint, values = model_of(model_class, path, dtype)
    config.quantization_config = stored
    token = GIVEN.set(checkpoint)
    try:
        return found.from_pretrained(None, config=config, state_dict=values, dtype=dtype, **kwargs)
    finally:
        GIVEN.reset(token)
