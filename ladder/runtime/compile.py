"""From a problem and a target to a loaded kernel: memory, then disk, then the compiler.

Only a miss of both caches imports the compiler.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from ladder import knobs
from ladder.forks import renewed
from ladder.garbage import uncollected
from ladder.installation import cache_root
from ladder.ir.gemm import Gemm
from ladder.runtime import ahead
from ladder.runtime.build import Job, Kernel, find_or_build, forget_kernels, load_entry, missing
from ladder.runtime.cache import Identity, KernelCache, cache_key
from ladder.runtime.kernel import CompiledGemm, Later
from ladder.runtime.packed import gemm_from_dict, own_order
from ladder.runtime.spills import least_spilling, warn_of_spills
from ladder.runtime.threads import keep_apart
from schedules.footprint import SLICED
from schedules.schedule import GpuSchedule, Plan, Schedule, parse_plan
from schedules.spilling import seen_spilling
from targets import get_device, host_cpu, visible_gpus
from targets.detect import device_for_capability
from tile_types.errors import CacheError, DeviceError, ScheduleError, require_kind
from tile_types.identity import VALUES, own_values, require_values

if TYPE_CHECKING:
    import torch

    from ladder.lower.build import BuiltModule
    from schedules.policy import Candidate
    from schedules.tuning import TuningDatabase
    from targets import TileDevice

RUNNABLE = ("cuda", "llvm")
"""TVM target kinds that the installed TVM can run."""

ANY_M = 1 << 30
"""Limit of a plan that is one schedule for every M."""


@dataclass(frozen=True)
class Request:
    """A problem and a target. Its `text` names one operator in every process.

    gemm: The problem.
    device: Name of the target; empty: whatever device the activations are on.
    plan: Schedules to use instead of the policy's.
    """

    gemm: Gemm
    device: str = ""
    plan: Plan | None = None

    def __post_init__(self) -> None:
        require_kind(self.plan, (Plan, NoneType), "plan is a schedules.schedule.Plan or None")

    @cached_property
    def text(self) -> str:
        """The request as text, with the values of a type that does not ship; `parse` reads it back."""
        problem = {**vars(self.gemm), "windows": self.gemm.windows and asdict(self.gemm.windows)}
        fields = {"device": self.device, "gemm": problem, "plan": self.plan and str(self.plan)}
        own = own_values(self.gemm.weight)
        return json.dumps({**fields, **({VALUES: own} if own else {})}, sort_keys=True)

    @staticmethod
    @cache
    def parse(text: str) -> Request:
        """Read back what `text` printed; raises ArtifactError if its type has other values here."""
        fields = json.loads(text)
        require_values(fields.get(VALUES))
        plan = parse_plan(fields["plan"]) if fields["plan"] else None
        return Request(gemm_from_dict(fields["gemm"]), fields["device"], plan)

    @property
    def target(self) -> TileDevice:
        return get_device(self.device or "cpu")

    def on(self, where: torch.device) -> Request:
        """Return the request for the device that a tensor is on.

        Raises DeviceError if no target covers it, or it is not the one asked for.
        """
        here = target_of(where)
        if self.device in ("", here):
            return replace(self, device=here)
        if where.type == "cuda" and runs_code_of(here, self.device):
            return self
        if where.type != family_of(self.target) or where.type == "cuda":
            raise DeviceError(
                f"the operator is for {self.device}, the tensors are on {where} ({here});"
                f" move them, or build the operator with target={here!r}"
            )
        return self


def usable_device(device: torch.device | str) -> torch.device:
    """Return a torch device; raises DeviceError if torch knows no such device or cannot use it here."""
    import torch

    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(f"{device!r} is no device of torch, such as 'cpu' or 'cuda:0'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"torch finds no GPU here for {str(where)!r}; give device='cpu'")
    return where


@cache
def target_of(where: torch.device) -> str:
    """Return the name of the target that a torch device is.

    Raises DeviceError if Ladder has no target for it.
    """
    if where.type == "cpu":
        return host_cpu().name
    import torch

    if where.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(where)
        ordinal = torch.cuda.current_device() if where.index is None else where.index
        shown = {gpu.ordinal: gpu.device for gpu in visible_gpus()}
        name = shown.get(ordinal) or device_for_capability(capability)
        if name is not None:
            return name
        raise DeviceError(
            f"{where} has compute capability {capability}; `ladder devices` lists what is supported"
        )
    raise DeviceError(f"no kernels run on tensors on {where}; use a CPU or an NVIDIA GPU")


def runs_code_of(here: str, device: str) -> bool:
    """Tell whether the target ``here`` runs code made for another: the same, or of the same architecture."""
    return here == device or get_device(here).row == get_device(device).row


_compiled: dict[tuple[str, torch.device | None], CompiledGemm] = {}
_lock = renewed(threading.RLock())


def compiled(text: str, where: torch.device | None = None) -> CompiledGemm:
    """Return the operator that a `Request.text` names; a call of it builds the kernel that it needs.

    text: The request.
    where: The torch device of the activations; may be left out if the request names its target.
    """
    found = _compiled.get((text, where))
    if found is None:
        with _lock:
            found = _compiled.get((text, where)) or _load(Request.parse(text), where)
            _compiled[text, where] = found
    return found


def forget() -> None:
    """Drop every loaded operator, so that the next use looks on disk again."""
    with _lock:
        for memory in (_compiled, _spilling):
            memory.clear()
        forget_kernels()


def _load(request: Request, where: torch.device | None) -> CompiledGemm:
    request = request if where is None else request.on(where)
    if request.target.kind not in RUNNABLE:
        raise DeviceError(
            f"kernels for {request.target.name} are compiled and saved, not run here: TVM's wheel has no"
            " ROCm runtime; use `lower` and `export`, or `ladder.simulate`"
        )
    with uncollected():
        plan = plan_for(request)
    later: dict[Schedule, Later] = {}
    for limit, schedule in plan.entries:
        later.setdefault(schedule, Later(partial(_entry, request, plan, limit)))
    return CompiledGemm(
        request.gemm,
        family_of(request.target),
        [limit for limit, _ in plan.entries],
        [later[schedule] for _, schedule in plan.entries],
        own_order(request.gemm, request.target),
    )


def _entry(request: Request, plan: Plan, m: int) -> Any:
    """Return the loaded kernel of a plan that serves M = ``m``, or one that takes its place since it spills.

    Where it was compiled just now, the plan's others follow (`ladder.runtime.ahead`), on a GPU: on a CPU that
    would take cores from the kernels.
    """
    family = family_of(request.target)
    with _lock, uncollected():
        (kernel,) = _kernels_of(request, Plan(((ANY_M, plan.schedule_for(m)),)))
        if kernel.spilled and request.plan is None:
            _, (kernel,) = obtain(serving(request, m))
        entry = load_entry(kernel, family)
    if family == "cpu":
        keep_apart()  # the runtime, which starts the caller's workers, may have been loaded just now
    elif not kernel.from_cache and not own_values(request.gemm.weight):
        others = (Request(request.gemm, request.device, Plan(((ANY_M, s),))) for _, s in plan.entries)
        ahead.build(other.text for other in dict.fromkeys(others) if missing(jobs_of(other)[1]))
    return entry


def family_of(device: TileDevice) -> str:
    """Return torch's device type for a target: ``"cuda"`` or ``"cpu"``."""
    return "cuda" if device.is_gpu else "cpu"


