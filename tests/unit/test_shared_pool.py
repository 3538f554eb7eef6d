"""Arrays in dynamic shared memory lie as TVM's own allocator puts them, which looks at all of its callers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from tvm.script import tirx as T

from ladder.lower import builder as b


def emitted(pool: Callable[[], Any], least: int) -> str:
    """Return a kernel of four arrays: aligned, of less than a byte per element, and over another."""
    with b.function("kernel") as result:
        b.block_index([2])
        b.thread_index(32)
        memory = pool()
        arrays = [memory.alloc((3,), "float32"), memory.alloc((7, 2), "float16", align=128)]
        arrays.append(memory.alloc((3,), "int4"))
        memory.move_base_to(8)
        arrays.append(memory.alloc((2,), "float32"))
        memory.commit(least) if least else memory.commit()
        for array in arrays:
            b.store(array, T.Cast(str(array.dtype), 1), *[0] * len(array.shape))
    return str(result.func.script())


@pytest.mark.parametrize("least", [0, 4096])
def test_arrays_lie_as_by_the_allocator_of_tvm(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = emitted(T.SMEMPool, least)
    monkeypatch.setattr(inspect, "stack", None)
    assert emitted(b.SharedPool, least) == expected
    assert "dyn_smem_bytes" in expected
