"""The values of a program's own types as text, stored beside their codes and compared when these are read.

A type that ships is known by its name. One that a program made may mean other values under its name in
another process, and codes that are read there would silently stand for other weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tile_types.errors import ArtifactError, TypeValuesError, UnknownNameError
from tile_types.library import get_type, list_types, shipped_type
from tile_types.ttype import TType, values_text

VALUES = "values"
"""Entry of stored data that `own_values` gives; left out where there are none."""

__all__ = [
    "VALUES",
    "is_own",
    "own_values",
    "own_values_named",
    "require_values",
    "stored_type",
]


def is_own(ttype: TType) -> bool:
    """Tell a type that a program made from one of the library, whatever its name; of a multiple its base."""
    if ttype.multiple_of is not None:
        return is_own(get_type(ttype.multiple_of[0]))
    return shipped_type(ttype.name) is not ttype


def own_values(*ttypes: TType | str) -> dict[str, str]:
    """Return name -> `values_text` of those of some types, and of what they are made of, that do not ship."""
    found = [part for ttype in ttypes for part in _parts(get_type(ttype))]
    return {ttype.name: values_text(ttype) for ttype in found if is_own(ttype)}


def _parts(ttype: TType) -> tuple[TType, ...]:
    if ttype.multiple_of is not None:
        return (get_type(ttype.multiple_of[0]),)
    if not ttype.is_block:
        return (ttype,)
    return ttype, *_parts(ttype.element_type), *(get_type(m.ttype) for m in ttype.metadata)


def own_values_named(text: str) -> dict[str, str]:
    """Return the same of registered types that a text names, alone or as the element of a block type."""
    words = set(re.findall(r"\w+", text))
    words |= {word[: at.start()] for word in words for at in re.finditer(r"_g\d|_times_2", word)}
    return own_values(*sorted((t for t in list_types() if t.name in words), key=lambda t: t.name))


def require_values(stored: Mapping[str, str] | None) -> None:
    """Raise unless types mean here what they meant where codes of them were stored.

    stored: What `own_values` gave there; None if a Ladder stored them that did not write it. Types that do
        not exist here are passed over.
    Raises TypeValuesError: Names the type, and says what it was and what it is.
    Raises ArtifactError: What is stored is no such thing.
    """
    if not isinstance(stored or {}, dict):
        raise ArtifactError(f"the values of its types are {stored!r:.60}, not an object")
    for name, there in (stored or {}).items():
        try:
            here = values_text(get_type(name))
        except UnknownNameError:
            continue  # whatever takes its codes looks it up, and says so
        if here != there:
            raise TypeValuesError(
                f"type {name!r} has other values here than where this was stored: there [{there}],"
                f" here [{here}]; register the type as it was there"
            )


def stored_type(name: str, values: Mapping[str, str]) -> TType:
    """Return a type that was pickled by name; raises UnknownNameError, or as `require_values`."""
    ttype = get_type(name)
    require_values(values)
    return ttype
