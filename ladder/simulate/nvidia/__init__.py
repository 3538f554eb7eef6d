"""Semantics of what NVIDIA kernels call: PTX instructions and the emitters' inline helpers, as tables.

A table row makes a closure from a translator and a call; nothing else knows NVIDIA.
"""

from ladder.simulate.nvidia.calls import CALLS

__all__ = ["CALLS"]
