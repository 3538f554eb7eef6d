"""Write the files of GPTQModel's GGUF blocks and of its parts of bitsandbytes, as ``make_files.py`` does."""

from __future__ import annotations

import sys
from functools import partial

import torch

from tests.formats.make_files import CASES, Case, main, weight

ROWS, COLUMNS = 8, 512


def linear(dtype: torch.dtype) -> torch.nn.Linear:
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = weight(43, ROWS, COLUMNS)
    return layer.to(dtype)


def blocks(name: str) -> Case:
    """A layer in GGUF's blocks, and the tool's own way back."""
    from gptqmodel.nn_modules.qlinear.gguf import GGUFTorchLinear
    from gptqmodel.quantization.config import GGUFConfig

    config = GGUFConfig(bits=int(name[1]), format=name[0] + name[2:])
    layer = GGUFTorchLinear(name, -1, True, False, COLUMNS, ROWS)
    layer.pack_original(linear(torch.float32), None, None)
    stated = {key: config.to_dict()[key] for key in ("quant_method", "bits", "format", "checkpoint_format")}
    return {"layer.qweight": layer.qweight}, stated, {"layer.weight": layer.dequantize_weight().t()}


def statistics(kind: str, bits: int, nested: bool = False) -> Case:
    """A layer of bitsandbytes by GPTQModel's names, and the tool's own way back."""
    from gptqmodel.nn_modules.qlinear.bitsandbytes import BitsAndBytesLinear

    layer = BitsAndBytesLinear(
        bits, -1, True, False, COLUMNS, ROWS, dtype=torch.bfloat16, format=kind, block_size=64,
        compress_statistics=nested,
    )  # fmt: skip
    layer.pack_original(linear(torch.bfloat16), None, None)
    arrays = {f"layer.{name}": array for name, array in layer.state_dict().items()}
    config = {"quant_method": "bitsandbytes", "bits": bits, "format": kind}
    return arrays, config, {"layer.weight": layer.dequantize_weight()}


if __name__ == "__main__":
    CASES.clear()
    CASES |= {
        **{f"gptqmodel_{name}": partial(blocks, name) for name in ("q4_0", "q8_0", "q4_k_m", "q5_k", "q6_k")},
        "gptqmodel_nf4": partial(statistics, "nf4", 4),
        "gptqmodel_fp4": partial(statistics, "fp4", 4, True),
        "gptqmodel_int8": partial(statistics, "int8", 8),
    }
    main(sys.argv[1:])
