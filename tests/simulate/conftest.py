"""Helpers of this folder, and the CUDA text of tests/numeric."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "numeric"))
sys.path.insert(0, str(Path(__file__).parent))
