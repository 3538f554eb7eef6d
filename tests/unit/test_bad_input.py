"""Values of a wrong kind for public functions: one error of Ladder's own that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ladder

ODD: list[Any] = [
    *("x", 1.5, object(), float("nan"), b"x", 1 << 70),
    *(torch.zeros(0), torch.zeros(3, 3), torch.zeros(2, 2, device="meta")),
]

CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda odd: ladder.quantize(torch.ones(2, 64), "int4", group_size=odd),
    "quantize_tokens": lambda odd: ladder.quantize_tokens(torch.ones(2, 64), "int8", group_size=odd),
    "quantization": lambda odd: ladder.quantization(odd),
    "quantize_": lambda odd: ladder.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), overrides=odd),
    "Matmul N": lambda odd: ladder.Matmul(N=odd, K=64, weight="int4"),
    "Matmul epilogue": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", epilogue=odd),
    "Matmul output": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", output=odd),
    "Matmul activation": lambda odd: ladder.Matmul(N=64, K=64, weight="int4", activation=odd),
    "GroupedMatmul": lambda odd: ladder.GroupedMatmul(odd, N=64, K=64, weight="int4"),
    "Gemm": lambda odd: ladder.Gemm(n=odd, k=64, weight="int4"),
    "TType decode": lambda odd: ladder.TType("odd", 4, odd),
    "tensor": lambda odd: ladder.tensor("A", odd, "float16"),
    "compute": lambda odd: ladder.compute((4,), odd),
    "compile_expression": lambda odd: ladder.compile_expression(odd),
    "compile": lambda odd: ladder.compile(torch.nn.Linear(2, 2), backend=odd),
    "superoptimize": lambda odd: ladder.superoptimize(odd, [torch.ones(2, 2)]),
    "from_linear": lambda odd: ladder.Linear.from_linear(odd, "int4"),
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_values_are_refused_by_name(name: str) -> None:
    for odd in ODD:
        with pytest.raises(ladder.LadderError) as raised:
            CALLS[name](odd)
        assert len(str(raised.value)) < 600, odd


@pytest.mark.parametrize("rows", [torch.zeros(0), torch.tensor(1.0), torch.ones(2, 4).to_sparse()], ids=str)
def test_tokens_are_dense_rows(rows: torch.Tensor) -> None:
    with pytest.raises(ladder.LadderError, match="dense rows"):
        ladder.quantize_tokens(rows, "int8")


def test_a_cache_may_be_named_by_text(tmp_path: Any) -> None:
    assert ladder.KernelCache(str(tmp_path)).kernels == tmp_path / "kernels"
