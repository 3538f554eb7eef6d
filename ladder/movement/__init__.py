"""Data movement of memory-bound chains (PowerFusion's GIR): slices, moves, syncs, and their rewriting.

May import what lies below ``ladder.lower``, which turns what is decided here into kernels.
"""
