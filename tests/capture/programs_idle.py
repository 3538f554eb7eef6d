"""Axes of one element, and tensors of none: how these lie decides what is read of strides and channels."""

from __future__ import annotations

from typing import Any

import torch
from capture_world import calls, normal, programs


def _images(rows: int, *, last: bool) -> tuple[Any, ...]:
    made = normal(rows, 1, 8, 8)
    return (made.to(memory_format=torch.channels_last) if last else made,)


def _column(rows: int, step: int) -> tuple[Any, ...]:
    return (normal(64).as_strided((rows, 1), (1, step)),)


def _nothing(step: int) -> tuple[Any, ...]:
    return (normal(64).as_strided((0, 4), (4 * step, step)),)


FIRST_DENSE = [
    lambda n=n, last=last: _images(n, last=last) for n, last in ((2, 0), (3, 0), (4, 0), (4, 1), (5, 1))
]
FIRST_LAST = [
    lambda n=n, last=last: _images(n, last=last) for n, last in ((2, 1), (3, 1), (4, 1), (4, 0), (5, 0))
]
COLUMNS = [
    lambda n=n, step=step: _column(n, step) for n, step in ((4, 1), (5, 1), (6, 1), (6, 7), (5, 3), (4, 1))
]
NOTHING = [lambda step=step: _nothing(step) for step in (1, 2, 1, 3)]


def _convolved(x: Any) -> Any:
    return torch.conv2d(x, torch.ones(4, 1, 3, 3))


def _steps_read(x: Any) -> Any:
    return x.stride(), x + 1


def _copied(x: Any) -> Any:
    return (x * 2).stride(), x.clone().stride(), x.contiguous().stride(), x.view(-1).stride()


def _told_by_name(x: Any) -> Any:
    channels = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    found = x[x > 0]
    return (
        x.stride(dim=0),
        *(
            x.is_contiguous(memory_format=channels),
            x.size(dim=0),
            torch.numel(input=x),
            x.is_same_size(other=x),
        ),
        *(torch.result_type(tensor=x, other=2), found.is_contiguous(memory_format=torch.contiguous_format)),
        *(found.size(dim=0), torch.numel(input=found), found.sum()),
    )


def _seen_as_bytes(x: Any) -> Any:
    return x.view(torch.uint8)


programs(
    idle_channels=lambda: calls(_convolved, *FIRST_DENSE, *FIRST_DENSE),
    idle_channels_last=lambda: calls(_convolved, *FIRST_LAST, *FIRST_LAST),
    idle_columns=lambda: calls(_steps_read, *COLUMNS, *COLUMNS),
    idle_columns_copied=lambda: calls(_copied, *COLUMNS, *COLUMNS),
    idle_columns_as_bytes=lambda: calls(_seen_as_bytes, *COLUMNS, *COLUMNS),
    idle_nothing=lambda: calls(_steps_read, *NOTHING, *NOTHING),
    idle_nothing_copied=lambda: calls(_copied, *NOTHING, *NOTHING),
    idle_nothing_as_bytes=lambda: calls(_seen_as_bytes, *NOTHING, *NOTHING),
    idle_told_by_name=lambda: calls(_told_by_name, *FIRST_DENSE, *COLUMNS, *FIRST_LAST),
)
