"""Files of models with experts run where nothing else is imported: neither transformers nor `ladder.api`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ladder

pytest.importorskip("transformers.integrations.moe")

LOADED = """
import sys
sys.modules["transformers"] = None  # not installed where a file is loaded
import torch, ladder
for path in sys.argv[1:]:
    given, expected = torch.load(path + ".pt")
    with torch.no_grad():
        assert torch.equal(ladder.load(path)(*given), expected), path
"""


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.Parameter(torch.randn(3, 32, 64))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, self.matrices.transpose(1, 2), ends) * 2.0


class Quantized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        matrices = [ladder.quantize(torch.randn(32, 64), "int4", group_size=32) for _ in range(3)]
        self.operator = ladder.GroupedMatmul(3, 32, 64, "int4", "float32", group_size=32, output="float32")
        self.packed = self.operator.pack(matrices)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        offsets = torch.nn.functional.pad(ends, (1, 0))
        return self.operator(x, self.packed, offsets) * 2.0


def test_files_load_without_what_registered_their_operators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = torch.randn(5, 64), torch.tensor([2, 2, 5], dtype=torch.int32)
    paths = []
    for model in (Experts(), Quantized()):
        fast = ladder.compile(model.eval())
        with torch.no_grad():
            for _ in range(2):
                expected = fast(*given)
            paths.append(str(fast.export(tmp_path / f"{type(model).__name__}.ladder", *given)))
        torch.save((given, expected), paths[-1] + ".pt")
    done = subprocess.run([sys.executable, "-c", LOADED, *paths], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
