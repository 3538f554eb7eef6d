"""Facts that `ladder report` gathers about a model: its plan, costs of steps, and why they end there."""

from __future__ import annotations

import importlib
import inspect
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ladder.cli.console import Progress, silent
from ladder.installation import ladder_version, tvm_version
from ladder.ir.extents import bind_shape, size_names
from ladder.runtime.compile import family_of, runs_code_of, target_of
from ladder.runtime.model.plan import make_plan
from ladder.runtime.model.profile import Peaks, StepCost, cores_of, peaks_of, plan_costs, step_times
from targets import get_device
from tile_types.arrays import torch_dtype
from tile_types.errors import ArtifactError, LadderError, ParseError, ShapeError

if TYPE_CHECKING:
    from ladder.api.onnx_model import OnnxModel
    from ladder.runtime.model.executable import Executable
    from ladder.runtime.model.plan import ModelPlan
    from ladder.runtime.model.program import Program
    from ladder.runtime.model.whole import WholeModel
    from targets import TileDevice
    from tile_types.tile import Extent

PYTHON = "python:"
"""How a target begins that names a function: ``python:module:function``."""

COLUMNS = ("step", "kind", "executor", "operators", "least µs", "measured µs")
LONGEST = 60
"""Characters of operators in a table."""

LARGER = (16, 64, 256, 1024)
"""Sizes that are tried where a model does not take 1: convolutions and frames want a window at least."""


