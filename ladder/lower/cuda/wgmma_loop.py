"""Parts of every math loop of the wgmma pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_operands import Operands
from ladder.lower.cuda.wgmma_products import Consumer, Descriptor
from ladder.lower.cuda.wgmma_spec import Spec

Expr = Any


@dataclass(frozen=True)
class Parts:
    """The parts of a math loop."""

    spec: Spec
    operands: Operands
    x: Descriptor
    consumer: Consumer
    epilogue: Epilogue


class MathLoop(Protocol):
    """Emits the sums of a tile."""

    def tile(self, piece: Piece) -> None:
        """Sum one tile, or its piece, over K and write it."""
