"""Write the files of Gemma, and of Quark's 4-bit floats, as ``make_files.py`` does."""

from __future__ import annotations

import sys

import torch

from tests.formats.make_files import CASES, Case, K, N, main


def quark_fp4(scales: str) -> Case:
    """AMDFP4 and NVFP4: each code of scales, and what Quark makes of both."""
    from quark.torch.kernel.float8_e5m3.reference import reference_dequantize_float8_e5m3
    from quark.torch.utils.pack import create_pack_method

    pack, generator = create_pack_method("per_group", "fp4"), torch.Generator().manual_seed(8)
    packed = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    octets = (torch.arange(N * K // 16) % (255 if scales == "e5m3" else 127)).view(N, -1).to(torch.uint8)
    told = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1, "scale_format": scales}
    factor, beside, weight = torch.tensor(0.7), {}, [told]
    if scales == "e5m3":
        stored, values, weight = octets, reference_dequantize_float8_e5m3(octets), told
    else:
        stored, beside = octets.view(torch.float8_e4m3fn), {"layer.weight_scale_2": factor}
        weight.append({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True})
        values = stored.float() * factor
    arrays = {"layer.weight": packed, "layer.weight_scale": stored, **beside}
    own = pack.unpack(packed, True).float() * values.repeat_interleave(16, 1)
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    return arrays, config, {"layer.weight": own}


def quark_int4_fp8() -> Case:
    """Integers by rows that stand for fp8 codes, and what Quark's own layer makes of them."""
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, Int4PerChannelSpec

    outer = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
    inner = Int4PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    ).to_quantization_spec()
    quantizer = get_real_quantizer(
        [outer, inner], None, True, True, torch.float32, torch.device("cpu"), [(), (N,)], [(), (N,)]
    )
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(-(2**31), 2**31, (N, K // 8), generator=generator).to(torch.int32)
    first, second = torch.tensor(0.0007), torch.rand(N, generator=generator) * 50 + 10
    quantizer[0].scale, quantizer[1].scale = first, second
    quantizer[0].zero_point = None
    quantizer[1].zero_point = torch.zeros(N // 8, dtype=torch.int32)
    own = quantizer(codes)
    arrays = {"weight": codes, "weight_scale": first, "weight_scale_2": second}
    arrays["weight_zero_point_2"] = quantizer[1].zero_point
    config = {"quant_method": "quark", "global_quant_config": {"weight": [outer.to_dict(), inner.to_dict()]}}
    return {f"layer.{name}": array for name, array in arrays.items()}, config, {"layer.weight": own}


def gemma() -> Case:
    """Layers and a table as transformers has them; the configuration alone tells the bits of each."""
    from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear

    generator, arrays, own = torch.Generator().manual_seed(17), {}, {}
    patterns = {r"blocks\.\d+\.(q|k)$": {"num_bits": 8}, "^table$|up": {"num_bits": 2}, "down": {}}
    table = QuantizedEmbedding(N, K, torch.float32, num_bits=2)
    table.embedding_scale = torch.nn.Parameter(torch.ones(N, 4))
    widths = {"blocks.0.q": 8, "blocks.0.up": 2, "blocks.0.down": 4}
    for name, bits in [*widths.items(), ("table", 2)]:
        layer = QuantizedLinear(K, N, num_bits=bits) if name in widths else table
        for part, value in layer.state_dict().items():
            scales = value.is_floating_point()
            random = torch.rand(value.shape, generator=generator) if scales else None
            octets = torch.randint(0, 256, value.shape, generator=generator, dtype=torch.uint8)
            arrays[f"{name}.{part}"] = octets.view(value.dtype) if random is None else random
        layer.load_state_dict({part: arrays[f"{name}.{part}"] for part in layer.state_dict()})
        own[f"{name}.weight"] = layer.weight if layer is table else layer._dequantize_weights()
    return arrays, {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": patterns}, own


if __name__ == "__main__":
    CASES.clear()
    CASES |= {
        "gemma": gemma,
        "quark_int4_fp8": quark_int4_fp8,
        "quark_amdfp4": lambda: quark_fp4("e5m3"),
        "quark_nvfp4": lambda: quark_fp4("float32"),
    }
    main(sys.argv[1:])
