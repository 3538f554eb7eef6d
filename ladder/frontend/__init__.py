"""Importers of other people's programs into tile graphs: so far torch.fx, through ATen.

`ladder.runtime.model.program.Program` is what an importer returns; `importer` holds what importers share,
`aten_*` the table of ATen operators, one row each. May import everything below ``ladder.api``; only
``ladder.api`` and what lies above may import it.
"""
