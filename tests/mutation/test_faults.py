"""The list of planted faults fits the tree; `python -m tests.mutation` runs it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation import __main__ as tool
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


@pytest.mark.parametrize(
    ("path", "is_of_others"),
    [
        (str(ROOT), False),
        (str(ROOT / "tests" / "unit"), False),
        (str(ROOT.parent / "elsewhere"), True),
        (str(Path(sys.prefix) / "lib" / "site-packages"), True),
    ],
)
def test_modules_of_the_environment_are_found(path: str, is_of_others: bool) -> None:
    """A virtual environment in the checkout, as README's command makes it, is no part of the tree."""
    assert tool._is_of_others(path) is is_of_others


def test_a_child_in_which_tests_do_not_run_kills_no_fault(tmp_path: Path) -> None:
    def raising(*_: object) -> int:
        raise ModuleNotFoundError("packaging")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest, "main", raising)
        code, _ = tool.run_tests(tmp_path, ["any"])
    assert tool.OUTCOMES.get(code, "broken") == "broken"
