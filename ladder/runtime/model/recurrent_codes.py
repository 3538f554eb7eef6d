"""Weights of recurrent layers that are codes of 8 bits, as their kernel takes them; gates of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ladder.ir.recurrent import Recurrent
from ladder.lower.cpu.recurrent_codes import FOUR
from ladder.runtime.model.recurrent import by_gates
from ladder.runtime.onnx_ops.integers import SIGN, signed, whole_product
from ladder.runtime.onnx_ops.quantized import dynamic
from ladder.runtime.stored_codes import stays


@dataclass(frozen=True)
class Coded:
    """A layer's weights.

    matrices: Per direction what multiplies inputs: codes ``[inputs, gates * hidden]``, scale, zero point.
    bias: What is added to that, ``[directions * gates * padded]``.
    state: What multiplies the state: codes in words, their sums, zero points and scales, per column.
    """

    matrices: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    bias: torch.Tensor
    state: tuple[torch.Tensor, ...]


def packed_codes(form: Recurrent, given: Mapping[str, torch.Tensor]) -> Coded:
    """Return the weights of a layer as its kernel takes them."""
    count, width = len(form.backward), form.gates * form.hidden
    w, r, scale = given["w"], given["r"], given["r_s"].reshape(count, -1)
    bias = given["b"] if "b" in given else scale.new_zeros(count, 2 * width)
    matrices = tuple((w[at].clone(), given["w_s"][at], given["w_z"][at]) for at in range(count))
    for codes, _, _ in matrices:
        stays(codes)
    outer, inner = (by_gates(form, half) for half in bias.chunk(2, 1))
    shift = SIGN if r.dtype == torch.uint8 else 0
    zero = (given["r_z"].to(torch.int32) - shift).reshape(count, -1).expand(count, width)
    codes = signed(r.contiguous())
    sums = codes.sum(1, dtype=torch.int32) - zero * form.hidden
    factors = (by_gates(form, x).reshape(count, -1) for x in (sums, zero, scale.expand(count, width)))
    columns = by_gates(form, codes.transpose(1, 2)).reshape(count, -1, form.hidden)
    words = (
        F.pad(columns, (0, -form.hidden % FOUR)).reshape(count, columns.shape[1], -1, FOUR).transpose(1, 2)
    )
    whole = words.reshape(count, words.shape[1], -1)
    return Coded(matrices, (outer + inner).reshape(-1), (whole, *factors))


def gates_of_codes(form: Recurrent, made: Coded, x: torch.Tensor) -> torch.Tensor:
    """Return what inputs give to all gates: the inputs are rounded to codes by their range."""
    codes, scale, zero = dynamic(x.reshape(-1, x.shape[2]))
    parts = [
        whole_product(codes, w, zero, w_zero).float() * (scale * w_scale)
        for w, w_scale, w_zero in made.matrices
    ]
    found = torch.stack(parts, 1).reshape(len(codes), len(parts), form.gates, form.hidden)
    return F.pad(found, (0, form.padded - form.hidden)).flatten(1) + made.bias
