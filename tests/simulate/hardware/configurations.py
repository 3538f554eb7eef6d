"""Fifty drawn configurations that ran on an H200: the problems as text, and some of their outputs."""

from __future__ import annotations

import json
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
