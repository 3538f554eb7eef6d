"""Importers of other people's programs into tile graphs: torch.fx graphs, through ATen, and ONNX models.

`ladder.runtime.model.program.Program` is what an importer returns; `importer` holds what importers share,
`aten_*` and `onnx_*` the tables of operators, one row each. They translate; what is recognised in a tile
graph is recognised in `ladder.rewrite`, whatever it was imported from. May import everything below
``ladder.api``; only ``ladder.api`` and what lies above may import it.
"""
