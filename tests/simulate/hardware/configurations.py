"""Fifty drawn configurations that ran on an H200: the problems as text, and some of their outputs.

``PYTHONPATH=.:tests/simulate python -m tests.simulate.hardware.configurations FILE`` runs them again on the
GPU of this machine and writes FILE; a schedule that is legal no more becomes the one that is chosen there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladder.ir.gemm import Gemm
from schedules.schedule import GpuSchedule, parse_schedule

FILE = Path(__file__).with_name("h200_configurations.npz")

SAMPLES = 64
"""Outputs that are kept of each configuration, evenly spread."""


@dataclass(frozen=True)
class Measured:
    """One configuration with what the GPU computed.

    Parameters
    ----------
    gemm, schedule, m
        The kernel and the rows of x.
    places
        Positions in y, flattened.
    values
        The GPU's outputs there.
    """

    gemm: Gemm
    schedule: GpuSchedule
    m: int
    places: np.ndarray
    values: np.ndarray


def describe(gemm: Gemm, schedule: GpuSchedule, m: int) -> str:
    """Return the text that `load` reads back."""
    return json.dumps({"gemm": asdict(gemm), "schedule": str(schedule), "m": m})


def sampled(size: int) -> np.ndarray:
    """Return the positions that are kept of ``size`` outputs."""
    return np.unique(np.linspace(0, size - 1, SAMPLES).astype(np.int64))


def load() -> list[Measured]:
    """Return all configurations."""
    with np.load(FILE) as stored:
        texts, values = [json.loads(str(text)) for text in stored["texts"]], stored["values"]
    result, at = [], 0
    for text in texts:
        gemm = Gemm(**{**text["gemm"], "epilogue": tuple(text["gemm"]["epilogue"])})
        places = sampled(text["m"] * gemm.n)
        schedule: Any = parse_schedule(text["schedule"])
        result.append(Measured(gemm, schedule, text["m"], places, values[at : at + places.size]))
        at += places.size
    return result


def _ran(one: Measured) -> tuple[str, np.ndarray]:
    """Run a configuration on the GPU; return its text, and the outputs that are kept."""
    import torch
    from problems import problem_of

    from ladder.runtime.build import load_entry
    from ladder.runtime.compile import ANY_M, Request, obtain
    from schedules.legal import is_legal
    from schedules.policy import best_schedule
    from schedules.schedule import Plan
    from targets import get_device
    from tile_types.arrays import as_torch, torch_dtype

    device, problem = get_device("cuda/sm_90a"), problem_of(one.gemm, one.m)
    schedule: Any = one.schedule
    if not is_legal(one.gemm, device, schedule):
        schedule = best_schedule(one.gemm, device, one.m)
    _, (kernel,) = obtain(Request(one.gemm, device.name, Plan(((ANY_M, schedule),))))
    arrays = [as_torch(array).cuda() for array in problem.arrays]
    y = torch.full((one.m, one.gemm.n), float("nan"), dtype=torch_dtype(one.gemm.output), device="cuda")
    load_entry(kernel, "cuda")(*arrays, y)
    found = y.double().cpu().numpy()
    error = float(np.linalg.norm(found - problem.expected)) / problem.size
    print(f"{one.gemm.weight} x {one.gemm.activation} {schedule}: relative error {error:.1e}", flush=True)
    return describe(one.gemm, schedule, one.m), found.reshape(-1)[one.places]


if __name__ == "__main__":
    texts, values = zip(*map(_ran, load()), strict=True)
    np.savez_compressed(sys.argv[1], texts=texts, values=np.float32(np.concatenate(values)))
