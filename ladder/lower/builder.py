"""Small functions that emit TIR statements: the vocabulary of every pipeline.

A kernel is written as ordinary Python that calls these functions inside
``with function("name") as result:``. Python loops and conditions run at emission
time (they unroll and select code); `loop`, `when` and `repeat_while` become TIR.
Calls such as ``T.ptx[...](...)`` are expressions: `emit` turns them into statements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from math import prod
from typing import Any

from tvm import DataType
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import AttrStmt, Evaluate, IntImm
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from tile_types.arrays import TORCH_NAMES


class Emitted:
    """Holds the finished function after its ``with`` block ends."""

    func: Any = None


@contextmanager
def function(name: str, noalias: bool = True) -> Iterator[Emitted]:
    """Open a PrimFunc; its body is whatever is emitted inside the block.

    ``noalias`` says that arguments do not overlap; compilers may then read them at any time.
    """
    result = Emitted()
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name(name)
            # TVM reads the symbol from the attribute when several functions share one module.
            I.func_attr({"global_symbol": name, "tirx.noalias": noalias})
            yield result
        result.func = builder.get()


def function_attribute(name: str, value: Any) -> None:
    """Set an attribute of the open PrimFunc."""
    I.func_attr({name: value})


def symbol(name: str) -> Expr:
    """Declare a symbolic int32 extent, bound by the shape of a tensor argument."""
    del name
    return I.int32()


def tir_name(name: str) -> str:
    """Return TIR's name of an element type, which is torch's."""
    return TORCH_NAMES.get(name, name)


def as_bytes(buffer: Any) -> Any:
    """Emit the view of a tensor of 8-bit elements as numbers, after the last argument."""
    return I.decl_buffer(tuple(buffer.shape), "uint8", data=buffer.data)


def tensor(name: str, shape: Sequence[Expr], dtype: str, align: int = 16) -> Any:
    """Declare a tensor argument; ``shape`` may hold symbols. ``align`` is in bytes."""
    handle = I.arg(f"{name}_handle", I.handle())
    return I.match_buffer(handle, tuple(shape), dtype, align=align)


class Strided:
    """A tensor argument of any strides, which calls show; it is read once `open` was called."""

    def __init__(self, name: str, shape: Sequence[Expr], dtype: str, align: int) -> None:
        self.strides = [symbol(f"{name}_{axis}") for axis in range(len(shape))]
        handle = I.arg(f"{name}_handle", I.handle())
        self.given = I.match_buffer(handle, tuple(shape), dtype, strides=self.strides, align=align)

    def open(self) -> None:
        """Emit the view of all elements, after the last argument."""
        self.flat = I.decl_buffer(((1 << 31) - 1,), self.given.dtype, data=self.given.data)

    def __getitem__(self, indices: Sequence[Expr]) -> Expr:
        return self.flat[sum(at * stride for at, stride in zip(indices, self.strides, strict=True))]


def device(min_blocks: int = 0) -> None:
    """End the host part: what follows runs on the GPU.

    ``min_blocks`` > 0 adds ``__launch_bounds__(threads, min_blocks)`` (setmaxnreg needs it).
    """
    I.device_entry()
    if min_blocks:
        _open_until_scope_ends(I.attr({"tirx.launch_bounds_min_blocks_per_sm": min_blocks}))


def _open_until_scope_ends(frame: Any) -> None:
    """Enter ``frame`` and leave it when the enclosing frame ends (its callbacks run then)."""
    frame.add_callback(lambda: frame.__exit__(None, None, None))
    frame.__enter__()


def block_index(extents: Sequence[Expr]) -> list[Expr]:
    """Return the block's coordinates in a grid of ``extents`` (up to three)."""
    ids = I.cta_id(list(extents))
    return list(ids) if len(extents) > 1 or isinstance(ids, (list, tuple)) else [ids]


def cluster_rank(extents: Sequence[int]) -> list[Expr]:
    """Return the block's coordinates within its cluster."""
    ids = I.cta_id_in_cluster(list(extents))
    return list(ids) if len(extents) > 1 or isinstance(ids, (list, tuple)) else [ids]


def thread_index(threads: int) -> Expr:
    """Return the thread's index within a block of ``threads``."""
    return I.thread_id([threads])


def local(count: int, dtype: str) -> Any:
    """Allocate registers; index them only with Python integers."""
    return I.alloc_local((count,), dtype)


