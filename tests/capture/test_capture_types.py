"""Types written in the body of a program: subscripts of `typing` and of classes are constants."""

# ruff: noqa: UP006, UP007, UP035, UP045  (the spellings that older code has)

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Callable,
    Dict,
    Generic,
    List,
    Literal,
    Optional,
    Tuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import pytest
import torch
from torch import Tensor

from ladder.capture import capture

T = TypeVar("T")


class Box(Generic[T]):
    def __init__(self, value: float = 0.0) -> None:
        self.value = value


class Numbered:
    def __class_getitem__(cls, item: int) -> int:
        return item + len(cls.__name__)


class Longer(Numbered):
    pass


def annotated_for_torchscript(x: Tensor) -> Any:
    states = torch.jit.annotate(Dict[str, Dict[str, Optional[Tensor]]], {})
    states["first"] = {"key": x * 2}
    kept = torch.jit.annotate(List[Tensor], [x])
    return states["first"]["key"] + kept[0]


def nested(x: Tensor) -> Any:
    return x + 1, Dict[str, Dict[str, Optional[Tensor]]], Tuple[Optional[int], ...], Union[List[int], str]


def of_other_forms(x: Tensor) -> Any:
    return x + 1, Callable[[int], str], Literal["a"], Annotated[int, 4].__metadata__, List[T], List[T][int]


def asked(x: Tensor) -> Any:
    origin = get_origin(Optional[int]) is Union, get_args(Dict[str, List[int]])
    return x + 1, origin, isinstance([1], List), isinstance(3, Dict), Optional[int] == Optional[int]


def keyed(x: Tensor) -> Any:
    sizes = {Optional[int]: 2, List[int]: 3}
    return x * sizes[List[int]], Optional[int] in (Optional[int],), str(Optional[List[int]]), hash(List[int])


def refused(x: Tensor) -> Any:
    try:
        Optional[1, 2]  # type: ignore[index]
    except TypeError:
        x = x + 2
    try:
        List[int][str]  # type: ignore[index]
    except TypeError as error:
        return x, str(error)
    return None


def of_generic_classes(x: Tensor) -> Any:
    box = Box[int](3)
    return x + box.value, box.__orig_class__, Box[T][int], Box[int] == Box[int]  # type: ignore[attr-defined]


def of_classes_that_are_asked(x: Tensor) -> Any:
    return x + Numbered[3] + Longer[5], Numbered[2]  # type: ignore[valid-type]


PROGRAMS = [
    annotated_for_torchscript,
    nested,
    of_other_forms,
    asked,
    keyed,
    refused,
    of_generic_classes,
    of_classes_that_are_asked,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_types_in_a_body_leave_one_graph(program: Any) -> None:
    captured = capture(program)
    for seed in range(3):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        found, expected = captured(x), program(x)
        pairs = [(found, expected)] if isinstance(expected, Tensor) else zip(found, expected, strict=True)
        for one, other in pairs:
            assert torch.equal(one, other) if isinstance(other, Tensor) else one == other
    assert (captured.outcome, len(captured.records)) == ("whole", 1), captured.explain()
