"""Name and signature of the host function that encodes tensor maps of convolutions."""

IM2COL = "ladder.encode_windows"
"""Host function that encodes a tensor map in im2col mode; `ladder.runtime.tensor_map` registers it.

``(map, data, dtype, batch, height, width, channels, channels per copy, pixels per copy, R, S, strides,
paddings, dilations)``.
"""
