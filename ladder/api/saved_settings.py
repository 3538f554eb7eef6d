"""What configurations of transformers' models say of layers that `quantize_` has replaced.

``save_pretrained`` writes it, and ``from_pretrained`` (`ladder.integrations.transformers`) then takes the
layers as they are stored. Without it their weights would pass for missing, and be initialised at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ladder.api.linear import Linear
from ladder.api.scaled_linear import ScaledLinear

METHOD = "ladder"
"""The name of Ladder's method of quantization in configurations."""

SETTINGS = "quantization_config"

PRETRAINED = ("transformers.modeling_utils", "PreTrainedModel")
"""Module and name of the class of transformers' models: no import of it is needed to tell them."""

SEVERAL = "differs by layer"
"""In place of a type of activations, of which configurations have one: no model is loaded with that."""


def note_settings(model: torch.nn.Module) -> None:
    """Say in the configurations of transformers' models within a model that layers are Ladder's.

    What a configuration says already stays.
    """
    for each in _pretrained(model):
        config: Any = getattr(each, "config", None)
        layers = [module for module in each.modules() if isinstance(module, Linear | ScaledLinear)]
        if layers and config is not None and getattr(config, SETTINGS, None) is None:
            setattr(config, SETTINGS, settings_of(layers))


def settings_of(layers: list[Linear | ScaledLinear]) -> dict[str, Any]:
    """Return the settings with which layers are made again of what is stored of them."""
    asked = {None if _is_own(layer) else layer.problem.activation for layer in layers}
    activation = asked.pop() if len(asked) == 1 else SEVERAL
    invariant = any(getattr(layer, "batch_invariant", False) for layer in layers)
    options = {"activation": activation, "batch_invariant": invariant}
    return {
        "quant_method": METHOD,
        "weight": "stored",
        **{name: value for name, value in options.items() if value},
    }


def _is_own(layer: Linear | ScaledLinear) -> bool:
    """Tell whether a layer computes in its own type: its inputs are not quantized."""
    return layer.problem.activation == str(layer.dtype).removeprefix("torch.")


def _pretrained(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost models of transformers."""
    if any((kind.__module__, kind.__name__) == PRETRAINED for kind in type(model).__mro__):
        yield model
        return
    for child in model.children():
        yield from _pretrained(child)
