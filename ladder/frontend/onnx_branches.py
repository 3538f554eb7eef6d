"""Branches of If as models of their own, whose inputs are the values around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from ladder.frontend.onnx_stages import NodeStage, names_read
from ladder.frontend.onnx_values import Known

BRANCHES = {True: "then_branch", False: "else_branch"}


class BranchedStage(NodeStage):
    """A node that runs one of two graphs.

    Parameters
    ----------
    node, reads, versions, why
        As of any.
    models
        Condition -> the branch as a model.
    """

    def __init__(
        self,
        node: Any,
        reads: tuple[str, ...],
        versions: Mapping[str, int],
        why: str,
        models: Mapping[bool, Any],
    ) -> None:
        super().__init__(node, reads, versions, why)
        object.__setattr__(self, "models", models)

    models: Mapping[bool, Any]


def branches(
    node: Any, given: Mapping[str, Any], infos: Mapping[str, Any], known: Mapping[str, Known], file: Any
) -> dict[bool, Any] | None:
    """Return condition -> branch of an If; None where it reads what has no type yet, or is no tensor.

    Parameters
    ----------
    node, given
        The node and its attributes.
    infos
        Value around it -> ONNX type.
    known
        Those that are known.
    file
        The model that it is in.
    """
    found = {}
    for taken, name in BRANCHES.items():
        model = onnx.ModelProto()
        model.ir_version = file.ir_version
        model.opset_import.extend(file.opset_import)
        model.graph.CopyFrom(given[name])
        outside = _outside(given[name])
        for value in outside:
            if value in known:
                model.graph.initializer.append(onnx.numpy_helper.from_array(known[value].array, value))
            elif infos.get(value) is None or not infos[value].HasField("tensor_type"):
                return None
            else:
                model.graph.input.append(onnx.helper.make_value_info(value, infos[value]))
        found[taken] = model
    return found


def _outside(graph: Any) -> list[str]:
    """Return the values that a graph reads from around it."""
    holder = onnx.NodeProto()
    holder.attribute.append(onnx.helper.make_attribute("body", graph))
    return names_read(holder)
