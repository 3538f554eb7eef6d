"""Outcomes of cases as ParityBench writes them, in a file of ours; `benchmarks.paritybench` runs a corpus."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import paritybench, paritybench_case

FILE = """
from _paritybench_helpers import _mock_config, patch_functional, _mock_layer, _paritybench_base
import torch, os
from torch import nn
import torch.nn.functional as F
patch_functional()

class Whole(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, 3)
    def forward(self, x):
        return {"y": F.relu(self.layer(x)), "rows": x.size(0)}

class Split(nn.Module):
    def forward(self, x):
        print(x)
        return x + 1

class Fails(nn.Module):
    def forward(self, x):
        return x + torch.ones(7)

class Unsteady(nn.Module):
    def forward(self, x):
        return x + int.from_bytes(os.urandom(4), "big")

class Dies(nn.Module):
    def forward(self, x):
        os._exit(3)

def given():
    return [torch.rand([2, 4])], {}

def nothing():
    return [], {}

TESTCASES = [
    (Whole, lambda: ([], {"config": _mock_config(size=4)}), given, True),
    (Split, nothing, given, True),
    (Fails, nothing, given, True),
    (Unsteady, nothing, given, True),
    (Dies, nothing, given, True),
    (Whole, lambda: ([], {"config": _mock_config(size=4)}), given, True),
]
"""


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, paritybench_case.HELPERS, None)
    (tmp_path / "test_ours.py").write_text(FILE)
    (tmp_path / "test_broken.py").write_text("import a_library_that_is_missing")
    paritybench_case.mock_missing()
    return sorted(tmp_path.glob("test_*.py"))


def test_cases_have_the_outcomes_that_they_should(corpus):
    options = paritybench.Options(60.0, "cpu", kernels=False)
    found = list(paritybench.rows(corpus, options, jobs=1, seconds=300.0))
    outcomes = {row.get("case"): row["outcome"] for row in found}
    wanted = ["right", "split", "uncounted", "uncounted", "crashed", "right"]
    assert outcomes == {None: "not imported", **dict(enumerate(wanted))}
    report = paritybench.report_of(found)
    assert (report["cases"], report["projects"], report["projects all right in one graph"]) == (4, 1, 0)


def test_differences_are_found():
    wanted = {"a": [torch.ones(3), 1.0], "b": None}
    assert paritybench_case.differs(wanted, {"a": [torch.ones(3), 1.0], "b": None}) == ""
    for other in ({"a": [torch.zeros(3), 1.0], "b": None}, {"a": [torch.ones(3), 2.0], "b": None}):
        assert paritybench_case.differs(wanted, other)
    for other in ({"a": [torch.ones(3, 1), 1.0], "b": None}, {"a": (torch.ones(3), 1.0), "b": None}):
        assert paritybench_case.differs(wanted, other)
    assert paritybench_case.differs(torch.tensor([torch.nan, 1]), torch.tensor([1, torch.nan]))
