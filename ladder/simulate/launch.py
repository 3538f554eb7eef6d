"""One kernel launch on the simulator: from a PrimFunc and its arrays to what it computed and did wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ladder.lower.passes import as_generated
from ladder.simulate.banks import Conflicts
from ladder.simulate.cohort import Cohort
from ladder.simulate.extents import SimulationError, bind_extents
from ladder.simulate.findings import Finding, Log
from ladder.simulate.hardware import Hardware
from ladder.simulate.machine import ORDERS, Machine
from ladder.simulate.memory import Memory, Tensor
from ladder.simulate.order import Agents
from ladder.simulate.program import flatten
from ladder.simulate.translate import Calls, Translator
from ladder.simulate.values import Array
from targets import TileDevice, get_device
from tile_types.errors import DeviceError, positive_number, require_name, whole_number

BATCH_WARPS = 96
"""Warps that are simulated together: enough to share numpy's cost per statement, few enough for memory."""


STAGES = {
    "emitted": "TIR as the emitters write it",
    "passed": "TIR as TVM's passes leave it to the code generator",
    "code": "machine code, of AMD GPUs only",
}
"""Stages of a kernel that can be executed."""


def calls_of(device: TileDevice) -> Calls:
    """Return the semantics of what kernels for a device call.

    Raises DeviceError if it is no GPU.
    """
    if device.kind == "cuda":
        from ladder.simulate.nvidia import CALLS

        return CALLS
    if device.kind == "rocm":
        from ladder.simulate.amd import calls_for

        return calls_for(device.arch)
    raise DeviceError(
        f"the simulator executes kernels of NVIDIA and AMD GPUs, not those of {device.name};"
        " name one as the target, e.g. target='cuda/sm_90a'"
    )


