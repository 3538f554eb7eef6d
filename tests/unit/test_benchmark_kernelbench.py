"""Sizes of programs in KernelBench's form."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernelbench_programs import Program, cost, smaller

TEXT = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, 64)

    def forward(self, x):
        return self.inner(x).view(-1, 64)

width, rows = 4096, 512

def get_inputs():
    return [torch.rand(rows, width)]

def get_init_inputs():
    return [width]
"""


def test_sizes_shrink_until_a_call_fits(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TEXT)
    small = smaller(Program(path), elements=1e5, operations=1e9)
    assert dict(small.sizes) == {4096: 256, 512: 256}  # 64 is no size that the module assigns
    assert cost(small).within(1e5, 1e9)
    (x,) = small.inputs("cpu")
    assert small.model("cpu")(x).shape == (256, 64)


def test_sizes_that_a_program_needs_stay(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TEXT.replace("Linear(width", "Linear(4096"))
    assert dict(smaller(Program(path), elements=3e5, operations=1e9).sizes) == {512: 8}
