"""What a value is to capture: constants and heap objects, tensors and their metadata, open extents.

May import `ladder.capture.python`.
"""