@dataclass(frozen=True)
class BankReport:
    """Bank conflicts of one statement.

    conflicts: Passes taken, and the fewest possible.
    number: The statement's number.
    log: Knows the statement; its line is looked up when it is asked for.
    """

    conflicts: Conflicts
    number: int = field(repr=False)
    log: Log = field(repr=False)

    def __str__(self) -> str:
        line, text = self.log.place(self.number)
        return f"{self.conflicts.extra} extra passes [line {line}: {text}]"


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulated launch.

    outputs: The output arrays, in the order of the arguments.
    findings: Everything that was wrong; empty for a correct kernel.
    notes: What may be intended, e.g. reads of bytes that nothing wrote and nobody uses.
    traffic: Bytes moved, by level and tensor.
    bank_conflicts: Statements whose accesses conflict, worst first.
    counts: Matrix instructions, by kind.
    blocks: Blocks that were simulated, of how many.
    relative_error: Frobenius norm of the error over that of what was expected; NaN if nothing was.
    """

    outputs: tuple[Array, ...]
    findings: tuple[Finding, ...]
    traffic: Mapping[str, int]
    bank_conflicts: tuple[BankReport, ...]
    notes: tuple[Finding, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[int, int] = (0, 0)
    relative_error: float = float("nan")

    @property
    def y(self) -> Array:
        """The last output: that of a GEMM."""
        return self.outputs[-1]

    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    def report(self) -> str:
        """Return the findings as text, or that there are none."""
        return "\n".join(map(str, self.findings)) or "no findings"


def simulate_launch(
    function: Any,
    arrays: Sequence[Array | int],
    *,
    target: str | TileDevice = "cuda/sm_90a",
    outputs: Sequence[int] = (-1,),
    order: str = "together",
    seed: int = 0,
    blocks: int | None = None,
    names: Sequence[str] = (),
    stage: str = "emitted",
) -> SimulationResult:
    """Execute a whole kernel launch on the CPU, all threads, and check everything that it does.

    function: A TIRx PrimFunc as the emitters build it, or as `ladder.lower.passes.as_it_runs` leaves it.
    arrays: C-contiguous numpy arrays (ml_dtypes for narrow floats) in the function's argument order, numbers
        for integer arguments. Outputs are overwritten.
    target: The GPU that the function was emitted for.
    outputs: Positions of the arrays that the kernel writes.
    order: Order of warps, one of `ladder.simulate.machine.ORDERS`.
    seed: Of the order ``"random"``.
    blocks: Simulate only about so many blocks, spread over the grid (whole clusters); all by default, and
        where blocks of different clusters wait for each other.
    names: How findings and traffic call the arrays.
    stage: What is executed, one of `STAGES`; ``order``, ``seed`` and ``blocks`` do not apply to machine code.
    Raises DeviceError if the target is no GPU.
    Raises UnknownCallError if the kernel calls something that the simulator has no semantics for; names it.
    Raises SimulationError if the arrays do not fit the function's arguments.
    """
    for what, name, known in (("order of warps", order, ORDERS), ("stage of a kernel", stage, STAGES)):
        require_name(what, name, known)
    whole_number(seed, "seed")
    if blocks is not None:
        positive_number(blocks, "blocks", "None for all")
    device = get_device(target)
    calls = calls_of(device)
    called = names or [f"argument {index}" for index in range(len(arrays))]
    named = zip(called, arrays, strict=True)
    tensors = [array if isinstance(array, int) else Tensor(name, array) for name, array in named]
    if stage == "code":
        return _on_code(function, device, arrays, outputs)
    kernels: Mapping[str, Any] = {}
    if stage == "passed":
        function, kernels = as_generated(function, device.tvm_target)
    run = _LaunchRun(function, tensors, tuple(outputs), calls, kernels)
    return run.execute(order, seed, blocks)


def _on_code(
    function: Any, device: TileDevice, arrays: Sequence[Array | int], outputs: Sequence[int]
) -> SimulationResult:
    """Compile a function and execute the machine code."""
    from ladder.simulate.gcn.host import execute

    reports = execute(function, device, arrays)
    found = tuple(finding for report in reports for finding in report.findings)
    chosen = [arrays[i] for i in outputs]
    counts = sum((report.counts for report in reports), Counter[str]())
    results = tuple(array for array in chosen if not isinstance(array, int))
    return SimulationResult(results, found, {}, (), counts=dict(counts))


class _LaunchRun:
    """One launch being simulated."""

    def __init__(
        self,
        function: Any,
        given: list[Tensor | int],
        outputs: tuple[int, ...],
        calls: Calls,
        kernels: Mapping[str, Any],
    ) -> None:
        self.function, self.lanes = function, calls.lanes
        values = bind_extents(function, [x if isinstance(x, int) else x.array for x in given])
        chosen = [given[i] for i in outputs]
        self.outputs = [tensor for tensor in chosen if not isinstance(tensor, int)]
        for tensor in self.outputs:
            tensor.track_stores()
        placed = zip(function.params, given, strict=True)
        buffers = {buffer: tensor for buffer, tensor in placed if isinstance(tensor, Tensor)}
        self.translator = Translator(function, values, buffers, calls, kernels)
        self.program = flatten(self.translator.node())
        self.launch = self.translator.launch
        self.log = Log(self.translator.statements, self.translator.function)
        self.traffic: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.banks: dict[int, Conflicts] = {}

    def execute(self, order: str, seed: int, blocks: int | None) -> SimulationResult:
        """Simulate batches of clusters and gather the results."""
        launch = self.launch
        if launch.threads % self.lanes or not launch.grid:
            raise SimulationError(f"a kernel of {launch.threads} threads and grid {launch.grid}")
        total = int(np.prod(launch.grid))
        agents = Agents(launch.threads // self.lanes, launch.cluster)
        chosen = self._chosen(total // launch.cluster, blocks)
        per_batch = len(chosen) if launch.together else max(BATCH_WARPS // agents.all_warps, 1)
        for start in range(0, len(chosen), per_batch):
            self._batch(agents, chosen[start : start + per_batch], order, seed)
        if len(chosen) * launch.cluster == total:
            self._check_written()
        for tensor in self.outputs:
            tensor.copy_back()
        return self._result(len(chosen) * launch.cluster, total)

    def _chosen(self, clusters: int, blocks: int | None) -> Array:
        """Return which clusters to simulate."""
        if blocks is None or self.launch.together:
            return np.arange(clusters)
        count = min(max(-(-blocks // self.launch.cluster), 1), clusters)
        return np.unique(np.linspace(0, clusters - 1, count).astype(np.int64))

    def _batch(self, agents: Agents, clusters: Array, order: str, seed: int) -> None:
        count = len(clusters) * agents.blocks
        unit = self.launch.narrowest
        shared, banks = self.launch.shared_bytes, self.translator.calls.banks
        memory = Memory(agents, count, shared, unit, self.log, self.traffic, banks)
        together = self.launch.unit
        hardware = Hardware(count, memory, self.lanes)
        numbers = (clusters[:, None] * agents.blocks + np.arange(agents.blocks)).reshape(-1)
        slots = self.translator.slots
        set_up = partial(self._set_up, numbers)
        Machine(self.program, hardware, order, seed, together, slots, set_up).run()
        self.counts.update(hardware.counts)
        for statement, entry in memory.banks.statements.items():
            known = self.banks.setdefault(statement, Conflicts())
            known.instructions += entry.instructions
            known.passes += entry.passes
            known.ideal += entry.ideal

    def _set_up(self, numbers: Array, c: Cohort) -> None:
        launch, slots = self.launch, c.slots
        block = numbers[c.block].astype(np.int32)
        rest = block
        for slot, extent in zip(launch.block_slots, launch.grid, strict=True):
            slots[slot] = rest % extent
            rest = rest // extent
        if launch.rank_slots:
            slots[launch.rank_slots[0]] = block % launch.cluster
        within = (c.warps % c.machine.block_warps)[:, None] * self.lanes + np.arange(self.lanes)
        slots[launch.thread_slot] = within.astype(np.int32)

    def _check_written(self) -> None:
        """Report outputs that nobody stored, unless the kernel cannot have been expected to finish."""
        for tensor in self.outputs:
            assert tensor.stored is not None
            missing = int((~tensor.stored[: tensor.size]).sum())
            if missing:
                message = f"{missing} of {tensor.size} bytes of {tensor.name}"
                self.log.add("unwritten", -1, message)

    def _result(self, simulated: int, total: int) -> SimulationResult:
        worst = sorted(self.banks.items(), key=lambda item: -item[1].extra)
        reports = tuple(BankReport(entry, statement, self.log) for statement, entry in worst if entry.extra)
        return SimulationResult(
            tuple(tensor.array for tensor in self.outputs),
            self.log.findings(),
            dict(self.traffic),
            reports,
            self.log.findings(notes=True),
            dict(self.counts),
            (simulated, total),
        )
