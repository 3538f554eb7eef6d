"""Write the files of SDNQ, as ``make_files.py`` does."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.formats.make_files import CASES, Case, K, N, main, weight

KINDS = ("int8", "uint8", "float8_e4m3fn", *(f"uint{bits}" for bits in range(2, 8)), "int3", "int5")
SAID = (
    *("quant_method", "weights_dtype", "group_size", "use_quantized_matmul", "use_svd", "svd_rank"),
    *("use_hadamard", "hadamard_group_size", "modules_dtype_dict", "modules_quant_config"),
)
"""Fields of the configuration that are kept."""


def sdnq(kind: str, **given: Any) -> Case:
    """Give a linear layer that SDNQ quantized."""
    from sdnq import sdnq_post_load_quant

    torch.manual_seed(3)
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(K, N))
    model.layer.weight.data = weight(3, N, K)
    model = sdnq_post_load_quant(model, weights_dtype=kind, minimum_allowed_numel=1, **given)
    layer, config = model.layer, model.quantization_config.to_dict()
    values = layer.sdnq_dequantizer(
        layer.weight,
        layer.scale,
        zero_point=getattr(layer, "zero_point", None),
        skip_quantized_matmul=layer.sdnq_dequantizer.use_quantized_matmul,
    )
    return dict(model.state_dict()), {key: config[key] for key in SAID}, {"layer.weight": values}


if __name__ == "__main__":
    CASES.clear()
    CASES |= {f"sdnq_{kind}": lambda kind=kind: sdnq(kind) for kind in KINDS}
    CASES |= {
        "sdnq_int8_turned": lambda: sdnq("int8", use_quantized_matmul=True),
        "sdnq_uint4_groups": lambda: sdnq("uint4", group_size=16),
    }
    main(sys.argv[1:])