def plan_for(request: Request) -> Plan:
    """Return the schedules of a request: its own, else the policy's, which are kept on disk."""
    if request.plan is not None:
        return request.plan
    if not knobs.settings.cache:
        return _choose(request)
    folder, key = cache_root() / "tuning", _plan_key(request)
    # A measurement that arrives in the folder makes older choices stale.
    key = f"{key}-{folder.stat().st_mtime_ns if folder.is_dir() else 0}"
    stored = KernelCache().read_note("plans", key)
    if stored is not None and not _is_outdated(request, kept := parse_plan(stored)):
        return kept
    plan = _choose(request)
    with contextlib.suppress(CacheError):  # `find_or_build` warns of it
        KernelCache().write_note("plans", key, str(plan))
    return plan


def candidate_for(gemm: Gemm, device: TileDevice, m: int) -> Candidate:
    """Return the policy's best kernel for one M, kept on disk; of its cost only the seconds are.

    Raises ScheduleError if no schedule is legal.
    """
    from ladder.partition.convolutions import best_candidate
    from schedules.cost import Cost
    from schedules.policy import Candidate

    if not knobs.settings.cache:
        return best_candidate(gemm, device, m)
    key = _plan_key(Request(gemm, device.name), rows=m)
    stored = KernelCache().read_note("plans", key)
    if stored is not None:
        seconds, _, text = stored.partition(" ")
        if not text:
            raise ScheduleError(f"no legal schedule for {gemm} on {device.name} at M={m}")
        kept = parse_plan(text)
        if not _is_outdated(Request(gemm, device.name), kept):
            return Candidate(kept.schedule_for(m), Cost(float(seconds), (), (), 0, 0))
    found: Candidate | None = None
    try:
        found = best_candidate(gemm, device, m)
        return found
    finally:
        text = "0" if found is None else f"{found.cost.seconds} {Plan(((ANY_M, found.schedule),))}"
        with contextlib.suppress(CacheError):  # `find_or_build` warns of it
            KernelCache().write_note("plans", key, text)


