"""Write the files of gemv_fast, and of tinygemm's tiles (on a GPU), as ``make_files.py`` does."""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.formats.make_files import CASES, Case, main, weight


def awq_fast(name: str) -> Case:
    """GPTQModel's words of gemv_fast (and llm-awq), and its own way back, which it has for MLX."""
    from gptqmodel.nn_modules.qlinear.gemv_fast_awq import AwqGEMVFastLinear, LLMAwqLinear
    from gptqmodel.utils.mlx_packing import repack_awq_gemv_fast

    n, k, group = 24, 192, 64
    linear = torch.nn.Linear(k, n, bias=False).half()
    tiles = weight(9, n, k).view(n, -1, group)
    low, high = tiles.amin(-1), tiles.amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (tiles / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    linear.weight.data = ((codes - zero[..., None]) * scale[..., None]).view(n, k).half()
    kind = {"qzeros": AwqGEMVFastLinear, "scaled_zeros": LLMAwqLinear}[name]
    layer = kind(4, group, False, False, k, n)
    layer.pack(linear, scale, zero)
    parts = {part: getattr(layer, part) for part in ("qweight", name, "scales")}
    words, scales, zeros = repack_awq_gemv_fast(
        *(parts[part].numpy() for part in ("qweight", name, "scales")), k, n, group
    )
    found = (words[..., None] >> (4 * np.arange(8))) & 15
    factor, offset = (np.repeat(v.astype(np.float64), group, 1) for v in (scales, zeros))
    own = torch.from_numpy(found.reshape(n, k) * factor + offset).half()
    assert torch.equal(torch.from_numpy(found.reshape(n, k)), codes.view(n, k).long())
    config = {"quant_method": "awq", "version": "gemv_fast", "bits": 4, "group_size": group}
    return {f"layer.{part}": array for part, array in parts.items()}, config, {"layer.weight": own}


def torchao_tiles() -> Case:
    """What torchao packs by tinygemm (needs a GPU), and its product with the identity."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4TilePackedTo4dTensor

    n, k, group = 14, 200, 64  # which torchao pads
    rows, columns = 16, 1024
    random = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.int32)
    codes[n:], codes[:, k:] = 8, 8
    scale = (torch.rand(rows, columns // group, generator=random) * 0.1 + 0.01).bfloat16()
    zero = torch.randn(rows, columns // group, generator=random).bfloat16() * 0.3
    pair = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
    octets = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).cuda()
    words = torch.ops.aten._convert_weight_to_int4pack(octets, 8)
    one = torch.eye(columns, device="cuda", dtype=torch.bfloat16)
    own = torch.ops.aten._weight_int4pack_mm(one, words, group, pair.cuda()).t()[:n, :k].contiguous().cpu()
    tensor = Int4TilePackedTo4dTensor(words.cpu(), pair, [1, group], torch.Size([n, k]))
    arrays, metadata = flatten_tensor_state_dict({"layer.weight": tensor})
    return arrays, {"metadata": metadata}, {"layer.weight": own}


MADE = {
    "awq_gemv_fast": lambda: awq_fast("qzeros"),
    "awq_llm": lambda: awq_fast("scaled_zeros"),
    "torchao_tiles": torchao_tiles,
}

if __name__ == "__main__":
    CASES.update(MADE)
    main(sys.argv[1:] or list(MADE))
