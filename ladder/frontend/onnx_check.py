"""Checks of an ONNX model before import: the standard's checker and limits of our own.

The checker sees the model without its large tensors, as inputs of the same types and shapes in their place:
it checks structure (names, operand counts, attributes of the stated version) and infers all shapes and types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any

import onnx
import onnx.checker
import onnx.shape_inference

from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import schema_of, version_of, versions_of
from tile_types.errors import ArtifactError

MOST_BYTES = (1 << 31) - 1
"""Of a file, without external data: what protocol buffers hold."""

MOST_NODES = 100_000

MOST_ELEMENTS = 1 << 34
"""Of a tensor that a model takes, makes or stores."""

MOST_COMPUTED = 1 << 26
"""Elements of a tensor that is computed at import."""

MOST_FOLLOWED = 1 << 20
"""Elements of a vector up to which ONNX's rules follow its values."""

MOST_CHECKED = 1024
"""Elements up to which stored tensors are given to the checker: shapes, axes and the like."""

ANNOTATED = ("MatMul", "Gemm")
ANNOTATIONS = ("weight_ttype", "group_size", "zero", "scaling", "scale_type", "activation_ttype")
"""Our attributes of products, which the standard does not know."""

PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
"""Types whose elements are packed -> bits of one."""


def check_size(path: Path) -> None:
    """Raise unless a file is a regular one of a size that protocol buffers have.

    Raises ArtifactError: Says what it is.
    """
    if path.exists() and not path.is_file():
        raise ArtifactError(f"{path} is no file")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"{path} is larger than 2 GB; store its tensors as external data")


REFUSED_BY_RULES: Mapping[str, Sequence[int]] = {
    "MeanVarianceNormalization": range(1, 1 << 31),
    "GroupNormalization": range(18, 21),
}
"""Operators whose results are like their input -> versions that the standard's rules refuse.

The first one's rule is the body of a function, which adds a float32 number to any input; the second one is
deprecated in these versions, since its scales were of groups.
"""


def check_model(model: Any, title: str) -> None:
    """Raise unless a model keeps to the standard and to our limits.

    Raises ImportRefused: Says what the checker, or which limit, refuses.
    """
    nodes = list(nodes_of(model.graph))
    if len(nodes) > MOST_NODES:
        raise ImportRefused(f"{title} has {len(nodes)} nodes, at most {MOST_NODES} are imported")
    for tensor in _tensors(model.graph):
        check_extents(tensor.dims, f"{title}: tensor {tensor.name!r}")
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        check_extents(attribute.sparse_tensor.dims, f"{title}: {attribute.name}", MOST_COMPUTED)
    for node in (node for node in nodes if "Conv" in node.op_type):
        groups = next((each.i for each in node.attribute if each.name == "group"), 1)
        if groups < 1:
            raise ImportRefused(f"{title}: {node.op_type} has {groups} groups")
    for sparse in model.graph.sparse_initializer:
        check_extents(sparse.dims, f"{title}: tensor {sparse.values.name!r}", MOST_COMPUTED)
    if any(tensor.external_data for tensor in _tensors_of(nodes)):
        raise ImportRefused(f"{title} has external data in an attribute; export it with initializers")
    skeleton = _with_copies(_skeleton(model))
    try:
        onnx.checker.check_model(_with_ranks(skeleton))
        inferred = _inferred(_densified(skeleton))
    except Exception as error:  # the checker's errors have no common class
        raise ImportRefused(f"{title} is no valid ONNX model: {_line(error)}") from error
    graph = inferred.graph
    for info in (*graph.input, *graph.value_info, *graph.output):
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        check_extents(dims, f"{title}: {info.name!r}")


def _with_ranks(model: Any) -> Any:
    """Return the model with shapes for inputs that state none: the checker wants them, importing does not."""
    found = model
    if any(map(_is_shapeless, model.graph.input)):
        found = onnx.ModelProto()
        found.CopyFrom(model)
        for info in filter(_is_shapeless, found.graph.input):
            info.type.tensor_type.shape.SetInParent()
    return found


