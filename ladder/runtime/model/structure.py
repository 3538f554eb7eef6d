"""Positions of tensors in a model's arguments and results (tuples, lists, dicts), as JSON-able data.

A structure is ``{"tensor": position}``, ``{"value": number, text or None}``, ``{"tuple": [structures]}``,
``{"list": [structures]}`` or ``{"dict": {name: structure}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ladder.runtime.fields import OneOf, require
from tile_types.errors import ArtifactError, ShapeError

Structure = dict[str, Any]
SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list}


def structure_of(value: Any, place: Callable[[torch.Tensor, str], Structure], path: str) -> Structure:
    """Return the structure of a value.

    value: Tensors, numbers, text and None in tuples, lists and dicts.
    place: Returns the structure of a tensor, given also where it stands.
    path: How messages name the value.
    Raises ShapeError if something else is in it: a file cannot hold objects of other people's classes.
    """
    if isinstance(value, torch.Tensor):
        return place(value, path)
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    for name, kind in SEQUENCES.items():
        if type(value) is kind:
            return {name: [structure_of(item, place, f"{path}[{at}]") for at, item in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: structure_of(item, place, f"{path}[{key!r}]") for key, item in value.items()}}
    raise ShapeError(
        f"{path} is of {type(value).__qualname__}: tensors, numbers and text in tuples, lists and dicts can"
        " be exported; let the model take and return those"
    )


def require_structure(structure: Any, where: str) -> None:
    """Raise unless data are a structure.

    Raises ArtifactError: Names the place.
    """
    pairs: list[Any] = list(structure.items()) if isinstance(structure, dict) else []
    kind, held = pairs[0] if len(pairs) == 1 else ("", [])
    if kind not in _FORMS:
        raise ArtifactError(f"{where} is {structure!r:.60}, expected one of {', '.join(_FORMS)}")
    require(held, _FORMS[kind], where)
    inner = held.items() if kind == "dict" else enumerate(held) if kind in SEQUENCES else ()
    for name, item in inner:
        require_structure(item, f"{where}[{name!r}]")


_FORMS: dict[str, Any] = {
    "tensor": int,
    "value": OneOf((None, bool, int, float, str)),
    "dict": {str: object},
    **{name: [object] for name in SEQUENCES},
}
"""Kind of structure -> form of what it holds."""


def build(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Return the value of a structure."""
    ((kind, held),) = structure.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: build(item, tensors) for key, item in held.items()}
    return held if kind == "value" else SEQUENCES[kind]([build(item, tensors) for item in held])


def collect(structure: Structure, value: Any, into: dict[int, Any], path: str) -> None:
    """Read tensors off a value that has a structure.

    Raises ShapeError: Says where it has another.
    """
    ((kind, held),) = structure.items()
    if kind == "tensor":
        into[held] = value
    elif kind == "value":
        if value is not held and value != held:
            raise ShapeError(f"{path} must be {held!r}, as it was at export, got {value!r}")
    elif kind == "dict":
        if not isinstance(value, dict) or set(value) != set(held):
            raise ShapeError(f"{path} must be a dict of {sorted(held)}, got {_shown(value)}")
        for key, item in held.items():
            collect(item, value[key], into, f"{path}[{key!r}]")
    else:
        if not isinstance(value, tuple | list) or len(value) != len(held):
            raise ShapeError(f"{path} must be a {kind} of {len(held)}, got {_shown(value)}")
        for at, item in enumerate(held):
            collect(item, value[at], into, f"{path}[{at}]")


def _shown(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{type(value).__name__}{size}"


def tensor_positions(structure: Structure, first: int) -> list[int]:
    """Return the positions of tensors in a structure, from ``first`` on and counted from there."""
    ((kind, held),) = structure.items()
    if kind == "tensor":
        return [held - first] if held >= first else []
    items = held.values() if kind == "dict" else held if kind in SEQUENCES else ()
    return [position for item in items for position in tensor_positions(item, first)]


def tensors_taken(parameters: Mapping[str, Structure]) -> int:
    """Return how many tensors a call takes."""
    return sum(len(tensor_positions(structure, 0)) for structure in parameters.values())
