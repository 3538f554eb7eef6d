"""Write the files of quanto, as ``make_files.py`` does."""

from __future__ import annotations

import sys

import torch

from tests.formats.make_files import CASES, Case, K, N, main, weight


def quanto(name: str, dtype: torch.dtype, columns: int = K, *, shifted: bool = False) -> Case:
    """Give a linear layer that quanto froze, its values in the shape of its codes.

    shifted: Whether zero points are integers, as quanto's optimizers give them where that is asked for.
    """
    from optimum.quanto import MaxOptimizer, freeze, qtypes, quantize

    torch.manual_seed(3)
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(columns, N, dtype=dtype))
    model.layer.weight.data = weight(3, N, columns).to(dtype)
    quantize(model, weights=qtypes[name])
    if shifted:
        layer, optimizer = model.layer, MaxOptimizer()
        scale, shift = optimizer(
            layer.weight, qtype=qtypes[name], axis=0, group_size=layer.weight_group_size, zeropoint=True
        )
        layer.optimizer = lambda *args, **options: (scale, shift)
    freeze(model)
    codes = model.layer.weight._data
    values = model.layer.weight.dequantize().reshape(codes.shape)
    return dict(model.state_dict()), {"quant_method": "quanto"}, {"layer.weight": values}


if __name__ == "__main__":
    CASES.clear()
    CASES |= {
        "quanto_int8": lambda: quanto("qint8", torch.bfloat16),
        "quanto_fp8": lambda: quanto("qfloat8_e4m3fn", torch.float16),
        "quanto_fp8_e5m2": lambda: quanto("qfloat8_e5m2", torch.float32),
        "quanto_int4": lambda: quanto("qint4", torch.bfloat16, 2 * K),
        "quanto_int4_shifted": lambda: quanto("qint4", torch.float16, 2 * K, shifted=True),
        "quanto_int2": lambda: quanto("qint2", torch.float32, 2 * K),
        "quanto_int4_rows": lambda: quanto("qint4", torch.bfloat16, 33),
    }
    main(sys.argv[1:])
