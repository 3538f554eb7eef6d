"""Tile sizes of a scheduled block graph, and the layout of its shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.lower.blocks.analysis import HALVES, LOOP, STAGES, BlockProgram, gemm_of
from ladder.lower.blocks.fragments import FragmentShape, shape_of
from ladder.lower.blocks.layouts import Candidate, Lifetime, allocate, choose
from ladder.lower.blocks.packed_layout import PackedLayout
from ladder.lower.blocks.schedule import BlockSchedule, releases_of
from ladder.lower.blocks.shared import CHUNK_BYTES, CHUNK_ELEMENTS, TileLayout, copied_layout
from schedules.schedule import check
from targets import TileDevice

SPARE = "chunks that no tile has"
"""Region with 16 bytes of each thread, for those beyond a tile's last chunk (`copies.HeldCopy`)."""

PACKED_ALIGNMENT = 128
"""Alignment in bytes of tiles that tensor copies do not swizzle."""


@dataclass(frozen=True)
class BlockGeometry:
    """Decisions about a kernel before it is emitted.

    device: A GPU with matrix instructions (`fragments.SHAPES`).
    """

    program: BlockProgram
    device: TileDevice
    schedule: BlockSchedule

    def __post_init__(self) -> None:
        plan, steps = self.schedule, self.program.steps
        check(self.looped or plan.sharers == 1, "a block graph without a loop has no steps to share")
        check(
            self.looped or plan.column_warps == 1,
            "columns are split of what a loop accumulates; there is none",
        )
        check(
            not self.direct or plan.sharers * plan.column_warps == 1,
            "a block graph without matrix products is not shared by groups",
        )
        if self.looped and not self.direct:
            self._check_accumulators()
        if plan.products != "mma":
            self._check_warpgroups()
        check(plan.sharers <= steps, f"{plan.sharers} groups share {steps} steps")
        check(plan.stages >= 2, f"a pipeline has at least 2 stages, got {plan.stages}")
        most = self.shape.most_threads
        check(self.threads <= most, f"{self.threads} threads exceed the {most} of a block")
        self._check_groups()
        self._check_interleaved()
        self._check_packed()
        check(
            plan.copies == "lanes" or "tma" in self.device.features,
            f"{self.device.name} has no tensor copies; use copies='lanes'",
        )
        check(
            plan.release in releases_of(self.device),
            f"{self.device.name} launches no kernel early; use release='begin', not {plan.release!r}",
        )
        for node in self.program.loads:
            kind = node.tile.ttype
            check(
                kind.name in HALVES or (kind.name == "float32" if self.to_registers(node) else kind.is_block),
                f"%{node.name} is {kind.name}: products take tiles of 16-bit and quantized types, other"
                " operators those of 16 and 32 bits",
            )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of shared memory exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use fewer stages, groups or smaller tiles",
        )

    def _check_groups(self) -> None:
        """Check that groups can wait for their own warps, and that their stages suit the device's copies."""
        plan, shape = self.schedule, self.shape
        check(
            plan.stages == 2 or not shape.through_registers,
            "copies through registers take 2 stages, not more",
        )
        even = self.program.steps % plan.sharers == 0 and not shape.named_barriers
        check(
            plan.group_warps == 1 or plan.groups == 1 or plan.groups <= shape.named_barriers or even,
            "groups of several warps need named barriers, or as many steps each",
        )

    def _check_warpgroups(self) -> None:
        """Check that warpgroups can compute all products."""
        plan = self.schedule
        check("wgmma" in self.device.features, f"{self.device.name} has no products of warpgroups")
        check(
            plan.copies == "tensor" and plan.row_warps % 4 == 0,
            "products of warpgroups take tensor copies and row_warps of 4 or 8",
        )
        for node in self.program.block.nodes:
            if node.operator == "matmul":
                self._check_warpgroup_product(node)

    def _check_warpgroup_product(self, node: Node) -> None:
        operands = [self.program.block.producer(name) for name in node.inputs]
        users = self.program.users[node.name]
        kinds = [node_attributes(user)["kind"] for user in users if user.operator == "accumulate"]
        check(
            all(tile.operator == "load" and self.is_looped(tile) for tile in operands)
            and len(users) == 1
            and kinds == ["sum"]
            and not node_attributes(node)["transpose_b"],
            f"%{node.name}: warpgroups multiply tiles of the loop, [M, K] with [K, N], for a sum",
        )
        rows, columns = self.program.shape(node.name)
        wide = [self.layouts[tile.name] for tile in operands]
        width = 8 * self.column_fragments(columns)
        check(
            all(isinstance(layout, TileLayout) and layout.pitch == 8 and layout.swizzled for layout in wide)
            and rows == 16 * self.schedule.row_warps
            and width % 64 == 0,
            f"%{node.name}: warpgroups multiply 64 rows each, with multiples of 64 columns, K by 64,"
            f" got {rows} x {columns}",
        )

    def _check_accumulators(self) -> None:
        """Check that what the loop accumulates can be shared as the schedule says."""
        split = self.schedule.column_warps > 1
        for node in self.program.accumulators:
            kind = node_attributes(node)["kind"]
            check(
                kind != "last" or not self.merges, f"%{node.name} keeps the last step: groups share no loop"
            )
            wide = self.program.shape(node.name)[1] > 1
            source = self.program.block.producer(node.inputs[0])
            in_place = self._is_in_place(source)
            check(
                not (split and wide) or in_place,
                f"%{node.name} is taken within the loop as a whole; use column_warps=1",
            )
        for node in self.program.block.nodes if split else ():
            inner = node.operator == "matmul" and self.program.stages[node.name] == LOOP
            check(
                not inner or self._is_in_place(node),
                f"%{node.name} is taken within the loop as a whole; use column_warps=1",
            )

    def _is_in_place(self, source: Node) -> bool:
        """Whether a value is a product that one sum alone takes, so that warps add to their columns of it."""
        users = self.program.users[source.name]
        alone = source.operator == "matmul" and len(users) == 1 and users[0].operator == "accumulate"
        return alone and node_attributes(users[0])["kind"] == "sum"

    @cached_property
    def shape(self) -> FragmentShape:
        """Spread of fragments over the lanes of a warp."""
        return shape_of(self.device)

    def _check_interleaved(self) -> None:
        """Check that columns, whose fragments lie interleaved by twos, make up whole pairs."""
        for node in self.program.block.nodes if self.interleaved else ():
            columns = 1 if node.operator in ("input", "store") else self.program.shape(node.name)[1]
            wide = 2 * self.shape.columns
            check(
                columns == 1 or columns % wide == 0,
                f"%{node.name}: beside packed weights columns are computed by {wide}, got {columns}",
            )

    def _check_packed(self) -> None:
        """Check that products take packed weights as their rows lie, those of two fragments at a time."""
        for node in self.program.block.nodes:
            if node.operator != "matmul" or not self._is_packed(node.inputs[1]):
                continue
            first, columns = self.program.block.producer(node.inputs[0]), self.program.shape(node.name)[1]
            check(
                self.column_fragments(columns) % 2 == 0,
                f"%{node.name}: packed rows are taken by {2 * self.shape.columns},"
                f" {self.schedule.column_warps} warps share {columns}",
            )
            check(
                not self.shape.through_registers or first in self.shared_loads,
                f"%{node.name}: packed weights are multiplied by loaded tiles on AMD GPUs",
            )

    def _is_packed(self, value: str) -> bool:
        """Whether a value is a packed weight, converted to operands."""
        node = self.program.block.producer(value)
        return node.operator == "convert" and self.program.block.tile(node.inputs[0]).ttype.is_block

    @property
    def interleaved(self) -> bool:
        """Whether the columns of two fragments lie interleaved, as the rows of packed weights do."""
        return self.shape.columns > CHUNK_ELEMENTS and any(n.tile.ttype.is_block for n in self.program.loads)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.warps * self.shape.lanes

    @property
    def looped(self) -> bool:
        return any(stage == LOOP for stage in self.program.stages.values())

    @cached_property
    def direct(self) -> bool:
        """Whether there are no matrix products: tiles are then loaded into registers."""
        return all(node.operator != "matmul" for node in self.program.block.nodes)

    @cached_property
    def flat(self) -> bool:
        """Whether threads have runs of rows (`lanes.FlatLanes`): without products, where columns allow it."""
        run = 8 * self.shape.lanes * self.schedule.row_warps
        return self.direct and all(
            self.program.shape(node.name)[1] % run == 0 and node.tile.ttype.name in HALVES
            for node in self.program.loads
        )

    def row_fragments(self, rows: int) -> int:
        """Return the fragments along rows of a warp.

        Raises ScheduleError if the group's warps cannot share them evenly.
        """
        if self.flat or rows == 1:
            return rows
        count, warps = -(-rows // 16), self.schedule.row_warps
        check(count % warps == 0, f"{warps} warps do not share {rows} rows by 16 evenly")
        return count // warps

    def fragments(self, shape: tuple[int, int]) -> int:
        """Return the accumulator fragments that a warp has of a value."""
        return self.row_fragments(shape[0]) * self.column_fragments(shape[1])

    def column_fragments(self, columns: int) -> int:
        """Return the fragments along columns of what a warp accumulates.

        Raises ScheduleError if the group's warps cannot share them evenly, in pairs.
        """
        warps = self.schedule.column_warps
        if self.flat:
            return -(-columns // (8 * self.shape.lanes * self.schedule.row_warps))
        if columns == 1 or warps == 1:
            return -(-columns // self.shape.columns)
        check(columns % (16 * warps) == 0, f"{warps} warps do not share {columns} columns by 16 evenly")
        return columns // self.shape.columns // warps

    @property
    def least_registers(self) -> int:
        """Registers of a thread that accumulators take, and products that are not accumulated in place.

        Raises ScheduleError if the warps cannot share a value.
        """
        total = 0
        for node in self.program.block.nodes:
            if node.operator in ("accumulate", "matmul"):
                alone = len(self.program.users[node.name]) == 1
                in_place = alone and self.program.users[node.name][0].operator == "accumulate"
                fragments = self.fragments(self.program.shape(node.name))
                total += 0 if in_place else self.shape.elements * fragments
        return total

    @cached_property
    def layouts(self) -> Mapping[str, TileLayout | PackedLayout]:
        """The layout of every loaded tile, chosen together."""
        candidates: list[Candidate] = []
        found: dict[str, TileLayout | PackedLayout] = {}
        for node in self.shared_loads:
            rows, columns = self.program.shape(node.name)
            if node.tile.ttype.is_block:
                found[node.name] = self._packed(node, rows, columns)
                continue
            self._require_chunks(node.name, columns)
            copies = self.schedule.groups * self.schedule.stages if self.is_looped(node) else 1
            reads = self.program.steps if self.is_looped(node) else 1
            if self.is_looped(node) and self.schedule.copies == "tensor":
                found[node.name] = copied_layout(node.name, rows, columns // CHUNK_ELEMENTS)
                continue
            chunks, swizzles = columns // CHUNK_ELEMENTS, not self.shape.through_registers
            candidates.append(Candidate(node.name, rows, chunks, copies, reads, swizzles))
        budget = self.device.shared_per_block - self.spill_bytes
        return {**found, **choose(candidates, budget)}

    def _require_chunks(self, name: str, columns: int) -> None:
        whole = columns % CHUNK_ELEMENTS == 0
        check(whole, f"%{name}: rows of {columns} are no multiple of {CHUNK_ELEMENTS}")

    def _packed(self, node: Node, rows: int, columns: int) -> PackedLayout:
        shape = self.program.block.tile(node.inputs[0]).known_shape
        gemm = gemm_of(node.tile.ttype, shape, self.program.operand)
        check(
            gemm.zero != "float" or "flushes.float16" not in self.device.features,
            f"{self.device.name} takes small float16 operands for 0: no real zero points",
        )
        return PackedLayout(gemm, rows, columns)

    def is_looped(self, node: Node) -> bool:
        """Whether a tile changes from step to step."""
        return self.program.stages[node.name] == LOOP

    def to_registers(self, node: Node) -> bool:
        """Whether threads load a tile into registers: without products, or a column before the loop."""
        return self.direct or (self.program.shape(node.name)[1] == 1 and not self.is_looped(node))

    @cached_property
    def shared_loads(self) -> list[Node]:
        """Loads of tiles that are copied into shared memory."""
        return [node for node in self.program.loads if not self.to_registers(node)]

    @cached_property
    def spills(self) -> Mapping[str, TileLayout]:
        """Computed values that a product takes as its second operand: they pass through shared memory."""
        found = {}
        for node in self.program.block.nodes:
            if node.operator != "matmul":
                continue
            for name in self._computed_parts(node.inputs[1]):
                rows, columns = self.program.shape(name)
                self._require_chunks(name, columns)
                chunks = columns // CHUNK_ELEMENTS
                found[name] = TileLayout(rows, chunks, chunks | 1)
        return found

    @cached_property
    def shared_rows(self) -> Mapping[str, bool]:
        """Values of one row that warps share through shared memory; whether as reciprocals.

        Element-wise operators on a reduction over rows, of one row itself, are computed once by the warp that
        shares the row, not by every warp.
        """
        return dict(self._followed(node) for node in self.program.block.nodes if self._reduces_rows(node))

    def _reduces_rows(self, node: Node) -> bool:
        rank = len(node.tile.shape)
        reduces = node.operator in ("reduce_sum", "reduce_max")
        return reduces and node_attributes(node)["axis"] % rank == rank - 2

    def _followed(self, node: Node) -> tuple[str, bool]:
        """Return the last value that follows from one alone, and whether all that takes it divides by it."""
        users = self.program.users[node.name]
        if len(users) == 1 and self._follows(users[0], node):
            return self._followed(users[0])
        shape = self.program.shape(node.name)
        divided = all(
            user.operator == "div"
            and user.inputs[1] == node.name != user.inputs[0]
            and self.program.shape(user.name) != shape
            for user in users
        )
        return node.name, divided

    def _follows(self, user: Node, node: Node) -> bool:
        """Whether a user of a row is a row of the same stage, computed of it and of numbers."""
        others = [self.program.block.producer(name) for name in user.inputs if name != node.name]
        return (
            get_operator(user.operator).elementwise
            and self.program.shape(user.name) == self.program.shape(node.name)
            and self.program.stages[user.name] == self.program.stages[node.name]
            and all(other.operator == "constant" for other in others)
        )

    def _computed_parts(self, value: str) -> list[str]:
        node = self.program.block.producer(value)
        if node.operator == "concat":
            return [name for part in node.inputs for name in self._computed_parts(part)]
        return [] if node.operator == "load" or self._is_packed(value) else [value]

    @property
    def spill_bytes(self) -> int:
        """Shared memory of spilled values."""
        columns = sum(4 * self.program.shape(name)[1] for name in self.shared_rows)
        return (sum(layout.bytes for layout in self.spills.values()) + columns) * self.schedule.groups

    # ---- regions of shared memory ---------------------------------------------------------------------
    @cached_property
    def stage_offsets(self) -> Mapping[str, int]:
        """Offset of each loop tile within a stage; packed ones come last, which need no alignment."""
        offsets, at = {}, 0
        for name in self._staged:
            offsets[name] = at
            at += self._padded_bytes(name)
        return offsets

    @cached_property
    def _staged(self) -> list[str]:
        names = [node.name for node in self.shared_loads if self.is_looped(node)]
        return sorted(names, key=lambda name: not isinstance(self.layouts[name], TileLayout))

    def _padded_bytes(self, name: str) -> int:
        layout = self.layouts[name]
        alignment = self.alignment if isinstance(layout, TileLayout) else PACKED_ALIGNMENT
        return -(-layout.bytes // alignment) * alignment

    @property
    def alignment(self) -> int:
        """Alignment of tiles in bytes: that of the swizzle."""
        return 1024 if self.schedule.copies == "tensor" else PACKED_ALIGNMENT

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of one group."""
        size = sum(map(self._padded_bytes, self.stage_offsets))
        return -(-size // self.alignment) * self.alignment

    @property
    def barriers(self) -> int:
        """Barriers in shared memory: one per stage, for tensor copies."""
        tensor = self.schedule.copies == "tensor" and bool(self.stage_offsets)
        return self.schedule.groups * self.schedule.stages if tensor else 0

    @property
    def merges(self) -> bool:
        """Whether accumulators are joined after the loop."""
        return self.schedule.sharers * self.schedule.column_warps > 1

    @cached_property
    def published(self) -> Mapping[str, int]:
        """First byte of each accumulator in what a warp publishes."""
        offsets, at = {}, 0
        for name in self.published_values:
            offsets[name] = at
            at += self.fragments(self.program.shape(name)) * self.fragment_bytes(name)
        return offsets

    def fragment_bytes(self, name: str) -> int:
        """Return the bytes of a fragment that a warp publishes."""
        return self.shape.published_bytes(self.program.shape(name)[1])

    @property
    def published_values(self) -> tuple[str, ...]:
        """Accumulators, and the maxima that some are scaled by."""
        nodes = self.program.accumulators
        maxima = dict.fromkeys(node.inputs[1] for node in nodes if len(node.inputs) == 2)
        return (*(node.name for node in nodes), *maxima)

    @property
    def published_bytes(self) -> int:
        """Bytes that a warp publishes."""
        names = self.published_values
        return sum(self.fragments(self.program.shape(name)) * self.fragment_bytes(name) for name in names)

    @cached_property
    def regions(self) -> Mapping[str, Lifetime]:
        """Buffers in shared memory, and the stages of the kernel in which each is alive."""
        plan, found = self.schedule, {}
        if self.direct:
            sums = [
                node for node in self.program.block.nodes if node.operator in ("reduce_sum", "reduce_max")
            ]
            sums += self.program.accumulators
            return {f"row sums {node.name}": Lifetime(4 * plan.warps, 0, 2) for node in sums}
        for node in self.shared_loads:
            if not self.is_looped(node):
                last = max((self._last_use(user) for user in self.program.users[node.name]), default=0)
                found[node.name] = Lifetime(self.layouts[node.name].bytes, 0, last)
        if self.stage_offsets:
            found["stages"] = Lifetime(plan.groups * plan.stages * self.stage_bytes, 0, 1)
        for name, layout in self.spills.items():
            first = STAGES.index(self.program.stages[name])
            found[f"spill {name}"] = Lifetime(
                plan.groups * layout.bytes, first, max(first, self._last_use_of(name))
            )
        for name in self.shared_rows:
            first = STAGES.index(self.program.stages[name])
            last = max(first, self._last_use_of(name))
            found[f"columns {name}"] = Lifetime(4 * plan.groups * self.program.shape(name)[1], first, last)
        if self.merges:
            found["sums"] = Lifetime(plan.warps * self.published_bytes, 2, 2)
        return found

    def _last_use_of(self, name: str) -> int:
        return max(self._last_use(user) for user in self.program.users[name])

    def _last_use(self, node: Node) -> int:
        """Return the last stage that may compute a node: values are computed where they are used."""
        stage = STAGES.index(self.program.stages[node.name])
        if node.operator == "accumulate":
            stage = STAGES.index(LOOP)
        users = self.program.users.get(node.name, ())
        inner = [] if node.operator == "accumulate" else [self._last_use(user) for user in users]
        return max([stage, *inner])

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """First byte of each region, by exact allocation; of `SPARE` where registers are few and it fits."""
        found = allocate(self.regions, alignment=self.alignment)
        end = -(-self._end(found) // CHUNK_BYTES) * CHUNK_BYTES
        wanted = self.shape.few_registers and bool(self.shared_loads)
        fits = end + self.threads * CHUNK_BYTES <= self.device.shared_per_block
        return {**found, SPARE: end} if wanted and fits else found

    def _end(self, offsets: Mapping[str, int]) -> int:
        sizes = {SPARE: self.threads * CHUNK_BYTES} | {name: part.size for name, part in self.regions.items()}
        return max((at + sizes[name] for name, at in offsets.items()), default=CHUNK_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self._end(self.offsets) + 8 * self.barriers
