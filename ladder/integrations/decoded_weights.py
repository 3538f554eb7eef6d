"""Decoded weights in graphs of torch's capture: writes are refused, and what leaves a graph is marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._C import _is_alias_of  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from ladder.api.stored_weight import REFUSED, DecodedValues, as_plain, writes
from ladder.runtime.registered import READ_ONLY
from tile_types.errors import LadderError


class Decoded:
    """What a graph holds of decoded weights: those that it decodes, and those that arrive as `DecodedValues`.

    module: A graph whose nodes say what torch's capture knows of their values.
    examples: Its arguments.
    """

    def __init__(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        self.nodes = list(module.graph.nodes)
        places = [node for node in self.nodes if node.op == "placeholder"]
        self.given = [at for at, each in enumerate(examples) if isinstance(each, DecodedValues)]
        self.reasons = {places[at]: REFUSED for at in self.given}
        self.reasons |= {node: row.why for node in self.nodes if (row := READ_ONLY.get(node.target))}
        (returned,) = self.nodes[-1].args
        leaving = enumerate(returned if self.reasons else ())
        self.leaving = [at for at, node in leaving if self._reason(node)]

    def _reason(self, node: Any) -> str | None:
        """Return why the memory of a node's value is not to be written, if it is not."""
        value = _known(node)
        alike = (why for each, why in self.reasons.items() if _share(value, _known(each)))
        return next(alike, None)

    def refuse_writes(self) -> None:
        """Raise LadderError if the graph writes such memory, as versions and names of functions tell."""
        for node in self.nodes if self.reasons else ():
            named = node.op.startswith("call") and writes(node.target)
            written = tree_leaves(node.args[:1]) if named else [node] if _version(_known(node)) else []
            if why := next(filter(None, map(self._reason, written)), None):
                raise LadderError(f"a graph {why}")

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """Return arguments in which decoded weights are of torch's own class."""
        found = list(values)
        for at in self.given:
            found[at] = as_plain(found[at])
        return found

    def marked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the graph and marks those of its results that lie in such memory."""
        if not self.reasons or not (self.given or self.leaving):
            return run

        def called(*given: Any) -> Any:
            results = list(run(*self.plain(given)))
            for at in self.leaving:
                results[at] = results[at].as_subclass(DecodedValues)
            return tuple(results)

        return called


def _known(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def _share(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _is_alias_of(one, other)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
