"""Kernels of open sizes with little work run in the calling thread: they wait for no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx.parser
import pytest
import torch

import ladder
from ladder import knobs
from ladder.runtime import library, threads

MODEL = """
    <ir_version: 10, opset_import: ["" : 21]>
    small (float[B, 48] x) => (float[48, B] y) <float[48, 48] w> {
        p = MatMul(x, w)
        r = Relu(p)
        t = Transpose <perm = [1, 0]> (r)
        y = Exp(t)
    }"""


def model() -> onnx.ModelProto:
    found = onnx.parser.parse_model(MODEL)
    torch.manual_seed(0)
    weight = onnx.numpy_helper.from_array((torch.randn(48, 48) * 0.1).numpy(), "w")
    del found.graph.initializer[:]
    found.graph.initializer.append(weight)
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each kernel that runs alone."""
    seen, plain = list[str](), library.threads.alone

    def alone(entry: Callable[..., Any], *rest: Any) -> Callable[..., Any]:
        run = plain(entry, *rest)

        def noted(*arguments: Any) -> None:
            seen.append("alone")
            run(*arguments)

        return noted

    monkeypatch.setattr(threads, "alone", alone)
    return seen


@pytest.mark.parametrize("count", [1, 2])
def test_little_work_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = counted(monkeypatch)
    with knobs.override(num_threads=count):
        listed = model()
        weight = torch.from_numpy(onnx.numpy_helper.to_array(listed.graph.initializer[0]).copy())
        fast = ladder.compile(listed)
        calls = [*[(3, True)] * 4, (4000, False), (4000, False), (5, True)]
        for rows, little in calls:
            x = torch.randn(rows, 48)
            seen.clear()
            torch.testing.assert_close(fast(x), (x @ weight).relu().t().exp())
            assert bool(seen) == (little and count > 1)


def test_the_limit_is_lifted_where_a_kernel_fails() -> None:
    library.load_runtime()
    limits = []

    class Runtime:
        """Stands in for TVM's library."""

    setattr(Runtime, threads.CONCURRENCY, staticmethod(limits.append))

    def fails(number: int) -> None:
        raise ValueError(number)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threads._process, "launch", None)
        patched.setattr(threads.ctypes, "PyDLL", lambda path: Runtime)
        run = threads.alone(fails, library.find_library(library.RUNTIME))
    with pytest.raises(ValueError, match="7"):
        run(7)
    assert limits == [1, 0]
