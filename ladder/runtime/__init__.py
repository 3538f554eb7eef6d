"""Running kernels: load, cache, launch, pack, export.

Only `compile` needs the compiler, and imports it when it must build. May import
``tile_types``, ``targets``, ``schedules``, ``ladder.ir`` and ``ladder.lower``.
"""
