"""Artefact files: what is refused and how, and that a failed write leaves the old file."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ladder.installation import ladder_version, tvm_version
from ladder.ir.gemm import Gemm
from ladder.runtime import artifact
from ladder.runtime.packed import PackedWeight
from schedules.schedule import CpuSchedule, Plan
from targets import host_cpu
from tile_types.errors import ArtifactError

GEMM = Gemm(n=64, k=128, weight="int4", group_size=32)


def write(path: Path, members: dict[str, bytes] | None = None, **changes: Any) -> Path:
    """Write an archive as `export` does, with a library that is none."""
    files = {"f.so": b"not a library"} if members is None else members
    content = {"gemm": asdict(GEMM), "plan": str(Plan(((1, CpuSchedule("fma")),))), "entries": ["f"]}
    return artifact.write_archive(path, host_cpu(), {**content, **changes}, files)


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ladder")
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 5):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=r"a\.ladder is truncated or no Ladder artefact"):
            artifact.load(path)


def test_changed_member(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ladder")
    data = path.read_bytes().replace(b"not a library", b"not 1 library")
    path.write_bytes(data)
    with pytest.raises(ArtifactError):
        artifact.load(path)


def test_member_that_does_not_match_its_digest(tmp_path: Path) -> None:
    """The archive's own checksum is right, the manifest's is not: a part was exchanged."""
    path = write(tmp_path / "a.ladder")
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    artifact.write_archive(path, host_cpu(), manifest, {"f.so": b"another library"})
    with pytest.raises(ArtifactError, match=r"f\.so does not match its digest"):
        artifact.load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 99}, ["format 99", "export it again"]),
        ({"ladder": "99.0.0"}, ["ladder 99.0.0", ladder_version()]),
        ({"tvm": "0.1.0"}, ["tvm 0.1.0", tvm_version()]),
        ({"device": "cuda/sm_90a", "family": "cuda"}, ["cuda/sm_90a", "this machine has"]),
        ({"device": "cpu/other", "features": ["avx999"]}, ["cpu/other", "avx999"]),
        ({"plan": "nonsense"}, ["does not fit this version", "nonsense"]),
        ({"entries": ["g"]}, ["does not fit this version", "g.so"]),
        ({"gemm": {"n": 1}}, ["does not fit this version"]),
    ],
)
def test_other_version_or_device(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = write(tmp_path / "a.ladder", **changes)
    with pytest.raises(ArtifactError) as caught:
        artifact.load(path)
    assert all(word in str(caught.value) for word in [str(path), *words])


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        artifact.load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ArtifactError, match="no Ladder artefact"):
        artifact.load(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("manifest.json", "[]")
    with pytest.raises(ArtifactError, match="format None"):
        artifact.load(tmp_path / "zip")


def test_a_library_that_does_not_load_is_an_artefact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot load"):
        artifact.load(write(tmp_path / "a.ladder"))


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.ladder")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", fail)
    with pytest.raises(ArtifactError, match="disk full"):
        write(path, format=2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_packed_weight_bytes_round_trip() -> None:
    import torch

    arrays = {
        "words": torch.arange(12, dtype=torch.int32).reshape(3, 4).view(torch.uint32),
        "scales": torch.rand(2, 3).bfloat16(),
        "row_scale": torch.rand(3),
    }
    packed = PackedWeight(GEMM, "cuda", arrays)
    again = PackedWeight.from_bytes(packed.to_bytes())
    assert (again.gemm, again.family, again.layout) == (GEMM, "cuda", packed.layout)
    assert list(again.arrays) == list(arrays)
    assert all(torch.equal(again.arrays[n].view(torch.uint8), arrays[n].view(torch.uint8)) for n in arrays)
    assert again.nbytes == 12 * 4 + 6 * 2 + 3 * 4
    for broken in (b"", b"12345678", packed.to_bytes()[:-8], packed.to_bytes()[:40]):
        with pytest.raises(ArtifactError, match="no packed weight"):
            PackedWeight.from_bytes(broken)
