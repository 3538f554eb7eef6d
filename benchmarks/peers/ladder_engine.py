"""Ladder through its public operator, `ladder.Matmul`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from benchmarks.peers import drawn_types
from benchmarks.peers.engine import DRAWN_TYPES, Engine, Operand, Work
from ladder.api.matmul import Matmul
from ladder.runtime.compile import ANY_M, Request, obtain, plan_for, target_of
from ladder.runtime.operator import with_token_scale
from ladder.runtime.packed import PackedWeight
from schedules.footprint import SLICED
from schedules.legal import is_legal
from schedules.rules import RULES
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types.errors import ScheduleError

OUTPUTS = {"int8": "float32", "fp8_e4m3": "float16"}


STEPS: dict[str, dict[str, Any]] = {
    "fused, fewest buffers": {
        "stages": 0,
        "split_k": 1,
        "persistent": False,
        "stream_k": False,
        "tails": False,
        "cluster": 1,
    },
    "+ deep pipeline": {
        "split_k": 1,
        "persistent": False,
        "stream_k": False,
        "tails": False,
        "cluster": 1,
    },
    "+ split K, persistence": {"cluster": 1},
}
"""Fields of the chosen schedule that a step holds back; the schedule itself has all.

``stages`` 0 stands for the fewest buffers that the pipeline allows.
"""


@cache
def target() -> str:
    """Return the name of the GPU that is here, of an H200 where none is."""
    import torch

    return target_of(torch.device("cuda")) if torch.cuda.is_available() else "cuda/sm_90a"


def copy_of(packed: PackedWeight) -> PackedWeight:
    """Return the same weight in memory of its own."""
    return replace(packed, arrays={name: array.clone() for name, array in packed.arrays.items()})


class LadderOperand(Operand):
    """A packed weight and its operator."""

    def __init__(self, operator: Matmul, packed: Any, held: Any, dynamic: bool) -> None:
        self.operator, self.packed, self.held, self.dynamic = operator, packed, held, dynamic
        self.nbytes = packed.nbytes

    def dense(self) -> Any:
        return self.held.dequantize("float64")

    def clone(self) -> Operand:
        return LadderOperand(self.operator, copy_of(self.packed), self.held, self.dynamic)

    @property
    def eight_bit(self) -> bool:
        """Whether the multiply sees 8-bit activations."""
        return self.operator.gemm.token_scale

    def given(self, x: Any) -> tuple[Any, ...]:
        if self.dynamic or not self.eight_bit:
            return (x,)
        return with_token_scale(x, self.operator.gemm)

    def seen(self, *given: Any) -> Any:
        if not self.eight_bit:
            return given[0].double()
        codes, scale = with_token_scale(given[0], self.operator.gemm) if self.dynamic else given
        return codes.double() * scale.double().unsqueeze(-1)

    def __call__(self, *given: Any) -> Any:
        scale = given[1] if len(given) > 1 else None
        return self.operator(given[0], self.packed, token_scale=scale)


class Ladder(Engine):
    """The compiler that this repository holds, with the schedules that it chooses by itself."""

    distribution = "ladder-compiler"
    module = "ladder"

    def version(self) -> str:
        from ladder.installation import ladder_version

        return ladder_version()

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        held = work.quantized(weight)
        operator = Matmul.from_request(request(work, weight.shape[0], weight.shape[1], tokens))
        return LadderOperand(operator, operator.pack(held), held, work.dynamic)


def kernels(work: Work, n: int, k: int, tokens: tuple[int, ...]) -> dict[str, Request]:
    """Return one request per kernel that a product needs, by what decides the kernel."""
    whole = request(work, n, k, tokens)
    assert whole.plan is not None
    return {
        f"{whole.gemm.shape_free()} {schedule}": Request(whole.gemm, target(), Plan(((ANY_M, schedule),)))
        for _, schedule in whole.plan.entries
    }


def build(text: str) -> None:
    """Build the kernels of a `Request.text` into the disk cache; needs no GPU."""
    drawn_types.register(*DRAWN_TYPES)
    obtain(Request.parse(text))


def request(work: Work, n: int, k: int, tokens: tuple[int, ...]) -> Request:
    """Return what the runtime compiles: the plan for the device, only for the M that are measured."""
    drawn_types.register(work.weight)
    operator = Matmul(
        n,
        k,
        work.weight,
        work.activation,
        output=work.output or OUTPUTS.get(work.activation),
        group_size=work.group_size or None,
        zero=work.zero or None,
        target=target(),
    )
    plan = plan_for(operator.request)
    served = {plan.index(m) for m in tokens}
    used = [entry for position, entry in enumerate(plan.entries) if position in served]
    if work.step:
        used = [(limit, held_back(operator.gemm, schedule, work.step)) for limit, schedule in used]
    return Request(operator.gemm, target(), Plan(tuple(used)))


def held_back(gemm: Any, schedule: Any, step: str) -> GpuSchedule:
    """Return a schedule without the optimisations that come after ``step``.

    Raises
    ------
    ScheduleError
        If the schedule cannot do without them.
    """
    changes = dict(STEPS[step])
    rule, device = RULES[schedule.pipeline], get_device(target())
    depths = sorted(rule.stages)[:2] if changes.pop("stages", None) == 0 else [schedule.stages]
    # In gemv and digits, slices of K are warps, which go with them.
    slices = schedule.split_k // changes.get("split_k", schedule.split_k)
    fewer = schedule.warps // (slices if schedule.pipeline in SLICED else 1)
    for stages, warps in product(depths, (fewer, *rule.warps)):
        with contextlib.suppress(ScheduleError):
            plain: GpuSchedule = replace(schedule, **changes, stages=stages, warps=warps)
            if is_legal(gemm, device, plain):
                return plain
    raise ScheduleError(f"{schedule} cannot do without {', '.join(changes)}")
