"""Floor division by numbers that only a call knows, as CPU kernels compute it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm_ffi import structural_walk

from ladder.lower.cpu.toolchain import compile_module
from ladder.lower.passes import open_quotients
from targets import host_cpu

COUNT = 48
KERNEL = """
@T.prim_func
def divided(b: T.{kind}, x: T.Buffer(({count},), "{kind}"), q: T.Buffer(({count},), "{kind}"),
            r: T.Buffer(({count},), "{kind}"), n: T.Buffer(({count},), "{kind}")):
    T.func_attr({{"global_symbol": "divided"}})
    for v in {loop}:
        q[v] = x[v] // b
        r[v] = x[v] % b
        n[v] = x[v] // b // b % b + x[v] // b // 3 // b
"""


def kernel(kind: str, loop: str) -> object:
    source = KERNEL.format(kind=kind, loop=loop, count=COUNT)
    return tvm.script.from_source(source)


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("loop", [f"range({COUNT})", f"T.vectorized({COUNT})"])
def test_every_pair_of_signs(kind: str, loop: str) -> None:
    run = compile_module({"divided": kernel(kind, loop)}, host_cpu())["divided"]
    largest = np.iinfo(kind).max
    x = np.array([*range(-20, 20), largest, -largest, 1 - largest, 7919, -7919, 0, 1, -1], kind)
    for b in (1, 2, 3, 7, 20, -1, -2, -3, -7, -20, largest, -largest):
        found = [np.zeros(COUNT, kind) for _ in range(3)]
        run(b, *map(tvm.runtime.tensor, [x]), *(tensors := [*map(tvm.runtime.tensor, found)]))
        q, r, n = (tensor.numpy() for tensor in tensors)
        for got, want in ((q, x // b), (r, x % b), (n, x // b // b % b + x // b // 3 // b)):
            np.testing.assert_array_equal(got, want, str(b))


def test_nothing_is_left_to_choices() -> None:
    """TVM's own lowering simplifies a condition per division: nested ones took it ten seconds a kernel."""
    left: list[object] = []
    changed = open_quotients()(tvm.IRModule({"divided": kernel("int32", f"range({COUNT})")}))
    for kind in (tirx.FloorDiv, tirx.FloorMod, tirx.Select):
        structural_walk(changed["divided"].body, (kind, left.append))
    assert not left
