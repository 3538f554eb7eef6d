"""Data movement of memory-bound chains (PowerFusion's GIR): slices, moves and syncs, rewritten until few are left.

May import what lies below ``ladder.lower``, which turns what is decided here into kernels.
"""
