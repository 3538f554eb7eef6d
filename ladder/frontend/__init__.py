"""Importers of other people's programs into tile graphs.

Empty so far: the one front end is `ladder.ir`'s tensor expression. May import everything
below ``ladder.api``; only ``ladder.api`` and what lies above may import it.
"""
