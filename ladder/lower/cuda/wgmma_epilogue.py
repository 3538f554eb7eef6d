"""Epilogue of the wgmma pipeline: from accumulator fragments to rows of the output.

Accumulators hold ``out^T``: a thread owns scattered (row, token) pairs, always of the same two
rows of each row tile. Scales, bias and operators apply to them in registers; then each warpgroup
transposes a chunk of tokens of its 64 rows through shared memory, so that it stores whole lines of
128 bytes. Where a cluster splits K, blocks first exchange their sums (`wgmma_exchange`), and each
warp transposes its sixteen rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_exchange import Sum
from ladder.lower.cuda.wgmma_geometry import (
    WARP_ROWS,
    Geometry,
    accumulator_row,
    accumulator_token,
    swizzled_run,
)
from ladder.lower.gpu.epilogue import activate, finish_float, load_run
from schedules.layouts import TILE

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel

Expr = Any
WARP = 32
TEAM_BARRIER = 8
"""Named barrier of the first warpgroup's epilogue; stream-K has barrier 1."""

WAYS = 2
"""Loads from staging that are in flight at once."""

PACK = """
__device__ __forceinline__ unsigned ladder_pack_{name}(float low, float high) {{
  unsigned packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""

PACKED: Mapping[str, str] = {"float16": "f16x2", "bfloat16": "bf16x2"}
"""PTX's name of two elements of a 16-bit output type."""


def allocate(pool: Any, gemm: Gemm, geo: Geometry) -> Any:
    """Allocate what each team transposes sums through."""
    teams = geo.schedule.warps // geo.team
    return pool.alloc((teams, geo.chunk * geo.pitch), gemm.output, align=128)


@dataclass(frozen=True)
class PerRow:
    """A per-row tensor of which a thread keeps the rows it serves; its index is the register's."""

    registers: Any
    dtype: str

    def __getitem__(self, index: int) -> Expr:
        """Return the value of row ``index`` of this thread: 2 * m64 tile + half."""
        return T.reinterpret(self.registers[index], dtype=self.dtype)


