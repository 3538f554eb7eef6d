"""Write the small checkpoints of ``files/`` with the formats' own tools, and the digests of their own values.

Run in an environment of its own, which needs gguf, compressed-tensors, bitsandbytes, torchao, hqq, autoawq,
gptqmodel, mlx-cpu, nvidia-modelopt, amd-quark and comfy-kitchen; the tests need none of them:

    python tests/formats/make_files.py [name ...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "files"
N, K, GROUP = 32, 128, 32

Case = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]
"""Arrays, the configuration, and the tool's own values by name of the tensor."""


def digest(values: torch.Tensor) -> str:
    """Return the digest of a tensor's bits; ``tests/formats/test_files.py`` computes the same."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def weight(seed: int, n: int = N, k: int = K) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1


def gptq(bits: int, *, version: str = "gptq_v2", desc_act: bool = False, sym: bool = True) -> Case:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.backend import BACKEND

    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight(bits)
    groups = K // GROUP
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1)) if desc_act else torch.arange(K)
    g_idx = torch.empty(K, dtype=torch.int32)
    g_idx[order] = (torch.arange(K) // GROUP).to(torch.int32)
    scale, zero = torch.empty(N, groups), torch.empty(N, groups)
    for group in range(groups):
        part = linear.weight.data[:, g_idx == group]
        top = 2**bits - 1
        if sym:
            scale[:, group], zero[:, group] = part.abs().amax(1) * 2 / top, 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, group] = (high - low) / top
            zero[:, group] = (-low / scale[:, group]).round().clamp(1, top)
    planar = version == "gptq_p" or bits in (5, 6, 7)
    layer = TorchLinear(
        bits=bits, group_size=GROUP, desc_act=desc_act, sym=sym, in_features=K, out_features=N, bias=False,
        pack_dtype=torch.int32, backend=BACKEND.TORCH, adapter=None, register_buffers=True,
        format=FORMAT.GPTQ_P if planar else FORMAT.GPTQ_V2,
    )  # fmt: skip
    linear.half()
    layer.pack_original(linear, scale.half(), zero, g_idx)
    layer.post_init()
    values = layer.dequantize_weight().t().contiguous()
    arrays = {f"layer.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    if version == "gptq":
        from gptqmodel.utils.model_dequant import _revert_gptq_v1_qzeros_correction as first

        arrays["layer.qzeros"] = first(layer.qzeros, bits)
    arrays["layer.g_idx"] = g_idx
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    return arrays, {**config, "desc_act": desc_act, "sym": sym}, {"layer.weight": values}


def autoround(bits: int, packing: str) -> Case:
    if packing == "auto_round":
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    linear = torch.nn.Linear(K, N, bias=False)
    tiles = weight(bits).view(N, -1, GROUP)
    low, high = tiles.amin(-1), tiles.amax(-1)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (tiles / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    linear.weight.data = ((codes - zero[..., None]) * scale[..., None]).view(N, K).float()
    layer = QuantLinear(bits, GROUP, K, N, bias=False)
    layer.device = torch.device("cpu")
    layer.pack(linear, scale.float(), zero.clone(), None, device="cpu")
    layer.post_init()
    values = layer(torch.eye(K).half()).t().contiguous()
    arrays = {f"layer.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "packing_format": packing}
    return arrays, config, {"layer.weight": values}


def awq(kind: str) -> Case:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    group = 64
    linear = torch.nn.Linear(K, N, bias=False).half()
    values = weight(7).view(N, -1, group)
    low, high = values.amin(-1), values.amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (values / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    linear.weight.data = ((codes - zero[..., None]) * scale[..., None]).view(N, K).half()
    gemm = WQLinear_GEMM.from_linear(
        linear, 4, group, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
    )
    own = dequantize_gemm(gemm.qweight, gemm.qzeros, gemm.scales, 4, group).t().contiguous()
    layer = gemm
    if kind == "gemv":
        layer = WQLinear_GEMV.from_linear(linear, 4, group, scales=scale, zeros=zero)
    arrays = {f"layer.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": kind, "zero_point": True}
    return arrays, config, {"layer.weight": own}


def compressed(name: str, **options: Any) -> Case:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    values, state = weight(11).bfloat16(), {}
    size = arguments.group_size or K
    if options.get("strategy") == "block":
        high, wide = options["block_structure"]
        tiles = values.view(N // high, high, K // wide, wide)
        low, top = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        tiles = values.view(N, -1, size)
        low, top = tiles.amin(-1), tiles.amax(-1)
    if options.get("strategy") == "tensor":
        low, top = values.min().reshape(1), values.max().reshape(1)
    if options.get("strategy") == "tensor_group":
        state["weight_global_scale"] = generate_gparam(values.min(), values.max())
    scale, zero = calculate_qparams(low, top, arguments, global_scale=state.get("weight_global_scale"))
    state |= {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(dict(state), scheme)
    own = compressor.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
        },
    }
    arrays = {f"layer.{key}": value for key, value in stored.items()}
    return arrays, config, {"layer.weight": own}


def bitsandbytes(
    kind: str, *, nested: bool = False, n: int = N, k: int = K, dtype: torch.dtype = torch.float32
) -> Case:
    import bitsandbytes.functional as functional

    values = weight(13, n, k).to(dtype)
    codes, state = functional.quantize_4bit(values, quant_type=kind, blocksize=64, compress_statistics=nested)
    own = functional.dequantize_4bit(codes, state)
    if k % 64:  # the compiled CPU kernel of 0.50 takes wrong scales for blocks that cross rows
        from bitsandbytes.backends.default import ops

        plain = getattr(ops._dequantize_4bit_compute, "__wrapped__", ops._dequantize_4bit_compute)
        own = plain(codes.reshape(-1), state.absmax, state.code, 64, (n, k), torch.float32)
    arrays = {"layer.weight": codes}
    arrays |= {f"layer.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return arrays, {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"layer.weight": own}


def bitsandbytes_int8() -> Case:
    import bitsandbytes.functional as functional

    codes, scale, _ = functional.int8_vectorwise_quant(weight(17).half())
    own = functional.int8_vectorwise_dequant(codes, scale)
    arrays = {
        "layer.weight": codes,
        "layer.SCB": scale,
        "layer.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return arrays, {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"layer.weight": own}


def gpt_oss() -> Case:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(19)
    blocks = torch.randint(0, 256, (2, N, K // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, N, K // 32), generator=random, dtype=torch.uint8)
    own = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).contiguous()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    arrays = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(2, N)}
    return arrays, {"quant_method": "mxfp4"}, {name: own}


def modelopt(size: int = 16) -> Case:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    quantized, scale, total = NVFP4QTensor.quantize(weight(23), size)
    own = quantized.dequantize(torch.float32, scale=scale, double_scale=total, block_sizes={-1: size})
    arrays = {
        "layer.weight": quantized._quantized_data,
        "layer.weight_scale": scale,
        "layer.weight_scale_2": total,
    }
    return arrays, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"layer.weight": own}


def modelopt_mxfp4() -> Case:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    quantized, scale = MXFP4QTensor.quantize(weight(24), 32)
    own = quantized.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    arrays = {"layer.weight": quantized._quantized_data, "layer.weight_scale": scale.reshape(N, K // 32)}
    return arrays, {"quant_method": "modelopt", "quant_algo": "mxfp4"}, {"layer.weight": own}


def modelopt_int4() -> Case:
    """What ModelOpt packs; it has no function that reads it back."""
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    values = weight(25)
    scale = values.view(N, K // GROUP, GROUP).abs().amax(2) / 7
    codes = (values / scale.repeat_interleave(GROUP, 1)).round().clamp(-8, 7).to(torch.int8)
    arrays = {"layer.weight": pack_int4_in_uint8(values, scale, GROUP), "layer.weight_scale": scale}
    own = codes * scale.repeat_interleave(GROUP, 1)
    return arrays, {"quant_method": "modelopt", "quant_algo": "W4A16"}, {"layer.weight": own}


def quark(dtype: str, scheme: str = "per_group", *, reorder: bool = True) -> Case:
    """What Quark packs: signed and unsigned integers, columns before rows where they are in groups."""
    from quark.torch.utils.pack import create_pack_method

    pack, bits, groups = create_pack_method(scheme, dtype), int(dtype[-1]), K // GROUP
    generator = torch.Generator().manual_seed(bits)
    low = 0 if dtype.startswith("u") else -(1 << (bits - 1))
    groups = groups if scheme == "per_group" else 1
    codes = torch.randint(low, low + (1 << bits), (N, K), generator=generator, dtype=torch.int32)
    zero = torch.randint(low, low + (1 << bits), (N, groups), generator=generator, dtype=torch.int32)
    scale = torch.rand(N, groups, generator=generator).bfloat16()
    own = codes.float() - zero.float().repeat_interleave(K // groups, 1)
    own = own * scale.float().repeat_interleave(K // groups, 1)  # Quark's dequantize_int_per_group_affine
    rows = scale.t() if scheme == "per_group" else scale[:, 0]
    points = pack.pack(zero if scheme == "per_group" else zero[:, 0], reorder)
    arrays = {"layer.weight": pack.pack(codes, reorder), "layer.weight_scale": rows}
    config = quark_config(dtype, scheme, reorder)
    return {**arrays, "layer.weight_zero_point": points}, config, {"layer.weight": own}


def quark_config(dtype: str, scheme: str, reorder: bool = True) -> dict[str, Any]:
    size = GROUP if scheme == "per_group" else None
    told = {"dtype": dtype, "qscheme": scheme, "group_size": size, "ch_axis": -1 if size else 0}
    export = {"pack_method": "reorder" if reorder else "order", "weight_format": "real_quantized"}
    return {"quant_method": "quark", "global_quant_config": {"weight": told}, "export": export}


def quark_mxfp6(dtype: str) -> Case:
    from quark.torch.utils.pack import create_pack_method

    pack, generator = create_pack_method("per_group", dtype), torch.Generator().manual_seed(6)
    packed = torch.randint(0, 256, (N, K * 3 // 4), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 130, (N, K // 32), generator=generator, dtype=torch.uint8)
    scale = 2.0 ** (exponents.int() - 127).float()  # Quark's unpack_params
    arrays = {"layer.weight": packed, "layer.weight_scale": exponents}
    own = pack.unpack(packed, True) * scale.repeat_interleave(32, 1)
    return arrays, quark_config(dtype, "per_group"), {"layer.weight": own}


def fp8_blocks(kind: Any = torch.float32) -> Case:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    high, wide = 16, 64
    tiles = weight(29).view(N // high, high, K // wide, wide)
    scale = tiles.abs().amax((1, 3)) / 448
    if kind != torch.float32:
        scale = torch.exp2(torch.log2(scale).ceil())
    codes = (tiles / scale[:, None, :, None]).reshape(N, K).to(torch.float8_e4m3fn)
    scale = scale.to(kind)
    own = Fp8Dequantize._dequantize_one(Fp8Dequantize(None), codes, scale, torch.float32)
    arrays = {"layer.weight": codes, "layer.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    return arrays, config, {"layer.weight": own}


def fp8_exponents(pairs: bool) -> Case:
    """MXFP8, whose exponents are bytes, and DeepSeek-V4's fp4 of experts, two codes a byte."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random = torch.Generator().manual_seed(61)
    octets = torch.randint(0, 0x78, (N, K // 2 if pairs else K), generator=random, dtype=torch.uint8)
    codes = octets.view(torch.int8 if pairs else torch.float8_e4m3fn)
    scale = torch.randint(110, 130, (N, K // 32), generator=random, dtype=torch.uint8)
    own = Fp8Dequantize._dequantize_one(Fp8Dequantize(None), codes, scale, torch.float32)
    if pairs:
        arrays = {"layer.weight": codes, "layer.scale": scale.view(torch.float8_e8m0fnu)}
        return arrays, {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"layer.weight": own}
    arrays = {"layer.weight": codes, "layer.weight_scale_inv": scale}
    return arrays, {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, {"layer.weight": own}


def gptqmodel_fp8(method: str, kind: str = "float8_e4m3fn", block: tuple[int, int] | None = None) -> Case:
    """What GPTQModel stores: scales divide; its products multiply by their reciprocals."""
    from gptqmodel.nn_modules.qlinear.fp8 import quantize_fp8_weight
    from gptqmodel.quantization.config import FP8Config

    options = {"weight_scale_method": method, "weight_block_size": block}
    codes, scale = quantize_fp8_weight(weight(41), format=kind, **options)
    high, wide = block or (1, 1)
    factors = scale.reciprocal().reshape(-1, 1) if block is None else scale.reciprocal()
    own = codes.float() * factors.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    arrays = {"layer.weight": codes, "layer.weight_scale_inv": scale}
    config = FP8Config(format=kind, **options).to_dict()
    return arrays, {key: config[key] for key in config if key != "meta"}, {"layer.weight": own}


def hqq(bits: float, *, axis: int = 1, dtype: Any = torch.float16) -> Case:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight(31)
    options = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    layer = HQQLinear(linear, options, compute_dtype=dtype, device="cpu")
    state = {f"layer.{name}": value for name, value in layer.state_dict().items() if value is not None}
    return state, {"quant_method": "hqq"}, {"layer.weight": layer.dequantize()}


def mlx(bits: int = 4, dtype: Any = torch.float16, mode: str = "affine", experts: int = 0) -> Case:
    import mlx.core as mx

    values = mx.array(weight(53, N * max(experts, 1)).numpy()).astype(getattr(mx, str(dtype)[6:]))
    config = {"group_size": 64, "bits": bits} if mode == "affine" else {"mode": mode}
    stored = mx.quantize(values, **config)
    own = torch.from_numpy(np.array(mx.dequantize(*stored, **config).astype(mx.float32)))
    kinds = (torch.uint32, dtype, dtype) if mode == "affine" else (torch.uint32, torch.uint8)
    arrays = {}
    for name, array, kind in zip(("weight", "scales", "biases"), stored, kinds, strict=False):
        wide = array.astype(mx.float32) if kind in (torch.float16, torch.bfloat16) else array
        part = torch.from_numpy(np.array(wide)).to(kind)
        arrays[f"layer.{name}"] = part.view(experts, N, -1) if experts else part
    own = own.to(dtype if mode == "affine" else torch.bfloat16)
    return arrays, config, {"layer.weight": own.view(experts, N, K) if experts else own}


def bitnet(kind: str) -> Case:
    """What transformers packs; its layers multiply by codes and divide or multiply by the scale after."""
    from transformers.integrations.bitnet import pack_weights

    codes = weight(59).mul(10).round().clamp(-1, 1).to(torch.int8)
    scale = torch.tensor([4.0 if kind == "bitlinear" else 0.25], dtype=torch.bfloat16)
    arrays = {"layer.weight": pack_weights(codes.clone()), "layer.weight_scale": scale}
    config = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    return arrays, config, {"layer.weight": codes * 0.25}


def comfy(form: str, n: int = N, k: int = K, **options: Any) -> Case:
    """What ComfyUI stores: the arrays of comfy-kitchen's layouts, and a text beside them."""
    from comfy_kitchen import tensor as layouts

    layout = {
        "float8_e4m3fn": layouts.TensorCoreFP8Layout,
        "int8_tensorwise": layouts.TensorWiseINT8Layout,
        "mxfp8": layouts.TensorCoreMXFP8Layout,
        "nvfp4": layouts.TensorCoreNVFP4Layout,
    }[form]
    codes, numbers = layout.quantize(weight(67, n, k), **options)
    own = layout.dequantize(codes, numbers)
    stored = layout.state_dict_tensors(codes, numbers)
    text = list(json.dumps({"format": form}).encode())
    arrays = {f"layer.weight{suffix}": value for suffix, value in stored.items()}
    return arrays | {"layer.comfy_quant": torch.tensor(text, dtype=torch.uint8)}, {}, {"layer.weight": own}


def torchao(kind: str) -> Case:
    import torchao.quantization as q
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    values = weight(37).bfloat16()
    if kind.startswith("mx"):
        element = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[kind.partition("_")[0]]
        tensor = MXTensor.to_mx(values, element, 32, is_swizzled_scales=kind.endswith("swizzled"))
    elif kind.startswith("nvfp4"):
        total = values.abs().max().float() / (448 * 6)
        tensor = NVFP4Tensor.to_nvfp4(
            values, per_tensor_scale=total, is_swizzled_scales=kind.endswith("swizzled")
        )
    else:
        options = {
            "int8": lambda: q.Int8WeightOnlyConfig(version=2),
            "int4": lambda: q.IntxWeightOnlyConfig(torch.int4, granularity=q.PerGroup(32), version=2),
            "int3": lambda: q.IntxWeightOnlyConfig(
                torch.int3, granularity=q.PerGroup(32), mapping_type=q.MappingType.ASYMMETRIC, version=2
            ),
            "float8": lambda: q.Float8WeightOnlyConfig(version=2),
        }[kind]()
        linear = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        linear.weight.data = values
        q.quantize_(linear, options)
        tensor = linear.weight.data
    own = tensor.dequantize()
    arrays, metadata = flatten_tensor_state_dict({"layer.weight": tensor})
    return arrays, {"metadata": metadata}, {"layer.weight": own}


def gguf_files() -> None:
    """Write every type of blocks that the package decodes, and big-endian those that it can convert."""
    import subprocess

    from ladder.formats.gguf_blocks import BLOCKS

    gguf_file("all.gguf", BLOCKS)
    gguf_file("big_endian.gguf", (2, 8, 12, 14, 39, 40))  # digests: before the conversion
    command = sys.executable, "-m", "gguf.scripts.gguf_convert_endian", HERE / "big_endian.gguf", "big"
    subprocess.run(command, input=b"YES\n", check=True)


def gguf_file(file: str, numbers: Iterable[int]) -> None:
    """Write types of blocks from random bytes with moderate scales."""
    import gguf
    from gguf import GGMLQuantizationType as Type
    from gguf import quants

    from ladder.formats.gguf_blocks import BLOCKS

    random = np.random.default_rng(41)
    writer, expected = gguf.GGUFWriter(HERE / file, "llama"), {}
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("plain", np.arange(8, dtype=np.float32))
    for number in numbers:
        row = BLOCKS[number]
        if number not in list(Type) or Type(number) not in quants._type_traits:
            continue
        octets = random.integers(0, 256, (2, 512 // row.elements * row.nbytes), dtype=np.uint8)
        blocks = octets.reshape(-1).view(row.fields)
        for name in ("d", "m", "dmin", "s"):
            if name in blocks.dtype.names and blocks[name].dtype.kind == "f":
                blocks[name] = random.standard_normal(blocks[name].shape) * 0.1
        if row.name == "nvfp4":
            blocks["d"] &= 127
        if row.name == "mxfp4":
            blocks["e"] = random.integers(100, 130, blocks["e"].shape)
        if row.name == "iq1_m":
            half = (random.standard_normal(len(blocks)) * 0.1).astype(np.float16).view(np.uint16)
            for part in range(4):
                blocks["scales"][:, part] = blocks["scales"][:, part] & 0xFFF | (half >> 4 * part & 15) << 12
        writer.add_tensor(row.name, octets, raw_dtype=Type(number))
        expected[row.name] = digest(torch.from_numpy(quants.dequantize(octets, Type(number))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    record(file, expected, {})


INT = {"type": "int", "strategy": "group", "group_size": GROUP}
CASES: dict[str, Callable[[], Case]] = {
    **{
        f"gptq_v1_{bits}bit": lambda bits=bits: gptq(bits, version="gptq", sym=False)
        for bits in (2, 3, 4, 8)
    },
    **{f"gptq_v2_{bits}bit": lambda bits=bits: gptq(bits) for bits in (2, 3, 4, 8)},
    "gptq_desc_act": lambda: gptq(4, desc_act=True, sym=False),
    "gptq_desc_act_3bit": lambda: gptq(3, desc_act=True),
    **{f"gptq_planar_{bits}bit": lambda bits=bits: gptq(bits, version="gptq_p") for bits in (3, 5, 6, 7)},
    **{
        f"autoround_{bits}bit{end}": lambda bits=bits, form=form: autoround(bits, form)
        for bits in (2, 3, 4, 6)
        for end, form in (("", "auto_round"), ("_gptq", "auto_round:auto_gptq"))
    },
    **{f"quark_{kind}": lambda kind=kind: quark(kind) for kind in ("int4", "uint4", "int8")},
    "quark_uint4_ordered": lambda: quark("uint4", reorder=False),
    "quark_int4_channel": lambda: quark("int4", "per_channel"),
    **{f"quark_{kind}": lambda kind=kind: quark_mxfp6(kind) for kind in ("fp6_e2m3", "fp6_e3m2")},
    "awq_gemm": lambda: awq("gemm"),
    "awq_gemv": lambda: awq("gemv"),
    **{
        f"ct_pack_{bits}bit": lambda bits=bits: compressed("pack-quantized", num_bits=bits, **INT)
        for bits in (2, 3, 4, 5, 8)
    },
    "ct_pack_asym": lambda: compressed("pack-quantized", num_bits=4, symmetric=False, **INT),
    "ct_pack_asym_tensor": lambda: compressed(
        "pack-quantized", num_bits=4, type="int", strategy="tensor", symmetric=False
    ),
    "ct_int8_channel": lambda: compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct_int8_asym": lambda: compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "ct_fp8_tensor": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct_fp8_channel": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct_fp8_block": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 64]
    ),
    **{
        f"ct_mxfp{bits}": lambda bits=bits, form=form: compressed(
            form, num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        )
        for bits, form in ((4, "mxfp4-pack-quantized"), (6, "mxfp6-pack-quantized"), (8, "mxfp8-quantized"))
    },
    "ct_nvfp4": lambda: compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
    "bnb_nf4": lambda: bitsandbytes("nf4"),
    "bnb_fp4": lambda: bitsandbytes("fp4"),
    "bnb_nf4_nested": lambda: bitsandbytes("nf4", nested=True, n=64, k=512),
    "bnb_nf4_across_rows": lambda: bitsandbytes("nf4", n=10, k=48),
    "bnb_nf4_odd": lambda: bitsandbytes("nf4", n=6, k=33),
    "bnb_nf4_bfloat16": lambda: bitsandbytes("nf4", nested=True, dtype=torch.bfloat16),
    "bnb_int8": bitsandbytes_int8,
    "gpt_oss": gpt_oss,
    "modelopt_nvfp4": modelopt,
    "modelopt_nvfp4_32": lambda: modelopt(32),
    "modelopt_mxfp4": modelopt_mxfp4,
    "modelopt_int4": modelopt_int4,
    "gptqmodel_fp8_row": lambda: gptqmodel_fp8("row"),
    "gptqmodel_fp8_tensor": lambda: gptqmodel_fp8("tensor", "float8_e5m2"),
    "gptqmodel_fp8_block": lambda: gptqmodel_fp8("block", block=(16, 64)),
    "fp8_blocks": fp8_blocks,
    "fp8_blocks_bytes": lambda: fp8_exponents(False),
    "fp8_blocks_fp4": lambda: fp8_exponents(True),
    "fp8_blocks_e8m0": lambda: fp8_blocks(torch.float8_e8m0fnu),
    **{f"hqq_{bits}bit": lambda bits=bits: hqq(bits) for bits in (1, 2, 3, 4, 5, 6, 8)},
    "hqq_ternary": lambda: hqq(1.58),
    "hqq_bfloat16": lambda: hqq(4, dtype=torch.bfloat16),
    "hqq_axis0": lambda: hqq(4, axis=0),
    **{f"mlx_{bits}bit": lambda bits=bits: mlx(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx_bfloat16": lambda: mlx(4, torch.bfloat16),
    "mlx_experts": lambda: mlx(4, experts=2),
    **{f"mlx_{mode}": lambda mode=mode: mlx(mode=mode) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    **{f"bitnet_{kind}": lambda kind=kind: bitnet(kind) for kind in ("bitlinear", "autobitlinear")},
    "comfy_fp8": lambda: comfy("float8_e4m3fn"),
    "comfy_int8": lambda: comfy("int8_tensorwise"),
    "comfy_int8_rows": lambda: comfy("int8_tensorwise", per_channel=True),
    "comfy_mxfp8": lambda: comfy("mxfp8", 40, 96),
    "comfy_nvfp4": lambda: comfy("nvfp4", 128, 64),
    "comfy_nvfp4_padded": lambda: comfy("nvfp4", 30, 70),
    **{
        f"torchao_{kind}": lambda kind=kind: torchao(kind)
        for kind in (
            "int8", "int4", "int3", "float8", "mxfp8", "mxfp4", "mxfp4_swizzled", "nvfp4", "nvfp4_swizzled",
        )
    },
}  # fmt: skip
"""Name of a file -> what makes it."""


def record(name: str, expected: dict[str, str], config: dict[str, Any], dtype: str = "") -> None:
    path = HERE / "expected.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {"config": config, "sha256": expected, "dtype": dtype}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(names: list[str]) -> None:
    HERE.mkdir(exist_ok=True)
    if not names or "gguf" in names:
        gguf_files()
    for name, make in CASES.items():
        if names and not any(wanted in name for wanted in names):
            continue
        try:
            arrays, config, own = make()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        metadata = config.pop("metadata", None)
        save_file(
            {key: value.detach().contiguous() for key, value in arrays.items()},
            HERE / f"{name}.safetensors",
            metadata=metadata,
        )
        dtype = str(next(iter(own.values())).dtype).removeprefix("torch.")
        expected = {key: digest(value.detach()) for key, value in own.items()}
        record(f"{name}.safetensors", expected, config, dtype)
        print(f"{name}: {sum(value.nbytes for value in arrays.values())} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
