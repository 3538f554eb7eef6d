"""`KVCache`: keys and values of attention, stored in a small type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError, ShapeError, require_kind, unknown_name, whole_number

LIMITS = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""Types with a scale per token and head: their largest magnitude."""

RANK = 4
"""Axes of keys and values."""

STORED = {
    name: torch_dtype(name) for name in ("int8", "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16", "float32")
}
"""Types that keys and values can be stored in."""


def require_stored(ttype: object) -> None:
    """Raise UnknownNameError unless keys and values can be stored in a type of this name."""
    if not isinstance(ttype, str) or ttype not in STORED:
        raise unknown_name("type of a KV cache", ttype, STORED)


class KVCache(torch.nn.Module):
    """Keys and values of the tokens so far, ``[batch, heads, capacity, size]``.

    8-bit types hold a float32 scale per token and head beside the codes. `append` returns what has been
    stored in the type of its arguments, for attention.

    Parameters
    ----------
    batch, heads, capacity, size
        Extents.
    ttype
        ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    device
        Where it lives.

    Raises
    ------
    UnknownNameError
        If keys cannot be stored in that type.
    """

    def __init__(
        self, batch: int, heads: int, capacity: int, size: int, ttype: str = "float16", device: Any = None
    ) -> None:
        super().__init__()
        given = {"batch": batch, "heads": heads, "capacity": capacity, "size": size}
        for name, extent in given.items():
            if whole_number(extent, f"{name} of a KV cache") < 0:
                raise ShapeError(f"{name} of a KV cache must be at least 0, got {extent}")
        self.extents = (batch, heads, capacity, size)
        self.ttype, self.length = ttype, 0
        self._allocate(ttype, device)

    def set_type(self, ttype: str) -> None:
        """Store in another type from now on; what is stored is lost.

        Raises
        ------
        UnknownNameError
            If keys cannot be stored in that type.
        """
        self._allocate(ttype, self.keys.device)

    def _allocate(self, ttype: str, device: Any) -> None:
        """Make empty buffers of a type on a device."""
        require_stored(ttype)
        self.ttype, self.length = ttype, 0
        scaled = (*self.extents[:-1], 1)
        for name in ("keys", "values"):
            empty = torch.zeros(self.extents, dtype=STORED[ttype], device=device)
            self.register_buffer(name, empty, persistent=False)
            scale = torch.zeros(scaled, dtype=torch.float32, device=device) if ttype in LIMITS else None
            self.register_buffer(f"{name}_scale", scale, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to another device; `set_type` alone changes the type, ``model.half()`` does not."""

        def moved(buffer: torch.Tensor) -> torch.Tensor:
            found = fn(buffer)
            return found if found.dtype == buffer.dtype else buffer.to(found.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the next tokens ``[batch, heads, new, size]`` and return all of them.

        Raises
        ------
        ShapeError
            If they do not fit, or the cache is full.
        DTypeError
            If they are no floats.
        """
        for new in (keys, values):
            require_kind(new, torch.Tensor, "keys and values are tensors")
        batch, heads, capacity, size = self.extents
        count = keys.shape[2] if keys.dim() == RANK else 0
        end = self.length + count
        if end > capacity or keys.shape != (batch, heads, count, size) or values.shape != keys.shape:
            raise ShapeError(
                f"{tuple(keys.shape)} and {tuple(values.shape)} do not fit a cache {self.extents}"
                f" that holds {self.length} tokens"
            )
        for name, new in (("keys", keys), ("values", values)):
            if not new.is_floating_point():
                raise DTypeError(f"{name} are floats, got {new.dtype}")
        for name, new in (("keys", keys), ("values", values)):
            self._write(name, new, end)
        self.length = end
        return self._read("keys", keys.dtype, end), self._read("values", values.dtype, end)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store tokens ``[batch, heads, new, size]`` at positions ``int64[new]``; return the whole cache.

        For steps that are compiled once: the position is data. What lies behind it is not yet valid, so
        attention needs the mask ``arange(capacity) <= position[:, None]``; compiled plans then read the codes
        as they are stored, up to the position. `append`'s count of tokens is left alone.
        """
        for name, new in (("keys", keys), ("values", values)):
            codes, scale = self._encoded(new)
            getattr(self, name).index_copy_(2, position, codes)
            if scale is not None:
                getattr(self, f"{name}_scale").index_copy_(2, position, scale)
        capacity = self.extents[2]
        return self._read("keys", keys.dtype, capacity), self._read("values", values.dtype, capacity)

    def _encoded(self, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return tokens as they are stored, and their scales."""
        if self.ttype not in LIMITS:
            return new.to(STORED[self.ttype]), None
        limit = LIMITS[self.ttype]
        scale = (new.float().abs().amax(-1, keepdim=True) / limit).clamp_min(1e-20)
        units = (new.float() / scale).clamp(-limit, limit)
        return (units.round() if self.ttype == "int8" else units).to(STORED[self.ttype]), scale

    def _write(self, name: str, new: torch.Tensor, end: int) -> None:
        codes, scale = self._encoded(new)
        getattr(self, name)[:, :, self.length : end].copy_(codes)
        if scale is not None:
            getattr(self, f"{name}_scale")[:, :, self.length : end] = scale

    def _read(self, name: str, dtype: torch.dtype, length: int) -> torch.Tensor:
        stored: torch.Tensor = getattr(self, name)[:, :, :length]
        scales: torch.Tensor | None = getattr(self, f"{name}_scale")
        if scales is None:
            return stored.to(dtype)
        return (stored.float() * scales[:, :, :length]).to(dtype)
