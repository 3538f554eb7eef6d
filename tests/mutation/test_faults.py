"""The list of planted faults fits the tree; `python -m tests.mutation` runs it."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutation.plant import ROOT, Fault, read_faults

READ = read_faults()
LEAST = 100


@pytest.mark.parametrize("fault", READ, ids=lambda fault: f"{fault.area}-{fault.file}")
def test_fault_applies(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.planted(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text)), "the fault changes no code"
    for test in (*fault.tests, *fault.wider):
        assert (ROOT / test.split("::")[0]).exists(), f"there is no {test}"
    assert fault.tests
    assert fault.says


def test_faults_are_as_many_as_the_bar_asks() -> None:
    assert len(READ) >= LEAST
    assert max(Counter((fault.file, fault.old, fault.new) for fault in READ).values()) == 1
