"""Layers of checkpoints as engines' loaders meet them: names and arrays of each form that Ladder serves."""

from __future__ import annotations

from typing import Any

import torch

import ladder

K, GROUP = 256, 32
QKV = {"q": 128, "k": 64, "v": 64}
TYPES = {
    "int4": {"group_size": GROUP},
    "int8": {},
    "nf4": {"group_size": GROUP},
    "mxfp4": {},
    "uint3": {"group_size": 40, "zero": "integer"},
}


def stored(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return the arrays that a state dict of `ladder.Linear` has, by the rest of their names."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight
    found = ladder.Linear.from_linear(layer, name, **TYPES[name]).state_dict()
    return {f".{key}": value for key, value in found.items()}


def gptq(weight: torch.Tensor, bits: int, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return random codes in GPTQ's layout, version 2."""
    n, k = weight.shape
    index = torch.arange(k) // GROUP if order is None else order
    codes = torch.randint(0, 1 << bits, (k, n))
    points = torch.randint(0, 1 << bits, (k // GROUP, n))

    def words(values: torch.Tensor) -> torch.Tensor:
        bits_of = (values[..., None] >> torch.arange(bits)) & 1
        flat = bits_of.flatten(-2).unflatten(-1, (-1, 32))
        return (flat << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)

    scales = torch.rand(k // GROUP, n).half() + 0.5
    arrays = {".qweight": words(codes.T.contiguous()).T, ".qzeros": words(points), ".scales": scales}
    return arrays | {".g_idx": index.to(torch.int32)}


def forms() -> dict[str, tuple[Any, Any]]:
    """Return, by name, a configuration and what makes the arrays of a weight."""
    made: dict[str, tuple[Any, Any]] = {}
    for name, options in TYPES.items():
        made[f"stored {name}"] = {"weight": name, **options}, lambda weight, name=name: stored(weight, name)
    for name in ("int4", "nf4", "mxfp4"):
        made[f"online {name}"] = (
            {"weight": name, "online": True, **TYPES[name]},
            lambda weight: {".weight": weight},
        )
    ordered = torch.randperm(K) // GROUP
    for bits in (2, 3, 4, 8):
        fields = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": "gptq_v2"}
        made[f"gptq {bits}"] = fields, lambda weight, bits=bits: gptq(weight, bits, None)
        fields = {**fields, "desc_act": True}
        made[f"gptq {bits} desc_act"] = fields, lambda weight, bits=bits: gptq(weight, bits, ordered)
    return made


def sizes(ranks: int) -> list[int]:
    """Return rows of queries, keys and values over all ranks: four have each of two key heads twice."""
    return [128, 32 * max(2, ranks), 32 * max(2, ranks)]


def once(part: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return each key head once."""
    if ranks <= 2:
        return part
    heads = part.unflatten(0, (2, ranks // 2, 32))
    assert torch.equal(heads[:, 0], heads[:, 1])
    return heads[:, 0].flatten(0, 1)
