"""What a folder of a checkpoint holds: a file of tensors, or an index of shards, and a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.formats.beside import warn_of_attention
from ladder.formats.files import Arrays, Stored, read_json, read_safetensors, require
from ladder.formats.gguf import SPLIT
from ladder.formats.layer import AUTO_ROUND
from ladder.formats.pickled import read_pickled

CONFIGS = (
    ("config.json", "quantization_config"),
    ("config.json", "quantization"),
    ("quantize_config.json", ""),
    ("quant_config.json", ""),
    ("hf_quant_config.json", "quantization"),
    ("params.json", "quantization"),
)
"""File of a folder -> the key that describes the quantization; empty for the whole file. The last two are
ModelOpt's, which names no method, and Mistral's."""

NESTED = "quantization_config"
"""Key of `CONFIGS` that may lie in a part of a configuration, such as ``text_config``."""

METHOD = "quant_method"
"""Entry of a configuration: the name of the tool or its method."""

MLX, MLX_NESTED = "mlx", "quantization"
"""End of AutoRound's name of MLX's packing, and the entry in which MLX describes its codes."""

WHOLE = "model.safetensors"
ENDINGS = (".safetensors", ".gguf", ".pt", ".bin", ".pth")

INDEXES = ("model.safetensors.index.json", "*.safetensors.index.json", "*.index.json", "*.index.*.json")
"""Names of indexes of shards, in the order in which they are looked for: of transformers, of others
(diffusers, Mistral), of pickled files, of variants such as fp16."""

MOST_SHARDS = 10_000


def file_of(folder: Path) -> Path:
    """Return the one file, or index, that a folder's tensors are read from."""
    indexes = next((found for name in INDEXES if (found := sorted(folder.glob(name)))), [])
    require(len(indexes) < 2, f"{folder} holds several indexes of shards; name one of them")
    if indexes:
        return indexes[0]
    files = sorted(file for file in folder.iterdir() if file.suffix in ENDINGS)
    safe = [file for file in files if file.suffix == ".safetensors"]
    chosen = [file for file in safe if file.name == WHOLE] or safe or files
    split = {match and (match[1], match[3]) for match in map(SPLIT.fullmatch, (each.name for each in chosen))}
    require(len(chosen) > 0, f"{folder} holds no file of {', '.join(ENDINGS)}")
    one = len(chosen) == 1 or (len(split) == 1 and None not in split)
    require(one, f"{folder} holds several files and no index of them ({INDEXES[0]}); name one of them")
    return chosen[0]


def arrays_of(path: Path) -> Arrays:
    """Return the arrays of a file, or of the shards of an index."""
    return read_shards(path) if path.suffix == ".json" else _read_file(path)


def _read_file(path: Path) -> Arrays:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    known = path.suffix in ENDINGS and path.suffix != ".gguf"
    require(known, f"{path} is none of {', '.join(ENDINGS)}, nor a folder or an index")
    return read_pickled(path)


def read_shards(index: Path) -> Arrays:
    """Read the files that an index names, with what they hold beside its tensors.

    Raises CheckpointError if a file is missing, lies outside of the folder, or lacks what it should hold, or
        if several hold a tensor that the index does not name.
    """
    weight_map = read_json(index, unique=True).get("weight_map")
    require(isinstance(weight_map, dict) and bool(weight_map), f"{index} has no weight_map")
    assert isinstance(weight_map, dict)
    files: dict[str, Arrays] = {}
    stored: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for name, shard in weight_map.items():
        require(isinstance(shard, str) and Path(shard).name == shard, f"{index}: {shard!r} is no file name")
        if shard not in files:
            require(len(files) < MOST_SHARDS, f"{index} names too many files")
            files[shard] = _read_file(index.parent / shard)
            metadata |= files[shard].metadata
        require(name in files[shard], f"{index.parent / shard} lacks the tensor {name!r} of {index.name}")
        stored[name] = files[shard][name]
    for arrays in files.values():
        for name in (name for name in arrays if name not in weight_map):
            require(name not in stored, f"{index} does not say which file's {name!r} counts")
            stored[name] = arrays[name]
    return Arrays(stored, metadata)


def config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its quantization; empty if it says nothing."""
    for name, key in CONFIGS:
        if (folder / name).is_file():
            content = read_json(folder / name)
            warn_of_attention(folder / name, content)
            found = _under(content, key, folder / name) if key else content
            if found.get(METHOD) in AUTO_ROUND and str(found.get("packing_format", "")).endswith(MLX):
                return _as_mlx(found, _under(content, MLX_NESTED, folder / name))
            if found:
                return {METHOD: "modelopt", **found} if name.startswith("hf_") else found
    return {}


def _as_mlx(found: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of what AutoRound packs as MLX does: MLX's own, which stands beside it."""
    others = {key: value for key, value in found.items() if key not in (METHOD, "packing_format")}
    return {**others, **stated}


def _under(content: Mapping[str, Any], key: str, file: Path) -> dict[str, Any]:
    """Return an entry of a configuration, or the one of its parts (``text_config`` of several modalities).

    Raises CheckpointError if it is no object, or parts have several.
    """
    nested = content.values() if key == NESTED else ()
    parts = [part[key] for part in nested if isinstance(part, dict) and part.get(key)]
    found = content.get(key) or (parts[0] if parts else {})
    require(isinstance(found, dict), f"{file}: {key} is {str(found)[:80]!r}")
    require(content.get(key) or all(part == found for part in parts), f"{file} has several {key}")
    return dict(found)
