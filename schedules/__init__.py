"""Schedules: transforms of tiles, packed layouts, legality, cost, policy and tuning.

May import tile_types, `ladder.ir` and targets; imports neither torch nor TVM at module level.
Start at `policy.make_plan`, and at README.md for lists of transforms.
"""