class PerToken:
    """Scales of neighbouring tokens, which the lanes of each warp keep between them.

    Its index is the accumulator's (of one row tile). All lanes of a warp must ask together.
    """

    def __init__(self, kernel: Kernel, tokens: int) -> None:
        self.kernel, self.lane = kernel, kernel.lane
        self.count = -(-tokens // WARP)
        self.registers = b.local(self.count, "uint32")
        self.fetched: dict[int, Expr] = {}

    def load(self, token: Expr, *group: Expr) -> None:
        """Load the scales from token ``token`` on, of one group of K if there are groups."""
        for part in range(self.count):
            place = T.min(token + part * WARP + self.lane, self.kernel.args.m - 1)
            source = self.kernel.args.token_scale.ptr_to([place, *group])
            # As in `row_values`: not a plain read.
            b.ptx("ld.global.u32", self.registers[part], source)

    def forget(self) -> None:
        """Have scales exchanged again: registers are not kept for long."""
        self.fetched.clear()

    def __getitem__(self, index: int) -> Expr:
        """Return the scale of an accumulator's token; both rows of a thread share it."""
        first = index // 4 * 8
        key = first + index % 2
        if key not in self.fetched:
            source = first % WARP + accumulator_token(self.lane, index % 2)
            held = T.reinterpret("float32", self.registers[first // WARP])
            every = T.uint32(0xFFFFFFFF)
            value = b.local(1, "float32")
            b.store(value, T.tvm_warp_shuffle(every, held, source, WARP, WARP), 0)
            self.fetched[key] = value[0]
        return self.fetched[key]


def row_values(kernel: Kernel, row_tile: Expr, token: Expr) -> dict[str, Any]:
    """Load row scale and bias of this thread's rows and its tokens' scales, long before they are used."""
    geo, args = kernel.geo, kernel.args
    wanted = {"row_scale": (args.row_scale, args.n_tiles * TILE), "bias": (args.bias, args.n)}
    wanted["factor"] = (args.factor, args.n)
    held: dict[str, Any] = {}
    if args.token_scale is not None and not kernel.gemm.token_group:
        held["token_scale"] = PerToken(kernel, kernel.schedule.tile_m)
        held["token_scale"].load(token)
    for name, (tensor, extent) in wanted.items():
        if tensor is None:
            continue
        bits = 32 if str(tensor.dtype) == "float32" else 16
        registers = b.local(2 * geo.m64, f"uint{bits}")
        for m in range(geo.m64):
            row = _first_row(kernel, row_tile, m) + accumulator_row(kernel.warp, kernel.lane, 0)
            for half in (0, 1):
                source = tensor.ptr_to([T.min(row + half * 8, extent - 1)])
                # Not a plain read: the compiler would move it ahead of the wait for the kernel before.
                b.ptx(f"ld.global.u{bits}", registers[2 * m + half], source)
        held[name] = PerRow(registers, str(tensor.dtype))
    return held


def _first_row(kernel: Kernel, row_tile: Expr, m: int) -> Expr:
    return (row_tile + kernel.group_index * kernel.geo.m64 + m) * TILE


def finish_tile(kernel: Kernel, row_tile: Expr, token: Expr, held: Mapping[str, Any]) -> None:
    """Write one finished tile whose first packed row tile and first token are given.

    ``held`` is what `row_values` loaded for the tile.
    """
    store = _TeamStore(kernel, held, row_tile, token)
    if kernel.exchange is not None:
        kernel.exchange.finish(kernel.sum_of, store.tile)
        return

    def whole() -> None:
        for m in range(kernel.geo.m64):
            store.tile(m, kernel.sum_of)

    if kernel.stream is not None:
        kernel.stream.finish(whole)
    else:
        whole()


class _TeamStore:
    """Stores the rows of each row tile that a team holds: a warpgroup, or a warp."""

    def __init__(self, kernel: Kernel, held: Mapping[str, Any], row_tile: Expr, token: Expr) -> None:
        self.kernel, self.geo = kernel, kernel.geo
        # A residual is added to what was staged, where threads have whole runs of it.
        self.gemm = replace(kernel.gemm, epilogue=()) if kernel.gemm.residual else kernel.gemm
        self.row_tile, self.token = row_tile, token
        self.args = replace(kernel.args, residual=None, **held)
        self.wide = self.gemm.output == "float32"
        self.run = 4 if self.wide else 8
        team = self.geo.team
        self.runs = team * WARP_ROWS // self.run
        if team == 1:
            self.slot, self.member, self.thread = b.bind(kernel.group_index * 4 + kernel.warp), 0, kernel.lane
        else:
            self.slot, self.member, self.thread = kernel.group_index, kernel.warp, kernel.group_thread
        tile = kernel.schedule.tile_m
        # Tiles that are cut at different K round differently: what two of them hold, only one may store.
        self.own = b.keep((token + (tile - 1)) // tile * tile) if kernel.stream is not None else 0

    def tile(self, m: int, value: Sum) -> None:
        """Store row tile ``m`` of the warpgroup, whose sums ``value`` returns."""
        self.value = value
        alone = self.kernel.warp * WARP_ROWS if self.geo.team == 1 else 0
        first_row = b.bind(_first_row(self.kernel, self.row_tile, m) + alone)
        for first in range(0, self.kernel.schedule.tile_m, self.geo.chunk):
            self._chunk(m, first, first_row, self.token)

    def _chunk(self, m: int, first: int, first_row: Expr, token: Expr) -> None:
        """Transpose and store tokens ``first .. first+chunk`` of row tile ``m``."""
        if isinstance(self.args.token_scale, PerToken):
            self.args.token_scale.forget()
        (self._stage_floats if self.wide else self._stage_halves)(m, first)
        self._meet()
        row = b.bind(first_row + self.thread % self.runs * self.run)
        whole = T.And(self.args.n % self.run == 0, row + self.run <= self.args.n)
        arguments = (row, b.bind(token + first))
        b.either(whole, lambda: self._store_vectors(*arguments), lambda: self._store_elements(*arguments))
        # The next chunk overwrites what this one still reads.
        self._meet()

    def _meet(self) -> None:
        """Wait for the whole team."""
        if self.geo.team == 1:
            b.emit(T.cuda.warp_sync())
        else:
            barrier = TEAM_BARRIER + T.Cast("uint32", self.slot)
            b.emit(T.ptx.bar.sync(barrier, T.uint32(self.geo.team * WARP)))

    @property
    def _pass(self) -> int:
        """Tokens that a team's threads cover, 16 bytes each."""
        return self.geo.team * WARP // self.runs

    def _sum(self, m: int, index: int) -> Expr:
        """Return the finished output of accumulator ``index``, as float32."""
        value = self.value(m * self.geo.accumulators + index)
        return finish_float(self.gemm, value, index, 2 * m + index // 2 % 2, self.args)

    def _stage_halves(self, m: int, first: int) -> None:
        """Round to 16 bits and store transposed 8x8 matrices: two halves of the rows by up to 16 tokens."""
        name, lane = self.gemm.output, self.kernel.lane
        source = PACK.format(name=name, ptx=PACKED[name])
        for start in range(0, self.geo.chunk, 16):
            count = min(16, self.geo.chunk - start) // 4
            registers = []
            for matrix in range(count):
                index = (first + start) // 2 + 2 * matrix
                low, high = (self._sum(m, index + i) for i in (0, 1))
                registers.append(b.call_inline(f"ladder_pack_{name}", source, "uint32", low, high))
            place = start + lane // 16 % (count // 2) * 8 + lane % 8
            target = swizzled_run(place, self.member * 2 + lane // 8 % 2, self.runs) * self.run
            spelling = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16"
            b.ptx(spelling, self.kernel.staging.ptr_to([self.slot, target]), *registers)

    def _stage_floats(self, m: int, first: int) -> None:
        """Store each sum at its token and row."""
        lane = self.kernel.lane
        for index in range(first // 2, (first + self.geo.chunk) // 2):
            place = accumulator_token(lane, index) - first
            row = self.member * WARP_ROWS + lane // 4 + index // 2 % 2 * 8
            b.store(self.kernel.staging, self._sum(m, index), self.slot, place * self.geo.pitch + row)

    def _store_vectors(self, row: Expr, token: Expr) -> None:
        """Store 16 bytes per thread, of as many tokens as the team covers, a few times at once."""
        turns = -(-self.geo.chunk // self._pass)
        ways = gcd(turns, WAYS)
        held = [b.local(self.run, self.gemm.output) for _ in range(ways)]
        # Rolled: addresses of all stores at once would not leave registers for the sums.
        with b.loop(turns // ways, rolled=True) as turn:
            first = self.thread // self.runs
            places = [b.bind((turn * ways + way) * self._pass + first) for way in range(ways)]
            for place, values in zip(places, held, strict=True):
                with b.when(place < self.geo.chunk), b.vector(self.run) as v:
                    b.store(values, self.kernel.staging[self.slot, self._source(place) + v], v)
            for place, values in zip(places, held, strict=True):
                with b.when(self._inside(place, token)):
                    self._add(values, token + place, row)
                    with b.vector(self.run) as v:
                        b.store(self.args.y, values[v], token + place, row + v)

    def _store_elements(self, row: Expr, token: Expr) -> None:
        """Store what lies within N, element by element."""
        with b.loop(-(-self.geo.chunk // self._pass), rolled=True) as turn:
            place = b.bind(turn * self._pass + self.thread // self.runs)
            count = T.min(self.run, self.args.n - row)
            with b.when(self._inside(place, token)), b.loop(count, rolled=True) as index:
                value = self.kernel.staging[self.slot, self._source(place) + index]
                if self.kernel.gemm.residual:
                    value = self._sum_with(value, self.kernel.args.residual[token + place, row + index])
                b.store(self.args.y, value, token + place, row + index)

    def _add(self, values: Any, token: Expr, row: Expr) -> None:
        """Add a run of the residual to staged values, and apply what comes after."""
        added = load_run(self.kernel.args.residual, self.run, self.run, token, row)
        for index, element in enumerate(added or ()):
            b.store(values, self._sum_with(values[index], element), index)

    def _sum_with(self, value: Expr, added: Expr) -> Expr:
        total = T.Cast("float32", value) + T.Cast("float32", added)
        return T.Cast(self.gemm.output, activate(self.kernel.gemm, total))

    def _inside(self, place: Expr, token: Expr) -> Expr:
        """Whether a staged token of the chunk that begins at ``token`` is this tile's to store."""
        inside = T.And(place < self.geo.chunk, token + place < self.args.m)
        return T.And(inside, token + place >= self.own) if self.kernel.stream is not None else inside

    def _source(self, place: Expr) -> Expr:
        """Return where the thread's run of a staged token starts."""
        part = self.thread % self.runs
        if self.wide:
            return place * self.geo.pitch + part * self.run
        return swizzled_run(place, part, self.runs) * self.run