def _densified(model: Any) -> Any:
    """Return the model, sparse initializers made inputs: rules for shapes take them for scalars."""
    graph = model.graph
    graph.input.extend(
        onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, sparse.dims)
        for sparse in graph.sparse_initializer
    )
    del graph.sparse_initializer[:]
    return model


def _is_shapeless(info: Any) -> bool:
    return info.type.HasField("tensor_type") and not info.type.tensor_type.HasField("shape")


def _inferred(model: Any) -> Any:
    """Return the model with all types and shapes that the standard's rules give.

    Rules that follow values of shapes through a model take some for others: without them, it may be valid.
    They take memory for each element of a sum of vectors, so they are not asked about long ones.
    """
    model = _with_copies(model)
    plain = _inferred_plainly(model)
    graph = plain.graph
    for info in (*graph.input, *graph.value_info, *graph.output):
        shape = info.type.tensor_type.shape
        if len(shape.dim) == 1 and shape.dim[0].dim_value > MOST_FOLLOWED:
            return plain
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return plain


def _with_copies(model: Any) -> Any:
    """Return the model, operators that `REFUSED_BY_RULES` names made copies of their input."""
    versions = versions_of(model)
    if not any(_is_refused(node, versions) for node in nodes_of(model.graph)):
        return model
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for node in (node for node in nodes_of(found.graph) if _is_refused(node, versions)):
        node.op_type = "Identity"
        del node.attribute[:], node.input[1:]
    return found


def _is_refused(node: Any, versions: Mapping[str, int]) -> bool:
    refused = REFUSED_BY_RULES.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
    return bool(refused) and version_of("", versions) in refused


