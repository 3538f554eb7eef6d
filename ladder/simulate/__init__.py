"""The SIMT simulator: executes emitted TIR of whole kernel launches on the CPU and proves what it can.

Everything here works on numpy arrays; `nvidia` holds what is particular to a machine family.
"""

from ladder.simulate.findings import Finding
from ladder.simulate.launch import SimulationResult, simulate_launch
from ladder.simulate.translate import UnknownCallError

__all__ = ["Finding", "SimulationResult", "UnknownCallError", "simulate_launch"]
