"""Functions that an ONNX model defines itself, put in the place of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx.inliner

from ladder.frontend.onnx_check import nodes_of
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import schema_of, version_of, versions_of


def inlined(model: Any, title: str) -> Any:
    """Return a model without functions.

    ONNX's inliner leaves a function that states other versions of operators than the model: versions in which
    none of the operators that are used changed count as the same.

    title: For messages.
    Raises ImportRefused if functions are left; it names one, and what changed between the versions.
    """
    try:
        found = onnx.inliner.inline_local_functions(_restated(model))
    except Exception as error:  # of the C++ library
        raise ImportRefused(f"{title}: its functions cannot be inlined: {error}") from error
    if found.functions:
        raise ImportRefused(f"{title}: {_left(found.functions[0], versions_of(found))}")
    return found


def _restated(model: Any) -> Any:
    """Return the model with one version per domain, its functions' too, where that changes nothing."""
    scopes = [(versions_of(model), list(nodes_of(model.graph)))]
    scopes += [(versions_of(function), list(nodes_of(function))) for function in model.functions]
    domains = sorted({domain for versions, _ in scopes for domain in versions})
    chosen = {domain: _common(domain, scopes) for domain in domains}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for holder in (copy, *copy.functions):
        for entry in holder.opset_import:
            entry.version = chosen[entry.domain] or entry.version
    _give_defaults(copy)
    return copy


def _give_defaults(model: Any) -> None:
    """Write the defaults of functions' attributes into calls without them: the inliner does not."""
    defaults = {
        (f.domain, f.name, f.overload): f.attribute_proto for f in model.functions if f.attribute_proto
    }
    if not defaults:
        return
    for holder in (model.graph, *model.functions):
        for node in nodes_of(holder):
            given = {attribute.name for attribute in node.attribute}
            missing = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(default for default in missing if default.name not in given)


def _common(domain: str, scopes: Sequence[tuple[Mapping[str, int], list[Any]]]) -> int | None:
    """Return a version in which all operators of a domain are as in their own; None if there is none."""
    stated = [versions[domain] for versions, _ in scopes if domain in versions]
    for version in dict.fromkeys((stated[0], *sorted(stated, reverse=True))):
        if not any(_changed(domain, nodes, versions, version) for versions, nodes in scopes):
            return version
    return None


def _changed(domain: str, nodes: list[Any], versions: Mapping[str, int], other: int) -> list[str]:
    """Return the operators of nodes that another version of a domain defines in another way."""
    names = {node.op_type for node in nodes if _same_domain(node.domain, domain)}
    own = version_of(domain, versions)
    return sorted(name for name in names if _since(domain, name, own) != _since(domain, name, other))


def _same_domain(a: str, b: str) -> bool:
    return ("" if a == "ai.onnx" else a) == ("" if b == "ai.onnx" else b)


def _since(domain: str, name: str, version: int) -> int | None:
    """Return the version that a definition is of."""
    schema = schema_of(domain, name, version)
    return None if schema is None else int(schema.since_version)


def _left(function: Any, versions: Mapping[str, int]) -> str:
    """Return why a function was not inlined."""
    for entry in function.opset_import:
        version = version_of(entry.domain, versions)
        changed = _changed(entry.domain, list(nodes_of(function)), versions_of(function), version)
        if changed:
            return (
                f"its function {function.name!r} is written for version {entry.version} of"
                f" {entry.domain or 'ai.onnx'}, the model for {version}, and {', '.join(changed)} changed"
                " between them; export both for one version"
            )
    return f"its function {function.name!r} cannot be inlined: it calls itself or what cannot be inlined"
