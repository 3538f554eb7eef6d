"""What `benchmarks.gguf_products` multiplies."""

from __future__ import annotations

import pytest

from benchmarks.gguf_products import TYPES, drawn


@pytest.mark.parametrize("name", TYPES)
def test_drawn_blocks_are_a_matrix_of_finite_values(name: str) -> None:
    matrix, nbytes = drawn(name, 8, 512)
    values = matrix.dequantize("float64")
    assert values.shape == (8, 512)
    assert values.isfinite().all()
    assert values.std() > 0
    assert 2 < 8 * nbytes / values.numel() < 9
