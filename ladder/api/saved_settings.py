"""What configurations of transformers' and diffusers' models say of layers that `quantize_` has replaced.

``save_pretrained`` writes it, and ``from_pretrained`` (`ladder.integrations`) then takes the layers as they
are stored. Without it their weights would pass for missing, and be initialised at random.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ladder.api.linear import Linear
from ladder.api.scaled_linear import ScaledLinear

METHOD = "ladder"
"""The name of Ladder's method of quantization in configurations."""

SETTINGS = "quantization_config"

SEVERAL = "differs by layer"
"""In place of a type of activations, of which configurations have one: no model is loaded with that."""


def note_settings(model: torch.nn.Module) -> None:
    """Say in the configurations of such models, a model and what is inside, that layers are Ladder's.

    What a configuration says already stays.
    """
    for each, write in _pretrained(model):
        layers = [module for module in each.modules() if isinstance(module, Linear | ScaledLinear)]
        if layers and getattr(each.config, SETTINGS, None) is None:
            write(each, settings_of(layers))
        if layers and write is _set:
            keep_apart(each)


def keep_apart(model: Any) -> None:
    """Forget what would join or rearrange quantized weights when a model of transformers is saved or tied.

    They are stored as they are; loading finds them by their names in the model, whatever a checkpoint of the
    plain model has.
    """
    _untie(model)
    quantized = [name for name, module in model.named_modules() if isinstance(module, Linear | ScaledLinear)]

    def alters(conversion: Any) -> bool:
        saving = conversion.reverse_transform() if hasattr(conversion, "operations") else None
        return saving is not None and any(
            saving.rename_source_key(f"{name}.weight")[1] is not None for name in quantized
        )

    known = getattr(model, "_weight_conversions", None)
    if known is None:  # of a model that was not loaded, transformers looks them up when it is saved
        table: Any = sys.modules["transformers.conversion_mapping"]
        found = table.get_model_conversion_mapping(model, add_legacy=False)
        known = [each for each in found if not hasattr(each, "prefix_to_add")]
    model._weight_conversions = [conversion for conversion in known if not alters(conversion)]


def _untie(model: Any) -> None:
    """Forget that weights of quantized layers are others': ``tie_weights`` would make parameters of them."""
    for each in model.modules():
        stated = getattr(each, "_tied_weights_keys", None)
        if not isinstance(stated, dict):  # of names, or of patterns whose names are in all_tied_weights_keys
            continue
        kinds = Linear | ScaledLinear
        layers = [f"{name}.weight" for name, layer in each.named_modules() if isinstance(layer, kinds)]
        expanded = getattr(each, "all_tied_weights_keys", {})
        known = stated | expanded
        kept = {
            name: source
            for name, source in known.items()
            if not any(re.match(part, layer) for part in (name, source) for layer in layers)
        }
        if len(kept) < len(known):
            each._tied_weights_keys = kept
            each.all_tied_weights_keys = {name: kept[name] for name in expanded if name in kept}


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


def _set(model: Any, settings: dict[str, Any]) -> None:
    setattr(model.config, SETTINGS, settings)


def _register(model: Any, settings: dict[str, Any]) -> None:
    model.register_to_config(**{SETTINGS: settings})


WRITERS: dict[tuple[str, str], Callable[[Any, dict[str, Any]], None]] = {
    ("transformers.modeling_utils", "PreTrainedModel"): _set,
    ("diffusers.models.modeling_utils", "ModelMixin"): _register,
}
"""Module and name of a class of models -> what writes into its configuration; no import tells them."""


def _pretrained(model: torch.nn.Module) -> Iterator[tuple[Any, Callable[[Any, dict[str, Any]], None]]]:
    """Yield the outermost models that have configurations, with what writes into these."""
    names = [(kind.__module__, kind.__name__) for kind in type(model).__mro__]
    write = next((WRITERS[name] for name in names if name in WRITERS), None)
    if write is not None and getattr(model, "config", None) is not None:
        yield model, write
        return
    for child in model.children():
        yield from _pretrained(child)
