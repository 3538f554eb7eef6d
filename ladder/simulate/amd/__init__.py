"""Semantics of what AMD kernels call: LLVM's AMDGPU intrinsics, as tables, one machine per architecture.

A table row makes a closure from a translator and a call; nothing else knows AMD.
"""

from ladder.simulate.amd.calls import calls_for

__all__ = ["calls_for"]
