"""torchao: configurations for its ``quantize_`` that put Ladder's layers into a model.

Importing this module registers them with torchao. `LadderWeightOnlyConfig` quantizes; `LadderStoredConfig`
takes weights that torchao has quantized, bit for bit. Written for torchao 0.18.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

from ladder.api.linear import Linear
from ladder.formats import torchao as stored
from ladder.formats.layer import Layer, TensorInMemory
from tile_types import QuantizedTensor
from tile_types.errors import LadderError

NAME = "layer.weight"
"""What torchao is told that a weight is called."""

PARTS = "layer._weight"
"""How torchao then begins the names of its arrays."""


@dataclass
class LadderWeightOnlyConfig(AOBaseConfig):  # type: ignore[misc]
    """Quantize the weights of linear layers.

    Parameters
    ----------
    weight
        Type of the weights, or its name.
    group_size, zero, scaling, scale_type
        As in `ladder.quantize`.

    Examples
    --------
    >>> torchao.quantize_(model, LadderWeightOnlyConfig("nf4", group_size=64))
    """

    weight: str = "int4"
    group_size: int | None = 128
    zero: str | None = None
    scaling: str | None = None
    scale_type: str | None = None


@dataclass
class LadderStoredConfig(AOBaseConfig):  # type: ignore[misc]
    """Run linear layers whose weights torchao has quantized on Ladder's kernels.

    activation: Type that products are computed in; by default that of the layer's results.
    """

    activation: str | None = None


@register_quantize_module_handler(LadderWeightOnlyConfig)  # type: ignore[untyped-decorator]
def quantized(module: torch.nn.Module, config: LadderWeightOnlyConfig) -> Linear:
    """Return a linear layer, quantized.

    Raises LadderError if it is no plain linear layer, has been quantized before, or cannot be quantized so.
    """
    linear = _linear(module)
    if isinstance(linear.weight, TorchAOBaseTensor):
        raise LadderError(
            f"this weight is a {type(linear.weight).__name__} already: LadderStoredConfig() takes it as it is"
        )
    names = ("weight", "group_size", "zero", "scaling", "scale_type")
    options = {name: getattr(config, name) for name in names}
    return Linear.from_linear(linear, **{name: value for name, value in options.items() if value is not None})


@register_quantize_module_handler(LadderStoredConfig)  # type: ignore[untyped-decorator]
def taken(module: torch.nn.Module, config: LadderStoredConfig) -> Linear:
    """Return a linear layer on the weight that torchao has quantized.

    Raises LadderError if it is no plain linear layer, or its weight none of torchao's that
        `ladder.formats.torchao` reads.
    """
    linear = _linear(module)
    weight = linear.weight
    options = {"dtype": weight.dtype, "device": weight.device, "activation": config.activation}
    return Linear.from_quantized(from_torchao(weight), linear.bias, **options)


def from_torchao(weight: torch.Tensor) -> QuantizedTensor:
    """Return the bits of one of torchao's tensors as a tensor of ours.

    Raises CheckpointError if its class is none of `ladder.formats.torchao.READERS`.
    Raises LadderError if torchao has not quantized it.
    """
    plain = weight.data if isinstance(weight, torch.nn.Parameter) else weight
    if not isinstance(plain, TorchAOBaseTensor):
        raise LadderError("torchao has not quantized this weight: LadderWeightOnlyConfig(...) quantizes it")
    try:
        arrays, described = flatten_tensor_state_dict({NAME: plain})
    except ValueError as error:
        raise LadderError(f"torchao does not take {type(plain).__name__} apart: {error}") from error
    parts: dict[str, Any] = {
        name.removeprefix(PARTS): TensorInMemory(array) for name, array in arrays.items()
    }
    return stored.read(Layer(NAME, parts, metadata=described))


def _linear(module: torch.nn.Module) -> torch.nn.Linear:
    """Return a module that is exactly a linear layer: subclasses may rely on their weight."""
    if type(module) is not torch.nn.Linear:
        raise LadderError(f"a {type(module).__name__} is no plain linear layer: leave it out by filter_fn")
    return module


ALLOWED_AO_MODULES.add(__name__)  # so that torchao finds these classes when it reads configurations
