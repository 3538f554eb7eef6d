"""Ladder beside other libraries in one run: ``python -m benchmarks.peers``.

`cases` is the table of what is measured and what must hold, one ``*_engine`` module adapts each
library, `run` measures and `bars` judges. `benchmarks.report` draws the results.
"""
