"""From a problem and its schedules to a shared library with one entry per schedule."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.ir import scalars
from ladder.ir.gemm import Gemm
from ladder.lower.tvm_lock import tvm_lock
from schedules.codes import is_renumbered
from schedules.cpu_policy import tile_program
from schedules.footprint import block_threads
from schedules.rules import serves
from schedules.schedule import Plan, Schedule, TransformList
from targets import TileDevice, get_device
from tile_types.errors import ScheduleError, unknown_name

if TYPE_CHECKING:
    from ladder.ir.attention import Attention
    from ladder.lower.chain.attention_rows import RowsForm
    from ladder.lower.chain.prologue import PrologueForm
    from schedules.attention import AnySchedule

KERNELS = {
    "gemv": "ladder.lower.cuda.gemv:Gemv",
    "digits": "ladder.lower.cuda.digits:Digits",
    "mma": "ladder.lower.cuda.mma:Mma",
    "wgmma": "ladder.lower.cuda.wgmma:Wgmma",
    "tcgen05": "ladder.lower.cuda.tcgen05:Tcgen05",
    "mfma": "ladder.lower.rocm.gemm:WaveGemm",
    "mfma_groups": "ladder.lower.rocm.gemm:WaveGemm",
    "dot": "ladder.lower.rocm.gemm:WaveGemm",
    "wmma": "ladder.lower.rocm.gemm:WaveGemm",
    "wmma_split": "ladder.lower.rocm.gemm:WaveGemm",
    "dot32": "ladder.lower.rocm.gemm:WaveGemm",
}
"""Pipeline -> ``module:class`` of its kernels, made of ``(gemm, device, schedule)``; ``emit()`` writes it."""

SKELETONS = {"cpu": "ladder.lower.skeletons.loopnest:emit"}
"""Skeleton -> ``module:function`` that emits a tile program."""

ATTENTION = {"cuda": "ladder.lower.cuda.attention:emit", "rocm": "ladder.lower.rocm.attention:emit"}
"""TVM target kind -> ``module:function``: ``(form, device, schedule, name)`` emits a kernel of attention."""

SCALED = {"cuda": "ladder.lower.cuda.scaled:emit", "rocm": "ladder.lower.rocm.scaled:emit"}
"""TVM target kind -> ``module:function``: ``(form, device, schedule, name)`` emits a block-scaled product."""

COMPILERS = {
    "cuda": "ladder.lower.cuda.toolchain:compile_functions",
    "rocm": "ladder.lower.rocm.toolchain:compile_functions",
    "llvm": "ladder.lower.cpu.toolchain:compile_functions",
}
"""TVM target kind -> ``module:function`` that compiles PrimFuncs into a library."""


LATER_STAGES = {
    "asm": ("llvm", "ladder.lower.cpu.toolchain:assembly_of"),
    "ptx": ("cuda", "ladder.lower.cuda.toolchain:ptx_of"),
    "sass": ("cuda", "ladder.lower.cuda.toolchain:sass_of"),
}
"""Stage that is made on demand -> the stage it is made from, and ``module:function`` that does."""


@dataclass(frozen=True)
class BuiltModule:
    """A shared library on disk and what is known about it.

    path: The ``.so``.
    entries: Name of the entry that serves each entry of the plan.
    sources: Stage (``"tir"``, ``"cuda"``, ...) -> text.
    log: What the device compiler printed.
    resources: Kernel -> registers, stack, spills, shared memory, as the device compiler reports them.
    """

    path: Path
    entries: tuple[str, ...]
    sources: Mapping[str, str]
    log: str = ""
    resources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def resolve(table: Mapping[str, str], kind: str, name: str) -> Callable[..., Any]:
    """Import what a table names for ``name``."""
    if name not in table:
        raise unknown_name(kind, name, table)
    module, _, function = table[name].partition(":")
    result: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return result


def entry_name(gemm: Gemm, device: str, schedule: Schedule) -> str:
    """Return a kernel's name: its pipeline and a digest of all that shapes its code."""
    pipeline = str(schedule.pipeline)  # type: ignore[attr-defined]
    steps = [True] if is_renumbered(gemm.weight) and get_device(device).is_gpu else []
    text = json.dumps([gemm.shape_free(), device, str(schedule), *steps], sort_keys=True)
    return f"ladder_{pipeline}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def emit(gemm: Gemm, device: TileDevice, schedule: Schedule, name: str) -> Any:
    """Emit one kernel, generic in M, N and K.

    gemm: The problem; only its ``shape_free()`` part matters.
    device: What to emit for; it need not be present.
    schedule: Says which pipeline, and its tiles.
    name: Symbol of the kernel's host entry.
    Returns: A TIRx PrimFunc.
    Raises DeviceError if the device has no core for the activations.
    Raises ScheduleError if the schedule does not fit the problem or the device, or its pipeline does not
        serve the problem.
    """
    from ladder.lower import builder

    pipeline = getattr(schedule, "pipeline", None)
    if pipeline is None:
        raise ScheduleError(f"{type(schedule).__name__} names no pipeline")
    if not serves(gemm, pipeline):
        raise ScheduleError(f"pipeline {pipeline!r} does not serve {', '.join(gemm.extras)}")
    write = _writer(gemm, device, schedule, pipeline)
    with builder.function(name) as result, scalars.using(_cheap_functions(gemm, device)):
        write()
    return result.func