def _inferred_plainly(model: Any) -> Any:
    """Return the model with types and shapes by rules that follow no values.

    It may be valid but for the shapes that it states of what it computes, which importing warns of.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        computed = (*model.graph.value_info, *model.graph.output)
        if not sum(_cleared(info) for info in computed):  # each of them
            raise
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _cleared(info: Any) -> bool:
    """Take away the shape that is stated of a value; returns whether there was one."""
    kind = info.type.WhichOneof("value")
    found: bool = kind == "tensor_type" and info.type.tensor_type.HasField("shape")
    if found:
        info.type.tensor_type.ClearField("shape")
    return found


def check_extents(dims: Any, what: str, most: int = MOST_ELEMENTS) -> None:
    """Raise unless known extents are those of a tensor that can be.

    Raises ImportRefused: Names the tensor.
    """
    if any(dim < 0 for dim in dims) or prod(max(dim, 1) for dim in dims) > most:
        raise ImportRefused(f"{what} has extents {list(dims)[:8]}: below 0, or more than {most} elements")


def check_computed(node: Any, operands: Mapping[str, Any], opsets: Any, what: str) -> None:
    """Raise if computing a node of known operands would make more than `MOST_COMPUTED` elements.

    operands: Name -> array.
    opsets: Of the model.
    what: For messages.
    Raises ImportRefused if it would; also if the standard's shape rule refuses the operands.
    """
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in operands.items()]
    for info in infer_node(node, [], constants, opsets, what).values():
        dims = [dim.dim_value for dim in info.tensor_type.shape.dim if dim.HasField("dim_value")]
        check_extents(dims, what, MOST_COMPUTED)


def infer_node(node: Any, inputs: Any, constants: Any, opsets: Any, what: str) -> dict[str, Any]:
    """Return the ONNX types of a node's results, of operands of stated types and of known ones.

    Raises ImportRefused if the standard's rules refuse the operands.
    """
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    stated = onnx.NodeProto()
    stated.CopyFrom(node)
    _with_defaults(stated, {entry.domain: entry.version for entry in opsets})
    body = onnx.helper.make_graph([stated], "one", inputs, results, constants)
    model = onnx.helper.make_model(body, opset_imports=opsets)
    try:
        inferred = _inferred(model)
    except Exception as error:  # as above
        raise ImportRefused(f"{what}: {_line(error)}") from error
    found = {info.name: info.type for info in inferred.graph.output}
    return {name: type_ for name, type_ in found.items() if _is_stated(type_)}


def _is_stated(type_: Any) -> bool:
    """Tell whether a type says more than that there is a value."""
    kind = type_.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or bool(type_.tensor_type.elem_type))


def external_bytes(tensor: Any, folder: str, title: str) -> bytes:
    """Return the data of a tensor that lies in another file of the model's folder.

    Raises ArtifactError if that file is elsewhere, missing or too short, or the tensor states another length
        than its shape.
    """
    stated = {entry.key: entry.value for entry in tensor.external_data}
    place = stated.get("location", "")
    where = ", ".join(f"{key}={value[:200]}" for key, value in stated.items())
    fault = f"{title}: the data of {tensor.name!r} cannot be read ({where})"
    root = Path(folder).resolve()
    path = (root / place).resolve()
    if not folder or not place or PurePath(place).is_absolute() or not path.is_relative_to(root):
        raise ArtifactError(f"{fault}: it must lie in a file in the model's folder")
    try:
        start, size = int(stated.get("offset", 0)), stored_bytes(tensor)
        if int(stated.get("length", size)) != size or start < 0:
            raise ValueError(f"its type and shape take {size} bytes")
        if not path.is_file():
            raise FileNotFoundError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
        with path.open("rb") as stream:
            stream.seek(start)
            data: bytes = stream.read(size if start + size <= path.stat().st_size else 0)
        if len(data) != size:
            raise ValueError(f"{path.name} ends before byte {start + size}")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{fault}: {error}; copy the model with its external data") from error
    return data


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def stored_bytes(tensor: Any) -> int:
    """Return the bytes that a tensor's type and shape take."""
    elements: int = prod(tensor.dims)
    bits = PACKED.get(onnx.TensorProto.DataType.Name(tensor.data_type))
    if bits is not None:
        return -(-elements * bits // 8)
    return elements * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield a graph, or a function, and the graphs in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs_of(inner)


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph, or of a function, and of the graphs in them."""
    for inner in graphs_of(graph):
        yield from inner.node


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the stored tensors of a graph and of its nodes."""
    yield from graph.initializer
    yield from _tensors_of(nodes_of(graph))


def _tensors_of(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among the attributes of nodes."""
    for node in nodes:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)


def _with_defaults(node: Any, versions: Mapping[str, int]) -> None:
    """Write out the defaults of attributes: rules for some operators take others."""
    schema = schema_of(node.domain, node.op_type, version_of(node.domain, versions))
    if schema is None:
        return
    given = {attribute.name for attribute in node.attribute}
    node.attribute.extend(
        stated.default_value
        for name, stated in schema.attributes.items()
        if name not in given and stated.default_value.name
    )


def _skeleton(model: Any) -> Any:
    """Return a model without large tensors and without our annotations."""
    graph = model.graph
    large = [
        tensor for tensor in graph.initializer if prod(tensor.dims) > MOST_CHECKED or tensor.external_data
    ]
    names = {tensor.name for tensor in large}
    declared = {info.name for info in graph.input}
    # Before version 4 initializers had to be inputs too; tools that convert models leave that out.
    version = max(model.ir_version, 4) if model.ir_version else 0
    result = onnx.ModelProto(ir_version=version, opset_import=model.opset_import)
    slim = result.graph
    slim.name = graph.name
    slim.input.extend(graph.input)
    slim.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in large
        if tensor.name not in declared
    )
    # The checker wants shapes of outputs, which importing does not need.
    slim.output.extend(info for info in graph.output if info.type.tensor_type.HasField("shape"))
    slim.value_info.extend(graph.value_info)
    slim.initializer.extend(tensor for tensor in graph.initializer if tensor.name not in names)
    slim.sparse_initializer.extend(graph.sparse_initializer)
    slim.node.extend(graph.node)
    for node in slim.node:
        _with_defaults(node, versions_of(model))
        if node.op_type in ANNOTATED:
            kept = [attribute for attribute in node.attribute if attribute.name not in ANNOTATIONS]
            del node.attribute[:]
            node.attribute.extend(kept)
    return result
