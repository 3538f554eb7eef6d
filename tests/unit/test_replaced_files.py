"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
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


KILLED = """
import os, signal, sys
from pathlib import Path
from tile_types.files import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_bytes(b"half")
    print("begun", flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def test_what_killed_processes_began_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "kept.other"
    kept.write_text("old")
    other.write_text("old")

    def begin(path: Path, end: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-c", KILLED, str(path), end]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        return process

    for path in (kept, other):
        assert begin(path, "die").wait() == -signal.SIGKILL
    assert (kept.read_text(), len(list(tmp_path.iterdir()))) == ("old", 4)
    writing = begin(kept, "wait")
    with replacing(kept) as part:
        part.write_text("new")
    assert kept.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 4  # what was begun for the other, and what is being written
    writing.communicate()
    assert (writing.returncode, kept.read_bytes()) == (0, b"half")
    with replacing(other) as part:
        part.write_text("new")
    assert sorted(tmp_path.iterdir()) == [kept, other]


def test_names_as_long_as_they_may_be(tmp_path: Path) -> None:
    kept = tmp_path / ("ü" * 127 + "n")
    for text in ("old", "new"):
        with replacing(kept) as part:
            part.write_text(text)
        assert kept.read_text() == text
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("lasting", [False, True])
def test_the_disk_has_all_before_the_old_file_goes(
    tmp_path: Path, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, seen = tmp_path / "kept", []
    kept.write_text("old")

    def sync(descriptor: int) -> None:
        seen.append((os.pread(descriptor, 9, 0), kept.read_text()))
        if seen[1:]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)
    with replacing(kept, lasting=lasting) as part:
        part.write_text("new")
    assert seen == ([(b"new", "old")] if lasting else [])
    if lasting:
        with pytest.raises(ArtifactError, match="No space left"), replacing(kept, lasting=True) as part:
            part.write_text("newer")
    assert (kept.read_text(), list(tmp_path.iterdir())) == ("new", [kept])
