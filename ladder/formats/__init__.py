"""Checkpoints of other tools: quantized tensors by name, bit for bit what the tool stored.

One file per format. May import tile_types and torch; what users call (`load_checkpoint`) is in `checkpoint`.
Nothing here imports the tools themselves, runs code of a file, or trusts a number of one.
"""