WITH_PROLOGUES = ("gemv", "digits")
"""Pipelines whose kernels may compute their activation rows themselves."""


def emit_with_prologue(
    form: PrologueForm, gemm: Gemm, device: TileDevice, schedule: Schedule, name: str
) -> Any:
    """Emit a product whose activation rows a chain computes in its kernel.

    It takes the chain's inputs, the chain's other results, then what the product takes but x.

    Raises ScheduleError if the pipeline has no prologues, or this one does not fit.
    """
    from ladder.lower import builder
    from ladder.lower.chain.prologue import ChainPrologue

    pipeline = str(getattr(schedule, "pipeline", ""))
    if pipeline not in WITH_PROLOGUES or device.kind != "cuda":
        raise ScheduleError(f"kernels of pipeline {pipeline!r} have no prologues")
    refused = set(gemm.extras) - {"gate"}
    if refused or form.columns != gemm.k or form.kind != gemm.activation:
        asked = ", ".join(sorted(refused)) or f"{form.columns} {form.kind} for {gemm.k} {gemm.activation}"
        raise ScheduleError(f"a prologue is not for {asked}")
    kernel = resolve(KERNELS, "pipeline", pipeline)
    # Nothing may be read before the wait for the kernel before, whatever is known of arguments.
    with builder.function(name, noalias=False) as result, scalars.using(_cheap_functions(gemm, device)):
        prologue = ChainPrologue(form, device, block_threads(schedule))  # type: ignore[arg-type]
        kernel(gemm, device, schedule, prologue).emit()
    return result.func


def emit_attention_with_rows(
    rows: RowsForm, form: Attention, device: TileDevice, schedule: AnySchedule, name: str
) -> Any:
    """Emit attention whose q, and new keys and values, a chain makes in its kernel.

    It takes the chain's inputs but the caches, then what attention takes but q.

    Raises ScheduleError if the chain makes no such rows, or blocks have too few warps for them.
    """
    from ladder.lower import builder
    from ladder.lower.chain.attention_rows import AttentionRows
    from ladder.lower.cuda.attention import emit_body
    from schedules.attention import AttentionSchedule

    if not isinstance(schedule, AttentionSchedule) or form.stored != form.ttype:
        raise ScheduleError(f"attention over {form.stored} on {device.name} makes no rows")
    with builder.function(name, noalias=False) as result:
        emit_body(form, device, schedule, AttentionRows(rows, form, device, schedule))
    return result.func