class SharedPool:
    """A block's dynamic shared memory, from which arrays are taken one behind the other.

    TVM's own looks up the sources of all its callers, which takes long.

    offset: Where the next array begins, in bytes.
    taken: Bytes taken so far.
    """

    def __init__(self) -> None:
        self.memory = I.alloc_buffer([0], "uint8", scope="shared.dyn").data
        self.offset = self.taken = 0

    def alloc(self, shape: Sequence[int], dtype: str, align: int = 0) -> Any:
        """Declare the next array, which begins at a multiple of ``align`` bytes."""
        self.offset = -(-self.offset // max(1, align)) * max(1, align)
        place = {"data": self.memory, "byte_offset": self.offset, "scope": "shared.dyn", "align": align}
        array = I.decl_buffer(shape, dtype, layout="default", **place)
        self.move_base_to(self.offset + -(-prod(shape) * DataType(dtype).bits // 8))
        return array

    def move_base_to(self, offset: int) -> None:
        """Let the next array begin at an offset: over others, if these are no longer read."""
        self.offset, self.taken = offset, max(self.taken, offset)

    def commit(self, size: int = 0) -> None:
        """Emit how many bytes there are: those taken, or more."""
        size = IntImm("int64", max(size, self.taken))
        I.add_to_parent(AttrStmt(0, "tirx.dyn_smem_bytes", size, Evaluate(0)))


def store(buffer: Any, value: Expr, *indices: Expr) -> None:
    """Emit ``buffer[indices] = value``."""
    I.buffer_store(buffer, value, list(indices))


def emit(call: Expr) -> None:
    """Emit a call for its effect (a bare call expression would vanish)."""
    I.evaluate(call)


def ptx(spelling: str, *operands: Expr) -> None:
    """Emit one PTX instruction by its exact spelling; destinations come first."""
    emit(T.ptx[spelling](*operands))


def bind(value: Expr) -> Expr:
    """Name a value so that it is computed once."""
    return value if isinstance(value, (int, float)) else I.bind(value)


class Variable:
    """A mutable scalar in a register."""

    def __init__(self, dtype: str, initial: Expr) -> None:
        self.cell = local(1, dtype)
        self.set(initial)

    @property
    def value(self) -> Expr:
        return self.cell[0]

    def set(self, value: Expr) -> None:
        store(self.cell, value, 0)


def keep(value: Expr) -> Expr:
    """Compute an int32 once into a register of its own (TVM inlines again what `bind` names)."""
    return value if isinstance(value, int) else Variable("int32", value).value


@contextmanager
def loop(stop: Expr, start: Expr = 0, *, rolled: bool = False) -> Iterator[Expr]:
    """Emit a loop that stays a loop; ``rolled`` also keeps the CUDA compiler from unrolling it."""
    with I.serial(start, stop, unroll=False if rolled else None) as index:
        yield index


@contextmanager
def vector(lanes: int) -> Iterator[Expr]:
    """Emit a vectorised loop: one wide load or store."""
    with I.vectorized(lanes) as index:
        yield index


@contextmanager
def repeat_while(condition: Expr) -> Iterator[None]:
    """Emit ``while (condition)``."""
    with I.While(condition):
        yield


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Emit ``if (condition)``; a Python bool selects at emission time only if true."""
    with I.If(condition), I.Then():
        yield


def every(*conditions: Expr | None) -> Expr | None:
    """Return whether all conditions hold; None stands for what always does."""
    found = [condition for condition in conditions if condition is not None]
    return reduce(T.And, found) if found else None


def where(*conditions: Expr | None) -> AbstractContextManager[None]:
    """Emit a branch around what follows, taken where `every` condition holds; none if all always do."""
    condition = every(*conditions)
    return nullcontext() if condition is None else when(condition)


def either(condition: Expr, then: Any, otherwise: Any) -> None:
    """Emit ``if (condition) then() else otherwise()``."""
    with I.If(condition):
        with I.Then():
            then()
        with I.Else():
            otherwise()


def call_inline(name: str, source: str, dtype: str, *operands: Expr) -> Expr:
    """Call a one-instruction CUDA helper that TIR has no name for.

    ``source`` defines ``name``; ``dtype`` is its return type (``"void"`` for none).
    """
    return T.cuda.func_call(name, *operands, source_code=source, return_type=dtype)


def shuffle(value: Expr, lane: Expr) -> Expr:
    """Return what a lane of a warp of 32 has; all lanes take part."""
    return T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), value, lane, 32, 32)


def shuffle_xor(value: Expr, distance: int) -> Expr:
    """Return what the lane has whose number differs by an exclusive or; all lanes take part."""
    return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, 32, 32)


def block_sync() -> None:
    """Emit ``__syncthreads()``."""
    emit(T.cuda.cta_sync())


def cluster_sync() -> None:
    """Emit a barrier of the cluster's blocks that accesses of shared memory do not cross.

    TVM's own (``T.cuda.cluster_sync``) does not tell the compiler that memory changes meanwhile.
    """
    ptx("barrier.cluster.arrive.release")
    ptx("barrier.cluster.wait.acquire")


def sync(cluster: int) -> None:
    """Emit a barrier of the block, or of all blocks of its cluster."""
    if cluster > 1:
        cluster_sync()
    else:
        block_sync()
