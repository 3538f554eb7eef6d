"""Executes machine code of AMD GPUs (gfx90a, gfx942, gfx950, gfx1100, gfx1201) on the CPU, by instruction.

It reads the assembly that LLVM wrote beside a code object, knows nothing of TIR, and checks what TIR cannot
show: waits for memory, barriers passed with LDS accesses outstanding, lanes that exchange while part of the
wave is active. Semantics: AMD Instinct MI200 and MI300 ISA, RDNA3 and RDNA4 ISA. An instruction that no
table has is an error.
"""

from ladder.simulate.gcn.launch import Report, run

__all__ = ["Report", "run"]
