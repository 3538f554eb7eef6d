"""Graphs of nodes (branches of If, bodies of loops) as models of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx

from ladder.frontend.onnx_stages import NodeStage, names_read
from ladder.frontend.onnx_values import Known
from ladder.runtime.onnx_ops.values import array_of, code_of

BRANCHES = {True: "then_branch", False: "else_branch"}


class BranchedStage(NodeStage):
    """A node that runs one of two graphs.

    node, reads, versions, why: As of any.
    models: Condition -> the branch as a model.
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

    node, given: The node and its attributes.
    infos: Value around it -> ONNX type.
    known: Those that are known.
    file: The model that it is in.
    """
    found = {}
    for taken, name in BRANCHES.items():
        model = onnx.ModelProto()
        model.ir_version = file.ir_version
        model.opset_import.extend(file.opset_import)
        model.graph.CopyFrom(given[name])
        for value in outside(given[name]):
            if value in known:
                model.graph.initializer.append(onnx.numpy_helper.from_array(known[value].array, value))
            elif infos.get(value) is None or not infos[value].HasField("tensor_type"):
                return None
            else:
                model.graph.input.append(onnx.helper.make_value_info(value, infos[value]))
        found[taken] = model
    return found


def graph_model(
    graph: Any, versions: Mapping[str, int], given: Mapping[str, Any], stored: Mapping[str, Any]
) -> Any:
    """Return a graph as a model for the types and shapes of values.

    graph: ``GraphProto``.
    versions: Domain -> version of its operators.
    given: Name -> what becomes an input.
    stored: Name -> what is the same in every call, if the graph reads it.
    """
    model = onnx.ModelProto()
    model.opset_import.extend(onnx.helper.make_opsetid(domain, at) for domain, at in versions.items())
    model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model.graph.CopyFrom(graph)
    for known in (model.graph.input, model.graph.value_info):
        del known[:]
    for name, value in given.items():
        info = onnx.helper.make_tensor_value_info(name, code_of(value), list(value.shape))
        model.graph.input.append(info)
    for name in (*(info.name for info in graph.input), *outside(graph)):
        if name not in given:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array_of(stored[name]), name))
    for info in model.graph.output:
        info.type.tensor_type.ClearField("shape")  # what is stated may be of other calls
    return model


def unchanged(node: Any, graph: Any) -> dict[str, str]:
    """Return input of a Loop's body that it hands on as it is -> the value that the node begins with."""
    if node.op_type != "Loop":
        return {}
    same = _same(graph)
    found = {}
    for info, result, first in zip(graph.input[2:], graph.output[1:], node.input[2:], strict=False):
        if _origin(result.name, same) == info.name:
            found[info.name] = first
    return found


def handed_on(graph: Any, stored: Collection[str]) -> tuple[str, ...] | None:
    """Return the values around a branch that its results are; None where one is computed or stored."""
    same = _same(graph)
    found = tuple(_origin(result.name, same) for result in graph.output)
    given = set(outside(graph)) - set(stored)
    return found if set(found) <= given and len(same) == len(graph.node) else None


def _same(graph: Any) -> dict[str, str]:
    """Return result of an Identity -> its operand."""
    nodes = (node for node in graph.node if node.op_type == "Identity")
    return {node.output[0]: node.input[0] for node in nodes}


def _origin(value: str, same: Mapping[str, str]) -> str:
    while value in same:
        value = same[value]
    return value


def outside(graph: Any) -> list[str]:
    """Return the values that a graph reads from around it."""
    holder = onnx.NodeProto()
    holder.attribute.append(onnx.helper.make_attribute("body", graph))
    return names_read(holder)