def _is_outdated(request: Request, plan: Plan) -> bool:
    """Tell whether a plan was kept before one of its kernels was compiled, and seen to spill."""
    spilling = {s for _, s in plan.entries} & set(seen_spilling(request.gemm, request.target))
    return bool(spilling) and not spilling <= _timed(request)


def _timed(request: Request) -> set[Schedule]:
    """Return what was measured at the likest shape: what such kernels spill is part of their times."""
    from schedules.estimate import Estimator

    gemm, device, known = request.gemm, request.target, tuning_database()
    return set(Estimator(gemm, device, known.measurements(device, gemm), known.akin(device, gemm)).measured)


def _plan_key(request: Request, **further: int) -> str:
    """Return the digest of what decides the policy's choice, the user's measurements apart."""
    from schedules.tuning import shipped_digest

    facts = {"gemm": asdict(request.gemm), "purpose": "plan", "shipped": shipped_digest(), **further}
    return cache_key(facts, Identity.of(None, request.target, compiled=False))


def _choose(request: Request) -> Plan:
    from schedules.policy import make_plan

    gemm, device = request.gemm, request.target
    if gemm.experts:
        # Experts with M tokens each are as much work as M tokens by the rows of all experts.
        gemm = replace(gemm, n=gemm.n * min(gemm.experts, gemm.slots or gemm.experts), experts=1)
    return make_plan(gemm, device, tuning_database())


def tuning_database() -> TuningDatabase:
    """Return the measured schedules: those shipped and those under the cache folder."""
    from schedules.tuning import TuningDatabase

    return TuningDatabase(cache_root() / "tuning")


def obtain(request: Request) -> tuple[Plan, list[Kernel]]:
    """Return the plan of a request and the kernel of each of its entries, cached or freshly built.

    Where the policy's choice spills, the next best schedule takes its place.

    Raises CompilerError, MissingToolError if one must be built and cannot.
    """
    return settled(request, partial(plan_for, request))


def serving(request: Request, m: int) -> Request:
    """Return the request for only the kernel that serves M = ``m``: compiled, and seen not to spill.

    Raises CompilerError, MissingToolError if it must be built and cannot.
    """
    plan, _ = settled(request, lambda: Plan(((ANY_M, plan_for(request).schedule_for(m)),)))
    return replace(request, plan=plan)


def settled(request: Request, choose: Callable[[], Plan]) -> tuple[Plan, list[Kernel]]:
    """Return the plan of a request by a policy that chooses again while kernels spill, and its kernels.

    Where all that is chosen spills, what spills least, after a warning unless it was measured to be fast all
    the same; a plan of the request's own stands.

    Raises CompilerError, MissingToolError if one must be built and cannot.
    """
    if request.plan is not None:
        return request.plan, _kernels_of(request, request.plan)
    plan = choose()
    if (request, plan) not in _spilling:
        found, kernels = least_spilling(_plans(request, plan, choose), itemgetter(1))
        if not any(kernel.spilled for kernel in kernels):
            return found, kernels
        timed = _timed(request)
        chosen = zip(found.entries, kernels, strict=True)
        warn_of_spills([kernel for (_, taken), kernel in chosen if taken not in timed], request.target)
        _spilling[request, plan] = _spilling[request, choose()] = found
    taken = _spilling[request, plan]
    return taken, _kernels_of(request, taken)


_spilling: dict[tuple[Request, Plan], Plan] = {}
"""(Request, plan of the policy) -> plan that is used instead, where all kernels that were tried spill."""


