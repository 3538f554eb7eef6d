"""What lies beside codes, or is said of them, and makes a layer more than a product with their values.

Rotations of inputs (QuaRot, ConvRot, ParoQuant), branches of low rank (SVDQuant, EoRA), second scales (SINQ),
norms of inputs: weights read without them would be those of another model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ladder.faults import warn_once
from ladder.formats.files import require
from ladder.formats.layer import OVERRIDES

WEIGHT = ".weight"

HARMLESS = re.compile(
    r"(\w+_)?bias"
    r"|pre_quant_scale"  # refused elsewhere unless all 1
    r"|qscale_(act|input|output)"
    r"|(scale|qscale)_(input|output)"
    r"|(input|output|in|out|act|activation|q|k|v|kv)_(\w+_)?(scales?(_2|_ub)?|scale_inv|zero_points?|zeros?|amax|min|max)"
    r"|(input|output|act|activation)_quantizer\..*"
    r"|activation_global_scale_bits"  # GPTQModel's, of inputs as NVFP4
)
"""Path below a layer of what its weight does not depend on: how inputs, outputs and caches are quantized."""

SCALING = re.compile(r"scale|scaling|absmax|codebook|lookup|lut|zero|shift")
"""Part of the name of an array that codes take their meaning from."""

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
"""Types of words of codes."""

CODE_NAMES = (".weight", "_weight", ".codes", ".indices", "._data", ".dqweight", ".qweight", ".B")
"""Suffixes of codes, of what is not read too (AQLM, VPTQ, HIGGS, FP-Quant, Marlin)."""

UNREAD = {
    ".trellis": "EXL3",
    ".q_weight": "EXL2 or MLC",
    ".Qidxs": "QuIP#",
    ".wscales": "SVDQuant",
    ".bitmask": "a sparse matrix",
    "._data": "quanto",
}
"""Suffixes of codes, or of scales, that are not read -> what they belong to; the last are quanto's others."""

MERGED = ("weight_input", "weight_output")
"""Where compressed-tensors applies transforms that are in the weights; it does others when a model runs."""

ROTATED = re.compile(r"rotation|rotated|hadamard|spinquant|quarot")
"""Part of what configurations and arrays of a whole model call rotations of inputs: ``rotation``
(GPTQModel), ``rotation_config`` (AutoRound), ``shared_input_rotation_4096`` (Quark)."""


CHANGED = re.compile(
    r"(?P<branch>adapter|lora|low_rank|svd|eora)|(?P<experts>moe_sparsity|expert_sparsity|novice)"
    r"|(?P<factors>prescale)"
)
"""Parts of names of fields that say that layers are not what their weights tell."""

CHANGES = {
    "branch": "what an adapter or a branch of low rank adds to layers",
    "experts": "experts that are left out, or replaced by constants",
    "factors": "factors of inputs",
}
"""Group of `CHANGED` -> what the field speaks of."""

SAYS, NOT_DONE = "the configuration has", "which is not done here"

NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of fields that say nothing."""

SPARSE = "sparse_attention_config"
"""Entry of a model's configuration, beside that of its quantization: which keys ModelOpt would not read."""

OWN_FIELDS = ("config_groups", "quantized_layers", *OVERRIDES)
"""Entries of a configuration that give layers, or groups of them, by name, fields of their own."""

ALGORITHMS = "algo_config"
"""Entry of Quark's configuration: what was done to weights, a list of fields with a name."""

ROTATIONS = ("rotation", "quarot")
"""Quark's names of algorithms that rotate."""


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
    """Raise `CheckpointError` if a configuration says that a model does more than its weights tell.

    That is: transforms of what layers read or write at run time, adapters, experts replaced by others.
    """
    transforms = config.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for name, scheme in (groups if isinstance(groups, dict) else {}).items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        places = [each.get("location") for each in applied or () if isinstance(each, dict)]
        online = [place for place in places if place not in MERGED]
        require(not online, f"the configuration's transform {name!r} of {online[:1]} is not applied here")
    for key, value in _fields(config):
        said = value not in NOTHING
        require(not said or ROTATED.search(key) is None, f"{SAYS} inputs rotated ([{key!r}]), {NOT_DONE}")
        found = CHANGED.search(key) if said else None
        require(found is None, f"{SAYS} {key!r}: {found and CHANGES[str(found.lastgroup)]}, {NOT_DONE}")
    _require_merged(config.get(ALGORITHMS))


def warn_of_attention(file: Path, content: Mapping[str, Any]) -> None:
    """Warn once if a configuration says that attention leaves keys out (ModelOpt), which is not done here."""
    if content.get(SPARSE) not in NOTHING:
        warn_once(f"{SPARSE} of {file}", f"{file}: its {SPARSE} is not applied, attention reads all keys")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration, in lower case, and those that it gives groups or layers their own.

    Names with dots are those of layers (MLX), not of fields. What a switch that is off would do with says
    nothing (SDNQ: ``use_svd``, ``svd_rank``).
    """
    own = [config[name] for name in OWN_FIELDS if isinstance(config.get(name), dict)]
    each = (fields for layers in own for fields in layers.values() if isinstance(fields, dict))
    for fields in (config, *each):
        lower = {str(key).lower(): value for key, value in fields.items() if "." not in str(key)}
        off = {key for key in lower if lower.get("use_" + key.partition("_")[0], True) in NOTHING}
        yield from ((key, value) for key, value in lower.items() if key not in off)


def _require_merged(algorithms: Any) -> None:
    """Raise `CheckpointError` if one of Quark's algorithms leaves something to be done at run time.

    Rotations between weights, smoothing and the like are in the weights.
    """
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        fields = each if isinstance(each, dict) else {}
        name, online = str(fields.get("name")), fields.get("online_config")
        layers = online.get("online_rotation_layers") if isinstance(online, dict) else None
        rotates = name in ROTATIONS and (fields.get("online_r1_rotation") or fields.get("r4") or layers)
        require(not rotates, f"{SAYS} inputs rotated ({name!r} of {ALGORITHMS}), {NOT_DONE}")
        require(name != "svdquant", f"{SAYS} {name!r} of {ALGORITHMS}: {CHANGES['branch']}, {NOT_DONE}")
