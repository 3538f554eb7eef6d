"""Tensor copies of windows of an image (im2col mode): what encodes their maps, and which windows they reach.

Limits are those of `cuTensorMapEncodeIm2col` in CUDA's driver API.
"""

from ladder.ir.windows import Windows

IM2COL = "ladder.encode_windows"
"""Host function that encodes a tensor map in im2col mode; `ladder.runtime.tensor_map` registers it.

``(map, data, dtype, batch, height, width, channels, channels per copy, pixels per copy, R, S, strides,
paddings, dilations)``.
"""

MOST_STRIDE = 8
"""Pixels from one window to the next, at most."""

CORNERS = range(-128, 128)
"""Where the first tap of the first window, and that of the last one from the image's end, may lie."""


def is_reached(windows: Windows) -> bool:
    """Tell whether tensor copies reach the windows' pixels."""
    sides = zip(windows.kernel, windows.padding, windows.dilation, strict=True)
    corners = [at for size, padding, step in sides for at in (-padding, padding - (size - 1) * step)]
    return max(windows.stride) <= MOST_STRIDE and all(at in CORNERS for at in corners)