def _plans(request: Request, plan: Plan, choose: Callable[[], Plan]) -> Iterator[tuple[Plan, list[Kernel]]]:
    """Yield plans with their kernels: a first one, and what the policy chooses without what spills of it."""
    yield plan, (kernels := _kernels_of(request, plan))
    while avoid_spilling(request, plan, kernels):
        plan = choose()
        yield plan, (kernels := _kernels_of(request, plan))


def _kernels_of(request: Request, plan: Plan) -> list[Kernel]:
    with _lock:
        return find_or_build(jobs_of(replace(request, plan=plan))[1])


def avoid_spilling(request: Request, plan: Plan, kernels: Sequence[Kernel]) -> bool:
    """Have the policy choose no schedules again whose kernels spill; return whether some new ones do."""
    spilling = [
        schedule for (_, schedule), kernel in zip(plan.entries, kernels, strict=True) if kernel.spilled
    ]
    if not spilling:
        return False
    from ladder.partition.convolutions import best_candidate
    from schedules.policy import avoid

    news = [avoid(request.gemm, request.target, schedule) for schedule in spilling]
    best_candidate.cache_clear()
    return any(news)


def jobs_of(request: Request) -> tuple[Plan, list[Job]]:
    """Return the plan of a request and what builds the kernel of each of its entries."""
    plan, device = plan_for(request), request.target
    identity = Identity.of(request.gemm, device)
    return plan, [_job(request.gemm, device, schedule, identity) for _, schedule in plan.entries]


def request_for(gemm: Gemm, device: TileDevice, m: int | str) -> Request:
    """Return the request for a product of ``m`` tokens: where that is a number, for its one kernel."""
    request = Request(gemm, device.name)
    if isinstance(m, str):
        return request
    if gemm.gate:
        schedule = gated_schedule(gemm, device, m)
        if schedule is None:
            raise ScheduleError(f"no kernel of few activation rows for {gemm} on {device.name} at M={m}")
        return replace(request, plan=Plan(((ANY_M, schedule),)))
    if gemm.windows:  # images of a network have one size: the schedule is chosen for just that
        return replace(request, plan=Plan(((ANY_M, candidate_for(gemm, device, m).schedule),)))
    return replace(request, plan=Plan(((ANY_M, plan_for(request).schedule_for(m)),)))


def gated_schedule(gemm: Gemm, device: TileDevice, m: int) -> Schedule | None:
    """Return the schedule of a gated product of ``m`` activation rows; None where it is no gain.

    That is where other pipelines are for so many rows. What serves the product without its gate serves this
    one too, if it can: then nothing but the epilogue changes.
    """
    from ladder.partition.convolutions import CHAIN_LAUNCH
    from schedules.legal import is_legal
    from schedules.rules import serves

    plain = streaming_schedule(replace(gemm, gate="", gate_last=False), device, m, CHAIN_LAUNCH * 1e-6)
    if not isinstance(plain, GpuSchedule) or not serves(gemm, plain.pipeline):
        return None
    if is_legal(gemm, device, plain):
        return plain
    try:
        return candidate_for(gemm, device, m).schedule
    except ScheduleError:
        return None


def streaming_schedule(gemm: Gemm, device: TileDevice, m: int, saved: float) -> Schedule:
    """Return the schedule of a product of ``m`` activation rows that more is to be fused into.

    Only kernels that stream weights take that: the best of them serves where it is predicted to lose less
    than the ``saved`` seconds to the plan's own.
    """
    from schedules.cost_model import predict

    own = plan_for(Request(gemm, device.name)).schedule_for(m)
    if not isinstance(own, GpuSchedule) or own.pipeline in SLICED:
        return own
    other = candidate_for(gemm, device, m).schedule
    lost = predict(gemm, device, other, m).seconds - predict(gemm, device, own, m).seconds
    return other if lost < saved else own


def _job(gemm: Gemm, device: TileDevice, schedule: Schedule, identity: Identity) -> Job:
    """Describe the kernel of one schedule."""

    def make(folder: Path) -> BuiltModule:
        from ladder.lower.build import build

        return build(gemm, device, Plan(((ANY_M, schedule),)), folder)

    return Job({"gemm": gemm.shape_free(), "schedule": str(schedule)}, identity, device, make)
