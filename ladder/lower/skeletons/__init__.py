"""Skeletons: one emitter per family of instructions, which reads a tile program and nothing else.

A skeleton owns control structure; tiles, loops, recipes and instructions are the program's. None imports a
problem class, a schedule or a device (import-linter holds that). May import `ladder.ir.program`, layouts of
``schedules``, and the vocabulary of ``ladder.lower``.
"""
