"""What lies beside codes, or is said of them, and makes a layer more than a product with their values.

Rotations of inputs (QuaRot, ConvRot, ParoQuant), branches of low rank (SVDQuant, EoRA), second scales (SINQ),
norms of inputs: weights read without them would be those of another model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ladder.formats.files import require

WEIGHT = ".weight"

HARMLESS = re.compile(
    r"(\w+_)?bias"
    r"|pre_quant_scale"  # refused elsewhere unless all 1
    r"|qscale_(act|input|output)"
    r"|(scale|qscale)_(input|output)"
    r"|(input|output|in|out|act|activation|q|k|v|kv)_(\w+_)?(scales?|scale_inv|zero_points?|zeros?|amax|min|max)"
    r"|(input|output|act|activation)_quantizer\..*"
)
"""Path below a layer of what its weight does not depend on: how inputs, outputs and caches are quantized."""

SCALING = re.compile(r"scale|scaling|absmax|codebook|lookup|lut|zero|shift")
"""Part of the name of an array that codes take their meaning from."""

ONLINE = ("input", "output", "q_attn", "k_cache")
"""Where compressed-tensors applies transforms when a model runs; those of weights are in the weights."""

ROTATED = re.compile(r"rotation|rotated|hadamard|spinquant|quarot")
"""Part of what configurations and arrays of a whole model call rotations of inputs: ``rotation``
(GPTQModel), ``rotation_config`` (AutoRound), ``shared_input_rotation_4096`` (Quark)."""


def require_nothing_else(layers: Mapping[str, Any], rest: Iterable[str]) -> None:
    """Raise `CheckpointError` if a quantized layer has arrays of its own that no format knows.

    layers: Quantized tensors by name.
    rest: Names of arrays that belong to none of them.
    """
    for name in rest:
        for module in _modules(name):
            known = module + WEIGHT not in layers or HARMLESS.fullmatch(name[len(module) + 1 :])
            require(bool(known), f"{name}: what it does beside the codes of {module}{WEIGHT} is not known")
        require(not (layers and _rotates(name)), f"{name}: rotations of inputs are not done here")


def _rotates(name: str) -> bool:
    return ROTATED.search(name.rpartition(".")[2].lower()) is not None


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that an array lies in, from the innermost on."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def scaled_by(codes: str, names: Iterable[str]) -> str | None:
    """Return the name of an array beside codes, within the same module, that they take their meaning from.

    names: Of what lies in the module.
    """
    module = codes.rpartition(".")[0]
    paths = {name: name[len(module) + 1 if module else 0 :] for name in names if name != codes}
    return next((name for name, path in paths.items() if _scales(path)), None)


def _scales(path: str) -> bool:
    return SCALING.search(path.lower()) is not None and HARMLESS.fullmatch(path) is None


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of all arrays of each module, one level of submodules included."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for module in [*_modules(name), ""][:2]:
            found[module].append(name)
    return found


def require_no_transforms(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a configuration has what layers read or write transformed at run time."""
    transforms = config.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for name, scheme in (groups if isinstance(groups, dict) else {}).items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        places = [each.get("location") for each in applied or () if isinstance(each, dict)]
        online = [place for place in places if place in ONLINE]
        require(not online, f"the configuration's transform {name!r} of {online[:1]} is not applied here")
    found = [key for key in config if config[key] and _rotates(key)]
    require(not found, f"the configuration has inputs rotated ({found}), which is not done here")
