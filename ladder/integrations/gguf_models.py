"""GGUF files as models of transformers: tensors by the model's names, blocks as they are stored.

Configuration, names and what llama.cpp changed of each architecture are transformers' own tables, which need
the package ``gguf``. Rows that llama.cpp has permuted (queries and keys of Llama) are put back in order among
the codes; matrices that it changed otherwise, embeddings and norms are dequantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ladder.api.linear_modules import is_linear, is_transposed
from ladder.api.stacked_experts import is_experts
from ladder.formats.checkpoint import Checkpoint, load_checkpoint
from ladder.formats.files import Stored, require
from ladder.formats.gguf import SCALE, SPLIT
from ladder.formats.layer import Format, Layer
from ladder.runtime.allocate import empty
from ladder.runtime.threads import torch_together
from tile_types import QuantizedTensor
from tile_types.errors import CheckpointError
from tile_types.shards import taken_rows

FREQUENCIES = "rope_freqs.weight"
"""Divisors of rotary frequencies: how llama.cpp stores ``rope_type="llama3"``."""

INPUTS = ".input_scale"
"""Suffix of what llama.cpp quantizes a layer's inputs by, where it does."""

HEAD = "output.weight"

MOST_VALUES = 1 << 22
"""Values of embeddings that are dequantized at a time."""

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
"""What llama.cpp does not store of it: the values of every published model."""

EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""GGUF's name of stacked experts -> transformers' of a matrix of one."""


SIZES = {
    "attention.key_length": "head_dim",
    "context_length": "n_positions",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata of an architecture that transformers does not read of each -> its configurations' name."""


def model_of(
    model_class: Any, path: Path, dtype: torch.dtype
) -> tuple[Any, Any, Checkpoint, dict[str, torch.Tensor]]:
    """Return what transformers loads a GGUF file as.

    model_class: A class of models, or one such as ``AutoModelForCausalLM``.
    dtype: Type of what is dequantized.
    Returns: The model's class, its configuration, the quantized tensors by the model's names, and the others.
    Raises CheckpointError if the file is no model (an adapter, an importance matrix, ...), or has an
        architecture, a tensor, or a scaling of positions, which is not read.
    """
    checkpoint = load_checkpoint(path)
    kind = checkpoint.metadata.get("general.type", "model")
    require(kind == "model", f"{path} is no model: its general.type is {kind!r}")
    first = SPLIT.sub(r"\1-00001-of-\3.gguf", path.name)
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=first)
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: transformers reads no configuration from it: {error}") from error
    _complete(checkpoint, config)
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with torch.device("meta"):
        model = build(config)
    return type(model), config, *_divided(checkpoint, model, dtype)


def _complete(checkpoint: Checkpoint, config: Any) -> None:
    """Put into a configuration what transformers does not read: sizes, and how positions are scaled."""
    kind = checkpoint.metadata["general.architecture"]
    for key, name in SIZES.items():
        if f"{kind}.{key}" in checkpoint.metadata and name in config.to_dict():
            setattr(config, name, checkpoint.metadata[f"{kind}.{key}"])
    config.tie_word_embeddings = HEAD not in checkpoint  # it may lie in another file than the first
    scaling = checkpoint.metadata.get(f"{kind}.rope.scaling.type", "none")
    require(scaling == "none", f"{checkpoint.path}: {kind}.rope.scaling.type is {scaling!r}, not read yet")
    if FREQUENCIES not in checkpoint:
        return
    one = "rope_theta" in (getattr(config, "rope_parameters", None) or {})
    require(one, f"{checkpoint.path}: {FREQUENCIES} is not read for {type(config).__name__}")
    divisors = checkpoint.dequantize(FREQUENCIES, torch.float32)
    plain, scaled = (_frequencies(config, factor) for factor in (1.0, float(divisors.max())))
    fits = scaled.shape == divisors.shape and torch.allclose(plain / divisors, scaled, rtol=1e-4)
    require(fits, f"{checkpoint.path}: {FREQUENCIES} is no scaling of Llama 3's kind")


