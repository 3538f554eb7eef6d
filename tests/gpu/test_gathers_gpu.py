"""Chains that read elements by number: as eager in all forms of numbers, and an error where eager has one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import ladder  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def embedded(table, ids, positions, weight):
    value = F.embedding(ids, table) + positions
    return F.rms_norm(value, (value.shape[-1],), weight), value


def losses(x, ids):
    return F.cross_entropy(x, ids, ignore_index=3), F.cross_entropy(x, ids, reduction="none")


def of_pixels(x, ids):
    return F.cross_entropy(x, ids[:, None, None].expand(-1, 8, 9), reduction="none")


def numbered(x, ids):
    return x[ids] * 2, x[:, ids % 5], x.index_select(0, ids.int()), x[ids[0]], x[..., -ids % 5 - 5]


def along(x, ids):
    rows = ids[:, None] % x.shape[1]
    return x.gather(1, rows), x.softmax(1).gather(1, rows), x.take_along_dim(rows.expand(-1, 3), 1)


def joined(x, ids):
    return torch.cat([x[ids], x]), F.pad(x[ids], (1, 1)), x[ids].sum(0), x.amax(0)[ids % x.shape[1]]


def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, device="cuda").to(dtype)


def numbers(count: int, most: int) -> Any:
    return torch.cat(
        [torch.randint(0, most, (count - 2,), device="cuda"), torch.tensor([most - 1, 0]).cuda()]
    )


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "embedded": (embedded, lambda: (drawn(300, 96, dtype=torch.float16), numbers(35, 300).view(5, 7),
        drawn(7, 96, dtype=torch.float16), drawn(96, dtype=torch.float16))),
    "losses": (losses, lambda: (drawn(70, 1000, dtype=torch.bfloat16), numbers(70, 1000))),
    "losses of short rows": (losses, lambda: (drawn(130, 10), numbers(130, 10))),
    "pixels": (of_pixels, lambda: (drawn(4, 21, 8, 9, dtype=torch.float16), numbers(4, 21))),
    "numbered": (numbered, lambda: (drawn(9, 5), numbers(9, 9))),
    "numbered halves": (numbered, lambda: (drawn(40, 64, dtype=torch.bfloat16), numbers(40, 40))),
    "numbered integers": (numbered, lambda: (torch.randint(-9, 9, (12, 16), device="cuda"), numbers(20, 12))),
    "along": (along, lambda: (drawn(33, 40), numbers(33, 33))),
    "joined": (joined, lambda: (drawn(12, 8), numbers(12, 12))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_eager(case: str) -> None:
    program, make = CASES[case]
    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            inputs = make()
            got, wanted = fast(*inputs), program(*inputs)
            got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, wanted))
            for one, other in zip(got, wanted, strict=True):
                assert one.shape == other.shape
                bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(one.dtype, 2e-5)
                torch.testing.assert_close(one, other, atol=bound, rtol=bound)


BEYOND = """
import torch, ladder
table, ids = torch.randn(50, 64, device="cuda"), torch.tensor([[3, 50], [1, 2]], device="cuda")
fast = ladder.compile(lambda t, i: torch.nn.functional.rms_norm(torch.nn.functional.embedding(i, t), (64,)))
with torch.no_grad():
    fast(table, ids.clamp(max=49)), fast(table, ids.clamp(max=49))
    fast(table, ids)
    torch.cuda.synchronize()
print("went on")
"""


def test_a_row_that_is_not_there_ends_the_program() -> None:
    found = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, timeout=200)
    assert found.returncode
    assert "went on" not in found.stdout
    assert "CUDA" in found.stderr
