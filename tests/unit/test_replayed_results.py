"""Results of a CUDA graph as its callers get them: copies that lie as the recording's do."""

from __future__ import annotations

import torch

from ladder.runtime.model.graphs import Replayed


def test_each_result_is_a_copy_that_lies_as_the_recorded_one() -> None:
    memory, argument = torch.arange(24.0), torch.arange(6.0)
    results = [
        torch.randn(2, 3), torch.randn(4, 5).t(), torch.randn(0, 3), torch.randn(3).half(),
        torch.randn(2).half(), torch.randn(2, 2).double(), torch.tensor([True, False]),
        torch.randn(3, 3)[:, :2], memory[:6].view(2, 3), memory[8:16].view(2, 4).t(),
        torch.randn(2, dtype=torch.complex64).conj().imag, torch.randn(1), argument[2:],
    ]  # fmt: skip
    unwanted = 11
    replayed = Replayed(results, {*range(len(results))} - {unwanted}, [argument])
    assert [len(places) for places, _ in replayed.listed] == [2, 2]
    given = torch.arange(6.0) + 1
    assert replayed.fits([given])
    found = replayed.of([given])
    assert found[unwanted] is None
    for at, (got, kept) in enumerate(zip(found, results, strict=True)):
        if at in (unwanted, len(results) - 1):
            continue
        assert torch.equal(got, kept)
        assert (got.stride(), got.dtype) == (kept.stride(), kept.dtype)
        assert not got.numel() or got.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr()
    assert torch.equal(found[-1], given[2:])
    assert found[8].untyped_storage().data_ptr() == found[9].untyped_storage().data_ptr()
