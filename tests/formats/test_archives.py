"""Archives that torch writes, compressed by others."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import ladder


def recompressed(tensor: torch.Tensor, path: Path) -> None:
    """Write a tensor as torch does, and compress the archive."""
    torch.save({"a": tensor}, path)
    with zipfile.ZipFile(path) as archive:
        entries = [(each.filename, archive.read(each)) for each in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in entries:
            archive.writestr(*entry)


def test_arrays_of_compressed_archives_are_not_mapped(tmp_path: Path) -> None:
    """Their bytes were read as they lie in the file; one that takes far more than the file is refused."""
    tensor = torch.arange(5000) * 977 % 1009
    recompressed(tensor, tmp_path / "a.pt")
    assert torch.equal(ladder.load_checkpoint(tmp_path / "a.pt")["a"], tensor)
    recompressed(torch.zeros(1 << 20), tmp_path / "b.pt")
    with pytest.raises(ladder.CheckpointError, match="is compressed: it would take 4"):
        ladder.load_checkpoint(tmp_path / "b.pt")
