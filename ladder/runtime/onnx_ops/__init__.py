"""ONNX operators as torch computes them: what runs nodes for which no kernel of ours is built.

`table.TABLE` has a row per operator, `control` those that run graphs, `evaluate.Body` runs whole graphs node
by node. May import what `ladder.runtime` may; models (`ladder.runtime.model`) and importers use it.
"""
