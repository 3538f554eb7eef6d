"""`KVCache`: its type and its device, whatever is done to the model that holds it."""

from __future__ import annotations

import pytest
import torch

import ladder

TYPES = ("float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")


def stored(cache: ladder.KVCache) -> list[torch.dtype]:
    return [buffer.dtype for buffer in cache.buffers()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ttype", TYPES)
def test_types_stay_where_a_model_is_converted(ttype: str, dtype: torch.dtype) -> None:
    """Codes of 8 bits were stored in 16, and scales in fewer bits than they have."""
    cache = ladder.KVCache(1, 2, 4, 8, ttype)
    before, tokens = stored(cache), torch.randn(1, 2, 3, 8)
    keys, values = cache.append(tokens, -tokens)
    torch.nn.Sequential(cache).to(dtype)
    assert stored(cache) == before
    empty = torch.zeros(1, 2, 0, 8)
    assert all(map(torch.equal, cache.append(empty, empty), (keys, values)))


def test_another_type_is_stored_where_the_cache_is() -> None:
    """It was where the cache had been made."""
    cache = ladder.KVCache(1, 2, 4, 8).to("meta")
    cache.set_type("int8")
    assert {buffer.device.type for buffer in cache.buffers()} == {"meta"}


def test_scales_are_float32_whatever_torch_makes_by_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert stored(ladder.KVCache(1, 2, 4, 8, "int8"))[1::2] == [torch.float32] * 2
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_tokens_that_are_no_floats_are_refused(which: str) -> None:
    given = {"keys": torch.zeros(1, 2, 1, 8), "values": torch.zeros(1, 2, 1, 8)}
    given[which] = given[which].int()
    with pytest.raises(ladder.DTypeError, match=f"{which} are floats, got torch.int32"):
        ladder.KVCache(1, 2, 4, 8).append(**given)