def _writer(gemm: Gemm, device: TileDevice, schedule: Schedule, pipeline: str) -> Callable[[], None]:
    """Return what writes the body: a skeleton that reads a tile program, or the pipeline's own class."""
    if isinstance(schedule, TransformList):
        return partial(resolve(SKELETONS, "skeleton", pipeline), tile_program(gemm, device, schedule))
    kernel = resolve(KERNELS, "pipeline", pipeline)
    return lambda: kernel(gemm, device, schedule).emit()  # it declares its arguments when it is made


def _cheap_functions(gemm: Gemm, device: TileDevice) -> Mapping[str, Callable[..., Any]]:
    """Return what functions become in the epilogue of a kernel."""
    from ladder.lower import builder

    if device.kind != "cuda":
        return {}
    if gemm.output not in ("float16", "bfloat16"):
        return {"keep": builder.bind}
    from ladder.lower.cuda.functions import CHEAP

    return {**CHEAP, "keep": builder.bind}


def emit_quantizer(plan: Any, device: TileDevice, name: str) -> Any:
    """Emit the kernel that quantises tokens as a `schedules.quantization.Quantization` says.

    Raises ConversionError if the device does not multiply the codes.
    Raises ScheduleError if its threads do not fit the device.
    """
    from ladder.lower import builder
    from ladder.lower.chain.gpu import DIALECTS
    from ladder.lower.gpu.quantize import Quantizer

    device.core_for(plan.activation)
    with builder.function(name) as result:
        Quantizer(plan, DIALECTS[device.kind](device)).emit()
    return result.func


def build(gemm: Gemm, device: TileDevice, plan: Plan, folder: Path | None = None) -> BuiltModule:
    """Compile every schedule of a plan into one library; equal schedules compile once.

    gemm: The problem.
    device: What to compile for; it need not be present.
    plan: Schedules by M.
    folder: Where to write the library; a new temporary folder by default.
    Raises MissingToolError if a compiler is not installed.
    Raises CompilerError if the device compiler rejects a kernel.
    Raises ScheduleError if a schedule does not fit the problem or the device.
    """
    schedules = {entry_name(gemm, device.name, schedule): schedule for _, schedule in plan.entries}
    compile_functions = resolve(COMPILERS, "target kind", device.kind)
    folder = Path(tempfile.mkdtemp(prefix="ladder-build-")) if folder is None else folder
    library = folder / "kernel.so"
    with tvm_lock():
        functions = {name: emit(gemm, device, schedule, name) for name, schedule in schedules.items()}
        result = compile_functions(functions, device, library)
        sources = {"tir": "\n".join(function.script() for function in functions.values())}
    sources[result.language] = result.source
    entries = tuple(entry_name(gemm, device.name, schedule) for _, schedule in plan.entries)
    return BuiltModule(library, entries, sources, result.log, result.resources)


def build_function(emitter: Callable[[str], Any], name: str, device: TileDevice, folder: Path) -> BuiltModule:
    """Compile the one function that ``emitter(name)`` emits, for kernels that are no GEMM."""
    compile_functions = resolve(COMPILERS, "target kind", device.kind)
    path = folder / "kernel.so"
    with tvm_lock():
        function = emitter(name)
        result = compile_functions({name: function}, device, path)
        sources = {"tir": function.script(), result.language: result.source}
    return BuiltModule(path, (name,), sources, result.log, result.resources)


def derive_stage(stage: str, sources: Mapping[str, str], device: TileDevice) -> str | None:
    """Make a stage that builds do not keep from one that they do; None if the target has no such stage.

    Raises MissingToolError if the compiler or the disassembler is not installed.
    """
    origin, _ = LATER_STAGES.get(stage, ("", ""))
    if origin not in sources:
        return None
    functions = {name: function for name, (_, function) in LATER_STAGES.items()}
    return str(resolve(functions, "stage", stage)(sources[origin], device))
