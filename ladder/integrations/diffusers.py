"""diffusers: `LadderConfig`, which quantizes a model of a pipeline while it is loaded.

Importing this module registers the method ``"ladder"``, in transformers too where that is installed, so that
``PipelineQuantizationConfig(quant_backend="ladder", ...)`` quantizes whole pipelines. Linear layers are
quantized; convolutions and embeddings stay. Written for diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    DiffusersAutoQuantizer,
)
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from ladder.api.linear import Linear
from ladder.api.linear_modules import extents_of
from ladder.api.quantization import quantize
from ladder.api.saved_settings import METHOD
from ladder.formats.checkpoint import Checkpoint
from ladder.integrations.loading import (
    Settings,
    StoredMatrix,
    device_of,
    linear_layers,
    matrix_and,
    opened,
    require_shape,
    require_unquantized,
    settling,
)
from ladder.runtime.threads import kernels_alone
from tile_types import QuantizedTensor
from tile_types.errors import CheckpointError, DeviceError, LadderError

if find_spec("transformers") is not None:
    import ladder.integrations.transformers  # noqa: F401  (text encoders of pipelines)


class Method(StrEnum):
    """The name of the method: diffusers asks for its ``value``."""

    LADDER = METHOD


class LadderConfig(Settings, QuantizationConfigMixin):  # type: ignore[misc]
    """How to quantize a model while it is loaded: ``quantization_config`` of ``from_pretrained``.

    Parameters are those of `Settings`.

    Examples
    --------
    >>> config = LadderConfig("int4", group_size=64)
    >>> unet = UNet2DConditionModel.from_pretrained(path, subfolder="unet", quantization_config=config)
    """

    quant_method = Method.LADDER

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what diffusers prints of it."""
        return self.to_dict()


class LadderQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Quantize linear layers while diffusers loads them, or take those that were saved."""

    use_keep_in_fp32_modules = True
    quantization_config: LadderConfig

    def __init__(self, quantization_config: LadderConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.held: dict[str, QuantizedTensor | StoredMatrix] = {}
        self.linear: set[str] = set()
        self.dtype = torch.get_default_dtype()
        self.device_map: Mapping[str, Any] | None = None
        self.stored: Checkpoint | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to divide a model over devices.

        Raises DeviceError if a map names several.
        """
        if isinstance(device_map, dict) and len(set(map(str, device_map.values()))) > 1:
            raise DeviceError(
                f"{METHOD!r} loads a model of diffusers onto one device; the map is {device_map}"
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the type that layers compute in: float32 unless the user says."""
        self.dtype = torch_dtype or self.dtype
        return self.dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Sequence[str]) -> list[str]:
        """Open the files of a model that was saved quantized; its arrays are none of diffusers' concern.

        Raises CheckpointError if a model that is to be quantized holds codes of another tool.
        """
        if not self.pre_quantized:
            require_unquantized(checkpoint_files)
            return loaded_keys
        self.stored = opened([Path(file) for file in checkpoint_files])
        parts = {part.name for _, layer in self.stored.layers.values() for part in layer.parts.values()}
        return [key for key in loaded_keys if key not in parts]

    def _process_model_before_weight_loading(
        self,
        model: torch.nn.Module,
        device_map: Any = None,
        keep_in_fp32_modules: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.device_map = device_map if isinstance(device_map, dict) else None
        kept = self.quantization_config.modules_to_not_convert or []
        self.linear = linear_layers(model, [] if self.pre_quantized else [*kept, *keep_in_fp32_modules])
        if self.stored is not None:
            self._take_stored(model, self.stored)

    def _take_stored(self, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
        """Read the quantized layers of a checkpoint.

        Raises CheckpointError if one has no place in the model.
        """
        for stored in checkpoint.layers:
            name = stored.removesuffix(".weight")
            if name not in self.linear:
                raise CheckpointError(
                    f"{checkpoint.path}: {stored} is no linear layer of {type(model).__name__}"
                )
            extents = extents_of(model.get_submodule(name))
            self._hold(model, name, StoredMatrix(name, extents, checkpoint, [stored], itemgetter(0)))

    def _hold(self, model: torch.nn.Module, name: str, matrix: QuantizedTensor | StoredMatrix) -> None:
        """Keep a weight until loading has ended; the layer keeps its bias alone."""
        layer: Any = model.get_submodule(name)
        self.held[name] = matrix
        layer.weight = None

    def check_if_quantized_param(
        self, model: torch.nn.Module, param_value: Any, param_name: str, state_dict: Any, **kwargs: Any
    ) -> bool:
        """Tell whether a parameter is the weight of a layer to quantize."""
        name, _, parameter = param_name.rpartition(".")
        return parameter == "weight" and name in self.linear and not self.pre_quantized

    def create_quantized_param(
        self, model: torch.nn.Module, param_value: torch.Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Quantize a layer's weight.

        Raises LadderError if it cannot be quantized so; the layer is named.
        """
        options, _ = self.quantization_config.split()
        name = param_name.rpartition(".")[0]
        try:
            require_shape(name, extents_of(model.get_submodule(name)), param_value)
            self._hold(model, name, quantize(param_value, self.quantization_config.weight, **options))
        except LadderError as error:
            error.add_note(f"while quantizing {name}")
            raise

    @kernels_alone()
    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        _, options = self.quantization_config.split()
        while self.held:
            name, found = self.held.popitem()
            matrix, settle = matrix_and(found)
            where = device_of(self.device_map, name)
            bias: Any = model.get_submodule(name).bias
            layer = Linear.from_quantized(matrix, bias, device=where, dtype=self.dtype, **options)
            del matrix
            settle(layer)
            model.set_submodule(name, layer)
        return model

    @property
    def supports_parallel_loading(self) -> bool:
        """Tell that shards are read one after the other: never more than one layer is in high precision."""
        return False

    @property
    def is_serializable(self) -> bool:
        """Tell that models can be saved: state dicts hold canonical storage."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell whether gradients pass through quantized layers."""
        return self.quantization_config.has_gradients

    @property
    def is_compileable(self) -> bool:
        """Tell that ``torch.compile`` takes quantized layers."""
        return True


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LadderConfig
AUTO_QUANTIZER_MAPPING[METHOD] = LadderQuantizer
DiffusersAutoQuantizer.merge_quantization_configs = settling(
    DiffusersAutoQuantizer.merge_quantization_configs
)
