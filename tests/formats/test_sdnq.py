"""SDNQ's files, altered: what is not read, and what contradicts the configuration, is one error by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder
from tests.formats.test_damage import EXPECTED, FILES, load_all, replaced, without

ALTERED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], dict[str, object], str]] = {
    "zero points missing": ("sdnq_uint4", without("layer.zero_point"), {}, "zero points of uint4"),
    "zero points of one": ("sdnq_uint4", replaced("layer.zero_point", lambda x: x[:1]), {}, "another shape"),
    "scales of other rows": ("sdnq_int8", replaced("layer.scale", lambda x: x[:7]), {}, "for 32 rows"),
    "half of the codes": (
        "sdnq_uint3",
        replaced("layer.weight", lambda x: x[:-1]),
        {},
        "no 32 rows of 3 bits",
    ),
    "codes of another type": (
        "sdnq_int5",
        replaced("layer.weight", lambda x: x.char()),
        {},
        "weight is int8",
    ),
    "another width": (
        "sdnq_uint4",
        lambda arrays: None,
        {"weights_dtype": "float4_e2m1fn"},
        "'float4_e2m1fn'",
    ),
    "widths by patterns": (
        "sdnq_uint4",
        lambda arrays: None,
        {"modules_dtype_dict": {"minimum_6bit": ["layer"]}},
        "types that are not read",
    ),
    "a branch": ("sdnq_int8", lambda arrays: None, {"use_svd": True}, "branch of low rank"),
    "rotated": ("sdnq_int8", lambda arrays: None, {"use_hadamard": True}, "inputs rotated"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_sdnq_does_not_mean_is_refused(what: str, tmp_path: Path) -> None:
    name, change, stated, word = ALTERED[what]
    arrays = load_file(FILES / f"{name}.safetensors")
    change(arrays)
    save_file({key: value.contiguous() for key, value in arrays.items()}, tmp_path / "model.safetensors")
    config = EXPECTED[f"{name}.safetensors"]["config"] | stated
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ladder.CheckpointError, match=word):
        load_all(tmp_path)
