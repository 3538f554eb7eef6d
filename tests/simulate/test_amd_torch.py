"""torch's operators on special values as the machine code of AMD GPUs: NaN is where eager torch has it."""

from __future__ import annotations

import copy
import os
from itertools import product

import pytest
import torch
from torch import nn

import ladder
from benchmarks import opinfo
from benchmarks.emulated import on_amd

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
OPERATORS = (
    *("clamp", "maximum", "minimum", "amin", "nn.functional.relu", "softmax"),
    *(
        "nn.functional.hardtanh",
        "lt",
        "le",
        "ge",
        "eq",
        "ne",
        "isnan",
        "nan_to_num",
        "where",
        "sign",
        "heaviside",
    ),
    *("logsumexp", "nn.functional.threshold", "pow", "floor"),
)
"""In which NaN is lost most easily."""

EVERY_DAY = 5
DAY = int(os.environ["LADDER_TEST_DAY"])


def check(name: str, dtype: str, architecture: str, most: int) -> None:
    """Compare samples of an operator with eager torch; its kernels, not torch, must have computed them."""
    tries = opinfo.wanted_operators([name], dtypes=[dtype])
    info = next(info for info, _ in tries if opinfo.title(info) == name)
    with torch.no_grad(), on_amd(f"rocm/{architecture}") as gpu:
        row = opinfo.row_of(info, dtype, most, special=True)
    assert set(row.counts) == {"right"}, row.notes
    assert gpu.launches


@pytest.mark.parametrize("number", range(EVERY_DAY))
def test_operator(number: int) -> None:
    """One on each target, others every day."""
    name = OPERATORS[(DAY * EVERY_DAY + number) % len(OPERATORS)]
    check(name, "float32", ARCHITECTURES[number], 1)


def test_one_number_of_bfloat16() -> None:
    """RDNA4 loads 16 bits into a scalar register."""
    check("maximum", "bfloat16", "gfx1201", 1)


def ranks(x: torch.Tensor) -> torch.Tensor:
    """Comparisons that are counted, which LLVM makes a count of bits of where the sizes are open."""
    return (x[:, None] > x[None]).sum(0)


def narrow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Instructions of 16-bit integers."""
    return x.clamp(2, 70), x.half(), x.sign()


INTEGERS = {
    "counts": (ranks, [torch.tensor([3, 1, 2, 1, 5, 0, 2])[:rows].float() for rows in (7, 5, 1, 6)]),
    "signed": (narrow, [(torch.arange(5 * 37) * 356 - 32768).to(torch.int16).view(5, 37)]),
    "unsigned": (narrow, [(torch.arange(5 * 37) + 71).to(torch.uint8).view(5, 37)]),
}


@pytest.mark.parametrize(("name", "architecture"), list(product(INTEGERS, ("gfx942", "gfx1201"))))
def test_small_integers(name: str, architecture: str) -> None:
    """Every size, the first ones twice: the emulator knows what LLVM emits for them."""
    function, given = INTEGERS[name]
    with torch.no_grad(), on_amd(f"rocm/{architecture}") as gpu:
        fast = ladder.compile(function)
        for x in (given[0], *given):
            assert str(fast(x)) == str(function(x))
    assert gpu.launches


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize(
    ("architecture", "activation", "rows"), [("gfx942", None, 1), ("gfx1100", "int8", 17)]
)
def test_plans_of_quantized_models(architecture: str, activation: str | None, rows: int) -> None:
    """Weights of four bits in short groups, also beside activations of 8 bits: every product of the plan."""
    torch.manual_seed(0)
    model, x = Gated(64).half().eval().requires_grad_(False), torch.randn(rows, 64).half()
    options = {"group_size": 32, "activation": activation} if activation else {"group_size": 32}
    with torch.no_grad():
        wanted = ladder.quantize_(copy.deepcopy(model), "int4", **options)(x)
        with on_amd(f"rocm/{architecture}") as gpu:
            fast = ladder.compile(ladder.quantize_(model, "int4", **options))
            before, found = fast(x), fast(x)
    assert gpu.launches
    for result in (before, found):
        assert (result - wanted).float().norm() <= (3e-3 if activation else 1e-3) * wanted.float().norm()


class Heads(nn.Module):
    """Attention of heads that lie beside each other in one projection, with a mask that all heads share."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        given = [self.heads * self.size, *[self.kv_heads * self.size] * 2]
        q, k, v = (part.view(batch, tokens, -1, self.size).transpose(1, 2) for part in x.split(given, -1))
        mixed = nn.functional.scaled_dot_product_attention(
            q[:, :, -1:], k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        return mixed.transpose(1, 2).flatten(2)


ATTENTION = {
    "gfx90a": (8, 2, 64, False), "gfx950": (4, 4, 72, True), "gfx1100": (8, 8, 40, False),
    "gfx1201": (4, 2, 64, True),
}  # fmt: skip
"""Architecture -> heads, heads of keys, elements of each, and whether a mask is there."""


@pytest.mark.parametrize("architecture", ATTENTION)
def test_plans_of_attention(architecture: str) -> None:
    """Its kernels, not torch, computed it: tensors lie as views of one, masks are shared by heads."""
    heads, kv_heads, size, masked = ATTENTION[architecture]
    torch.manual_seed(0)
    model, tokens = Heads(heads, kv_heads, size), 100
    x = torch.randn(2, tokens, (heads + 2 * kv_heads) * size).half()
    mask = torch.rand(2, 1, 1, tokens) < 0.7 if masked else None
    with torch.no_grad(), on_amd(f"rocm/{architecture}") as gpu:
        fast = ladder.compile(model)
        found = [fast(x, mask) for _ in range(2)][-1]
    wanted = model(x.double(), mask)
    assert gpu.launches
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), list(product(OPERATORS, ARCHITECTURES)))
def test_every_operator(name: str, architecture: str, long_test: None) -> None:
    check(name, "float16", architecture, 4)
