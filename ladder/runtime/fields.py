"""Schemas of data that is read from files.

A form is a type (``object`` for anything), ``[form]`` for a list, ``(form, form)`` for a list of just these,
``{str: form}`` for an object of any names, ``{"name": form}`` for an object of at least these names, or a
`OneOf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tile_types.errors import ArtifactError, LadderError


@dataclass(frozen=True)
class OneOf:
    """Any of several forms."""

    forms: tuple[Any, ...]


NUMBER = OneOf((int, float))
EXTENT = OneOf((int, str))


def require(value: Any, form: Any, where: str) -> None:
    """Raise unless a value from JSON has a form.

    Raises ArtifactError: Names the place.
    """
    fault = _fault(value, form, where)
    if fault:
        raise ArtifactError(fault)


UNPICKLED = (
    "what is loaded holds machine code of this process, which pickle does not keep: keep its file and load "
    "it again where it is needed"
)
"""Why loaded operators and models are not pickled."""


def refuse_contradiction(error: Exception) -> None:
    """Raise the error of a file whose kernels refuse the file's own tensors, given what a call raised.

    The arguments of a call are checked before; errors of ours, of devices and of memory are left alone.

    Raises ArtifactError with the error as its cause.
    """
    import torch

    apart = (LadderError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    if not isinstance(error, apart):
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(
            f"the loaded file contradicts itself: kernels do not take its tensors ({text}); export it again"
        ) from error


def _fault(value: Any, form: Any, where: str) -> str:
    """Return what is wrong; empty if nothing is."""
    if isinstance(form, OneOf):
        faults = [_fault(value, each, where) for each in form.forms]
        return "" if "" in faults else faults[0]
    if isinstance(form, dict):
        return _fault_of_object(value, form, where)
    if isinstance(form, list | tuple):
        return _fault_of_list(value, form, where)
    fits = form is object or (value is None if form is None else type(value) is form)
    return "" if fits else f"{where} is {value!r:.60}, expected {_shown(form)}"


def _fault_of_object(value: Any, form: dict[Any, Any], where: str) -> str:
    if type(value) is not dict:
        return f"{where} is {value!r:.60}, expected an object"
    pairs = [(name, form[str]) for name in value] if str in form else list(form.items())
    missing = [name for name, _ in pairs if name not in value]
    if missing:
        return f"{where} lacks {', '.join(missing)}"
    return next(filter(None, (_fault(value[name], each, f"{where}.{name}") for name, each in pairs)), "")


def _fault_of_list(value: Any, form: list[Any] | tuple[Any, ...], where: str) -> str:
    if type(value) is not list or (isinstance(form, tuple) and len(value) != len(form)):
        count = f" of {len(form)}" if isinstance(form, tuple) else ""
        return f"{where} is {value!r:.60}, expected a list{count}"
    forms = form if isinstance(form, tuple) else [form[0]] * len(value)
    places = enumerate(zip(value, forms, strict=True))
    return next(filter(None, (_fault(item, each, f"{where}[{at}]") for at, (item, each) in places)), "")


def _shown(form: Any) -> str:
    return "null" if form is None else str(form.__name__)