def _frequencies(config: Any, factor: float) -> torch.Tensor:
    """Return the rotary frequencies of Llama 3's scaling by a factor, which the configuration keeps."""
    config.rope_parameters = {**config.rope_parameters, **LLAMA3, "factor": factor}
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    return frequencies


def _divided(
    checkpoint: Checkpoint, model: Any, dtype: torch.dtype
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Name tensors as a model does: those that stay quantized, and the values of the others."""
    kind = checkpoint.metadata["general.architecture"]
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=model.config.to_dict())
    names, wanted = _names(checkpoint, model, processor), model.state_dict()
    layers: dict[str, tuple[Format, Layer]] = {}
    values: dict[str, torch.Tensor] = {}
    rows_of = Rows(processor)
    for stored in checkpoint:
        if _is_skipped(stored):
            continue
        name = names.get(stored) or names.get(stored.removesuffix(".weight"))
        if name is None:
            raise CheckpointError(f"{checkpoint.path}: {type(model).__name__} has no place for {stored}")
        found = _kept(checkpoint, stored, name, model, rows_of)
        layers |= found
        table = None if found else _table(checkpoint, stored, wanted[name].shape, dtype, rows_of)
        if table is not None:
            values[name] = table
        elif not found:
            value = checkpoint.dequantize(stored, torch.float32).numpy()
            changed = torch.from_numpy(np.ascontiguousarray(_process(processor, value, stored)))
            have, want = list(changed.shape), list(wanted[name].shape)
            require(value.ndim == 3 or have == want, f"{checkpoint.path}: {stored} is {have}, not {want}")
            parts = zip(_members(stored, name, len(value)), changed, strict=True) if value.ndim == 3 else ()
            values |= {member: part.to(dtype) for member, part in parts} or {name: changed.to(dtype)}
    return replace(checkpoint, layers=layers, plain={}), values


def _table(
    checkpoint: Checkpoint, stored: str, shape: Sequence[int], dtype: torch.dtype, rows_of: Rows
) -> torch.Tensor | None:
    """Return the values of a matrix whose rows lie as the model has them: embeddings, some rows at a time."""
    layers = {stored: checkpoint.layers[stored]} if stored in checkpoint.layers else {}
    parts = [layer.parts for _, layer in layers.values()] or [{"": checkpoint.plain[stored]}]
    part = parts[0][""]
    if len(shape) != 2 or checkpoint.entry(stored).shape != tuple(shape) or not isinstance(part, Stored):
        return None
    if len(parts[0]) > 1 or rows_of(stored, shape, False) != list(range(shape[0])):
        return None
    result, step = empty(*shape, dtype=dtype), max(1, MOST_VALUES // max(1, shape[1]))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        begin = part.begin + first * (part.nbytes // shape[0])
        some = replace(part, shape=(count, *part.shape[1:]), begin=begin)
        read = {name: (form, replace(layer, parts={"": some})) for name, (form, layer) in layers.items()}
        alone = replace(checkpoint, layers=read, plain={} if read else {stored: some})
        result[first : first + count] = alone.dequantize(stored, torch.float32).to(dtype)
        some.file.release(begin, some.nbytes)
    return result


def _is_skipped(stored: str) -> bool:
    """Tell tensors that no model has: the configuration has what they say, or nothing needs it."""
    return stored == FREQUENCIES or stored.endswith(INPUTS)


@dataclass(frozen=True)
class _Alone:
    """A module without its children, of which transformers would build a table of names each."""

    module: torch.nn.Module

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def named_children(self) -> tuple[()]:
        return ()


def _names(checkpoint: Checkpoint, model: Any, processor: TensorProcessor) -> dict[str, str]:
    """Return a model's name of each tensor of a file: the first module's that has a place for it.

    Modules within are asked only if a tensor has no place yet: a table has all names of all blocks.
    """
    config, found = model.config, dict[str, str]()
    wanted = [stored for stored in checkpoint if not _is_skipped(stored)]
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        told = _Alone(module), processor, config.model_type, config.num_hidden_layers, start
        found = {**get_gguf_hf_weights_map(*told), **found}
        if all(stored in found or stored.removesuffix(".weight") in found for stored in wanted):
            break
    return found


def _process(processor: TensorProcessor, array: Any, stored: str) -> Any:
    """Undo what llama.cpp changed of a tensor."""
    return processor.process(array, stored, parsed_parameters={"tensors": {}}).weights


def _members(stored: str, name: str, count: int) -> list[str]:
    """Return the names that checkpoints give the matrices of stacked experts."""
    member = EXPERTS[stored.split(".")[-2]]
    return [f"{name.rpartition('.')[0]}.{expert}.{member}.weight" for expert in range(count)]


def _kept(
    checkpoint: Checkpoint, stored: str, name: str, model: Any, rows_of: Rows
) -> dict[str, tuple[Format, Layer]]:
    """Return a tensor that stays quantized, or the matrices of a stack, by names; nothing for others."""
    path, _, parameter = name.rpartition(".")
    owner = model.get_submodule(path)
    if stored not in checkpoint.layers:
        return {}
    form, layer = checkpoint.layers[stored]
    shape = form.shape(layer)
    if len(shape) == 3 and is_experts(owner):
        parts = enumerate(_members(stored, name, shape[0]))
        return {member: (form, _expert(layer, expert)) for expert, member in parts}
    if len(shape) != 2 or not is_linear(owner) or parameter != "weight":
        return {}
    rows = rows_of(stored, shape, is_transposed(owner))
    if rows is None:
        return {}
    ordered = rows == list(range(shape[0]))
    return {name: (form if ordered else replace(form, read=partial(_in_order, form, rows)), layer)}


def _expert(layer: Layer, expert: int) -> Layer:
    """Return one matrix of a stack."""
    part = layer[""]
    assert isinstance(part, Stored)
    each = part.nbytes // part.shape[0]
    one = replace(part, shape=part.shape[1:], begin=part.begin + expert * each)
    return replace(layer, parts={"": one, **_factor(layer, expert)})


def _factor(layer: Layer, expert: int) -> dict[str, Stored]:
    """Return the part of a matrix of a stack that holds its factor, if there are any."""
    factors = layer.parts.get(SCALE)
    if not isinstance(factors, Stored):
        return {}
    chosen = min(expert, math.prod(factors.shape) - 1)  # one may serve all
    return {SCALE: replace(factors, shape=(1,), begin=factors.begin + 4 * chosen)}


class Rows:
    """Orders in which llama.cpp stores the rows of matrices, found once for the same layer of all blocks."""

    def __init__(self, processor: TensorProcessor) -> None:
        self.processor = processor
        self.known: dict[Any, list[int] | None] = {}

    def __call__(self, stored: str, shape: Sequence[int], transposed: bool) -> list[int] | None:
        """Return which stored row each row of a layer's matrix is; None if it is made of others' elements."""
        key = re.sub(r"\d+", "#", stored), tuple(shape), transposed
        if key not in self.known:
            self.known[key] = self._found(stored, shape, transposed)
        return self.known[key]

    def _found(self, stored: str, shape: Sequence[int], transposed: bool) -> list[int] | None:
        numbers = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
        found = _process(self.processor, numbers, stored)
        if found is numbers and not transposed:
            return list(range(shape[0]))
        matrix = found.T if transposed else found
        whole = matrix.shape == numbers.shape and bool((matrix == matrix[:, :1]).all())
        return matrix[:, 0].tolist() if whole else None


def _in_order(form: Format, rows: list[int], layer: Layer) -> QuantizedTensor:
    matrix = form.read(layer)
    with torch_together():
        return taken_rows(matrix, rows)  # type: ignore[arg-type]