@dataclass(frozen=True)
class ModelReport:
    """The report.

    name: What was asked for.
    device, peaks: What it is for, and what that can do.
    sizes: The symbolic sizes that the costs are for.
    steps: Every step of the plan.
    not_measured: Why nothing was timed; empty where everything was.
    call_us: Median time of a whole call.
    stored: Bytes of the tensors that the model keeps.
    arena, unshared: Bytes of intermediate results: as laid out, and side by side.
    date: When, UTC.
    """

    name: str
    device: str
    peaks: Peaks
    sizes: Mapping[str, int]
    steps: tuple[StepCost, ...]
    not_measured: str
    call_us: float | None
    stored: int
    arena: int
    unshared: int
    versions: Mapping[str, str]
    date: str

    @property
    def total_us(self) -> float:
        """Time of all steps of a call, by what `StepCost.us` goes by."""
        return sum(step.us for step in self.steps if not step.constant)

    @property
    def launches(self) -> int:
        """Steps of a call that launch something."""
        return sum(step.kind != "view" and not step.constant for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {**asdict(self), "total_us": self.total_us, "launches": self.launches}

    def as_fields(self, page: Path) -> dict[str, str]:
        """Return the report's head as named lines."""
        basis = f"least times ({self.not_measured})" if self.not_measured else "measured step by step"
        call = {} if self.call_us is None else {"a call": f"{self.call_us:,.0f} µs"}
        return {
            "model": self.name,
            "device": f"{self.device} ({self.peaks.source})",
            **({"sizes": ", ".join(f"{k}={v}" for k, v in self.sizes.items())} if self.sizes else {}),
            "steps": f"{len(self.steps)}, {self.launches} of them launch something",
            "steps together": f"{self.total_us:,.0f} µs, {basis}",
            **call,
            "page": str(page),
        }

    def as_rows(self, count: int) -> list[tuple[str, ...]]:
        """Return the dearest steps as a table."""
        dearest = sorted((s for s in self.steps if not s.constant), key=lambda s: -s.us)[:count]
        return [
            (
                str(s.number), s.kind, s.executor, shortened(s.operators), f"{s.least_us:.1f}",
                "" if s.measured_us is None else f"{s.measured_us:.1f}",
            )
            for s in dearest
        ]  # fmt: skip


def shortened(text: str) -> str:
    """Return text that fits a table."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} …"


def run_report(
    target: str, device: str = "", sizes: Mapping[str, int] | None = None, step: Progress = silent
) -> ModelReport:
    """Report on a model.

    target: Path of an ONNX model or of an exported one, or ``python:module:function``: a function without
        parameters that returns ``(model, arguments...)``.
    device: Name of a target; by default that of a function's arguments, what an exported model is for, or
        else this machine's CPU.
    sizes: Symbolic sizes; for those left out 1, or the least tried that the model takes.
    step: Is told what goes on.
    Raises LadderError if the model cannot be read or compiled; the message says why.
    """
    step(f"reading {target}")
    given = dict(sizes or {})
    if target.startswith(PYTHON):
        return _of_function(target, device, given, step)
    path = Path(target)
    if not path.is_file():
        raise ArtifactError(
            f"{target} is no file; give an ONNX model, an exported one, or {PYTHON}module:function"
        )
    if path.suffix == ".onnx":
        return _of_onnx(path, device, given, step)
    return _of_saved(path, device, given, step)


def page_path(target: str) -> Path:
    """Return where a model's page goes if nothing else is said: into the current folder."""
    name = target.rpartition(":")[2] if target.startswith(PYTHON) else Path(target).stem
    return Path(f"{name}.html")


def _of_onnx(path: Path, device: str, sizes: dict[str, int], step: Progress) -> ModelReport:
    from ladder.api.onnx_model import OnnxModel

    model = OnnxModel(path)
    chosen, where = place_of(device)
    if model.staged.single is None and where is not None:
        found = _of_shapes(path, model, chosen, where, sizes, step)
        if found is not None:
            return found
    stored = sum(t.nbytes for t in model.imported.program.held)
    stored += sum(w.value.nbytes for w in model.imported.weights)
    if where is None:
        return _absent(path.name, model.imported.program, chosen, sizes, stored)
    step("compiling")
    return _present(path.name, model.whole(where), chosen, sizes, step)


def _of_shapes(
    path: Path, model: OnnxModel, chosen: TileDevice, where: torch.device, sizes: dict[str, int],
    step: Progress,
) -> ModelReport | None:  # fmt: skip
    """Report on a model that is one plan for some sizes only, for the least of those tried that it takes."""
    shapes = {name: _open_shape(name, info) for name, info in model.staged.inputs.items()}
    if any(shape is None for shape in shapes.values()):
        return None
    names = size_names(extent for shape in shapes.values() for extent in shape or ())
    for known in _sizes_to_try([name for name in names if name not in sizes]):
        given = {**known, **sizes}
        bound = {name: tuple(map(int, bind_shape(shape or (), given))) for name, shape in shapes.items()}
        try:
            found = type(model)(path, shapes=bound)
            if found.staged.single is None:
                continue
            step("compiling")
            report = _present(path.name, found.whole(where), chosen, {}, step)
        except LadderError:  # of sizes that the model does not take
            continue
        return replace(report, sizes=given)
    return None


def _open_shape(name: str, info: Any) -> tuple[Extent, ...] | None:
    """Return an input's extents, open ones by names that sizes can have; None if its rank is open."""
    from ladder.frontend.importer import identifier
    from ladder.frontend.onnx_late import shape_of

    shape = shape_of(info)
    if shape is None:
        return None
    names = [dim.dim_param or f"{name}_{axis}" for axis, dim in enumerate(info.tensor_type.shape.dim)]
    return tuple(identifier(own) if e is None else e for e, own in zip(shape, names, strict=True))


def _of_saved(path: Path, device: str, sizes: dict[str, int], step: Progress) -> ModelReport:
    from ladder.runtime.loading import load
    from ladder.runtime.model.whole import WholeModel

    model = load(path)
    if not isinstance(model, WholeModel):
        raise ArtifactError(f"{path} is one operator: `ladder explain` and `ladder gemm` tell of those")
    chosen = get_device(target_of(model.where))
    if device and not runs_code_of(chosen.name, device):
        raise ArtifactError(f"{path} is for {chosen.name}, not for {device}")
    return _present(path.name, model, chosen, sizes, step)


def _of_function(target: str, device: str, sizes: dict[str, int], step: Progress) -> ModelReport:
    from ladder.api.freeze import freeze

    chosen, where, model, arguments = placed(target, device)
    step("capturing and compiling")
    frozen = freeze(model, arguments, {})
    whole = frozen.whole()
    name = target.removeprefix(PYTHON)
    if where is None:
        return _absent(name, frozen.imported().program, chosen, sizes, whole.nbytes)
    tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    return _present(name, whole, chosen, sizes, step, tensors)


def placed(target: str, device: str) -> tuple[TileDevice, torch.device | None, Any, tuple[Any, ...]]:
    """Make what ``python:module:function`` names, for a device.

    target: ``python:module:function``; the function returns a model, or it and its arguments.
    device: Name of a target; by default where the arguments are.
    Returns: The target; where it is here, None if it is not; model and arguments, there or else on the CPU.
    """
    found = called(target)
    model, arguments = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    chosen, where = place_of(device or (target_of(tensors[0].device) if tensors else ""))
    there = where or torch.device("cpu")
    if isinstance(model, torch.nn.Module):
        model = model.to(there)
    return chosen, where, model, tuple(x.to(there) if isinstance(x, torch.Tensor) else x for x in arguments)


def imported(target: str) -> Any:
    """Import what ``python:module:name`` names.

    Raises ParseError if the text names nothing, or nothing that can be imported.
    """
    module, _, name = target.removeprefix(PYTHON).partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise ParseError(f"{target!r} names nothing: write {PYTHON}module:name")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ParseError(f"{target!r} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)


def called(target: str) -> Any:
    """Import and call the function that a target names."""
    function = imported(target)
    if not callable(function):
        raise ParseError(f"{target!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ParseError(f"{target!r} is called without arguments: {error}") from error
    except ValueError:  # a function of C that names no parameters
        pass
    made = function()
    model = made[0] if isinstance(made, tuple) and made else made
    if not callable(model):
        raise ParseError(
            f"{target!r} returns {type(model).__name__}, no callable: return (model, arguments...)"
        )
    return made


def place_of(device: str) -> tuple[TileDevice, torch.device | None]:
    """Return the device asked for, and where it is here; None if it is not."""
    chosen = get_device(device or "cpu")
    family = family_of(chosen)
    if family == "cpu":
        here = get_device("cpu").name
        return chosen, torch.device("cpu") if chosen.name in (here, "cpu") else None
    current = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    shown = current is not None and runs_code_of(target_of(current), chosen.name)
    return chosen, current if shown else None


def _present(
    name: str, model: WholeModel, device: TileDevice, sizes: dict[str, int], step: Progress,
    given: Sequence[torch.Tensor] | None = None,
) -> ModelReport:  # fmt: skip
    """Report on a model whose device is here: every step is timed."""
    from ladder.cli.measure import read_bandwidth

    executable = model.executable
    tensors = list(given) if given is not None else _served(executable, model, sizes)
    values = [*tensors, *model.stored]
    found = executable.sizes(values)
    peaks = peaks_of(device, cores_of(model.steps), None if device.is_gpu else read_bandwidth())
    step("timing")
    with torch.no_grad():
        times = step_times(executable, values)
        call = _call_us(executable, values)
    costs = [
        replace(cost, measured_us=times.get(cost.number)) for cost in plan_costs(model.steps, found, peaks)
    ]
    memory = executable.memory()
    return _report(name, device, peaks, found, costs, "", call, model.nbytes, memory)


def _absent(
    name: str, program: Program, device: TileDevice, sizes: dict[str, int], stored: int
) -> ModelReport:
    """Report on a model for a device that is not here: least times."""
    plan = plan_for_device(program, device)
    found = {**dict.fromkeys(_symbols(plan), 1), **sizes}
    peaks = peaks_of(device, cores_of(plan))
    reason = f"{device.name} is not here"
    return _report(name, device, peaks, found, plan_costs(plan, found, peaks), reason, None, stored, {})


def plan_for_device(program: Program, device: TileDevice) -> ModelPlan:
    """Return the plan of a program for any device; nothing is compiled."""
    from ladder.runtime.model.prepared import prepare

    prepared = prepare(program, device)
    return make_plan(prepared.program.graph, prepared.parts, {}, family_of(device))


def _symbols(plan: ModelPlan) -> list[str]:
    """Return the names of a plan's symbolic sizes."""
    return sorted(size_names(extent for tile in plan.tiles.values() for extent in tile.shape))


def _served(executable: Executable, model: WholeModel, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Return inputs to time with, of the least sizes tried that the model takes where they are not given.

    Raises ShapeError if it takes none; it says why the first are refused.
    """
    symbols = _symbols(executable.plan)
    if unknown := set(sizes) - set(symbols):
        raise ShapeError(f"the model has no size {', '.join(sorted(unknown))}; it has {symbols}")
    refused: Exception | None = None
    for known in _sizes_to_try([name for name in symbols if name not in sizes]):
        inputs = _examples(executable, len(model.parameters), {**known, **sizes})
        try:
            with torch.no_grad():
                executable(*inputs, *model.stored)
        except (LadderError, RuntimeError) as error:  # torch's of a window larger than what it passes over
            refused = refused or error
        else:
            return inputs
    raise ShapeError(f"the model takes none of the sizes tried: give --sizes for {symbols}; {refused}")


def _sizes_to_try(names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes: all 1, then one of them larger, then all."""
    yield dict.fromkeys(names, 1)
    for size in LARGER if names else ():
        if len(names) > 1:
            yield from ({**dict.fromkeys(names, 1), name: size} for name in names)
        yield dict.fromkeys(names, size)


def _examples(executable: Executable, count: int, known: Mapping[str, int]) -> list[torch.Tensor]:
    """Return random numbers as inputs, and ones for integers."""
    found = [torch.empty(0)] * count
    for name, at in executable.bound.bindings.items():
        if at >= count:
            continue
        tile = executable.plan.tiles[name]
        shape = tuple(int(extent) for extent in bind_shape(tile.shape, known))
        dtype = torch_dtype(tile.ttype.name)
        random = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
        found[at] = random.to(executable.where)
    return found


def _call_us(executable: Executable, values: Sequence[Any], rounds: int = 20) -> float:
    """Return the median time of a call, on a GPU until its end."""
    times = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        executable(*values)
        if executable.where.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1e6


def _report(
    name: str, device: TileDevice, peaks: Peaks, sizes: Mapping[str, int], costs: Sequence[StepCost],
    not_measured: str, call: float | None, stored: int, memory: Mapping[str, int],
) -> ModelReport:  # fmt: skip
    versions = {"ladder": ladder_version(), "torch": torch.__version__}
    try:
        versions["tvm"] = tvm_version()
    except LadderError:
        versions["tvm"] = "none"
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    arena, unshared = memory.get("arena", 0), memory.get("without sharing", 0)
    return ModelReport(
        *(name, device.name, peaks, dict(sizes), tuple(costs), not_measured, call),
        *(stored, arena, unshared, versions, date),
    )
