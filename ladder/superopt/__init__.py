"""The superoptimizer: searches fused block graphs and proves that they equal their program.

`verifier` decides equality with a computed error bound, `expressions` prunes, `generator` searches,
`partition` cuts larger programs into what these take.
May import ``ladder.ir``, ``targets``, ``schedules`` and below.
"""
