"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tile_types.errors import ArtifactError, CheckpointError
from tile_types.files import replacing, require_writable


def test_a_file_is_replaced_once_all_is_written(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("old")
    link.symlink_to("kept")
    with replacing(link) as part:
        part.write_text("new")
        assert kept.read_text() == "old"
    assert (kept.read_text(), link.is_symlink()) == ("new", True)
    assert sorted(tmp_path.iterdir()) == [kept, link]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_what_fails_meanwhile_leaves_the_old_file_alone(tmp_path: Path, fault: type[BaseException]) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")

    def write() -> None:
        with replacing(kept) as part:
            part.write_text("new")
            raise fault

    with pytest.raises(fault):
        write()
    assert kept.read_text() == "old"
    require_writable(kept)
    require_writable(Path("/dev/null"))
    assert kept.read_text() == "old"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("name", ["folder", "absent/file", "file/below", "circle", "zero\0byte", "n" * 300])
def test_what_cannot_be_written_is_an_error_of_the_callers_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*; do"),
        replacing(tmp_path / name, CheckpointError, "; do") as part,
    ):
        part.write_text("new")
    with pytest.raises(ArtifactError, match="cannot write"):
        require_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file", "folder"]


def test_devices_and_pipes_are_written_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(pipe) as part:
        part.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(ArtifactError, match="No space left"), replacing(Path("/dev/full")) as part:
        part.write_text("nowhere")
    assert Path("/dev/full").is_char_device()
