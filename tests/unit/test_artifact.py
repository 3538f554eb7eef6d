"""Artefact files: what is refused and how, and that a failed write leaves the old file."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ladder.installation import ladder_version, tvm_version
from ladder.ir.gemm import Gemm
from ladder.lower.build import entry_name
from ladder.runtime import archive, artifact, signing
from ladder.runtime.loading import load
from ladder.runtime.packed import PackedWeight
from schedules.cpu_policy import cpu_schedule
from schedules.schedule import Plan
from targets import host_cpu
from tile_types.errors import ArtifactError

GEMM = Gemm(n=64, k=128, weight="int4", group_size=32)


def write(path: Path, members: dict[str, bytes] | None = None, **changes: Any) -> Path:
    """Write an archive as `export` does, with a library that is none."""
    schedule = cpu_schedule(GEMM, host_cpu(), 1)
    name = entry_name(GEMM, host_cpu().name, schedule)
    files = {f"{name}.so": b"not a library"} if members is None else members
    content = {"gemm": asdict(GEMM), "plan": str(Plan(((1, schedule),))), "entries": [name]}
    return artifact.write_archive(path, host_cpu(), {**content, **changes}, files)


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ladder")
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 5):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=r"a\.ladder is truncated or no Ladder artefact"):
            load(path)


def test_changed_member(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ladder")
    data = path.read_bytes().replace(b"not a library", b"not 1 library")
    path.write_bytes(data)
    with pytest.raises(ArtifactError):
        load(path)


def test_member_that_does_not_match_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are right, the manifest's digest is not: a part was exchanged."""
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_digest", lambda data: "0" * 64 if data == b"other" else digest(data))
        path = write(tmp_path / "a.ladder", {"f.so": b"other"})
    with pytest.raises(ArtifactError, match=r"f\.so does not match its digest"):
        load(path)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_every_byte_is_checked(tmp_path: Path) -> None:
    """Every byte that is changed and every length that is cut gives one error; zip tools read the file."""
    path, found = tmp_path / "a.ladder", tmp_path / "b.ladder"
    archive.write(path, {"device": "x"}, {"f.so": b"abc" * 9, "stored.safetensors": b""})
    with zipfile.ZipFile(path) as plain:
        assert plain.testzip() is None
        assert plain.read("f.so") == b"abc" * 9
    data = path.read_bytes()
    assert archive.read(path)[1] == {"f.so": b"abc" * 9, "stored.safetensors": b""}
    altered = [data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :] for at in range(len(data))]
    for changed in (*altered, *(data[:at] for at in range(len(data))), data + b"\0"):
        found.write_bytes(changed)
        with pytest.raises(ArtifactError, match=r"b\.ladder"):
            archive.read(found)


BAD_NAMES = [
    "../x.so",
    "/tmp/x.so",
    "a/b.so",
    "x.so\n",
    ".so",
    "x.py",
    "signature",
    "a" * 300 + ".so",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_members_have_names_of_a_list(name: str, tmp_path: Path) -> None:
    path = archive.write(tmp_path / "a.ladder", {}, {"f.so": b""})
    manifest = archive.read(path)[0]
    with pytest.raises(ArtifactError, match=r"manifest\.json names a member"):
        archive.read(forged(tmp_path / "b.ladder", {name: b"x"}, manifest))


def forged(path: Path, members: dict[str, bytes], manifest: dict[str, Any]) -> Path:
    """Write an archive whose digests are right, with names that Ladder does not write."""
    content = {name: value for name, value in manifest.items() if name not in ("format", "signed", "members")}
    return archive.write(path, content, members)


@pytest.mark.parametrize("size", [-1, 1 << 40, True, "3", None])
def test_sizes_are_checked_before_members_are_read(size: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ladder"
    archive.write(path, {}, {"f.so": b"abc"})
    data = path.read_bytes()
    start = len(archive._Entry("manifest.json", 0, 0, 0).local)
    text = json.loads(data[start : data.index(b"PK", start)])
    text["members"]["f.so"]["size"] = size
    altered = json.dumps(text).encode()
    head = archive._Entry("manifest.json", len(altered), zlib.crc32(altered), 0).local
    path.write_bytes(head + altered + data[start:])
    with pytest.raises(ArtifactError, match=r"f\.so (states|lacks bytes)"):
        archive.read(path)


def test_compressed_archives_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.ladder"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("manifest.json", json.dumps({"format": 2, "members": {}}))
        bomb.writestr("stored.safetensors", bytes(1 << 26))
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load(path)


def test_deep_and_repeated_json_is_one_error(tmp_path: Path) -> None:
    for text in (b'{"format": ' + b"[" * 100_000, b'{"format": 2, "format": 2}', b"\xff\xfe"):
        path = tmp_path / "a.ladder"
        path.write_bytes(archive._Entry("manifest.json", len(text), zlib.crc32(text), 0).local + text)
        with pytest.raises(ArtifactError, match=r"manifest\.json"):
            archive.read(path)


def test_names_stand_once_in_a_manifest(tmp_path: Path) -> None:
    path = archive.write(tmp_path / "a.ladder", {"note": 1}, {"f.so": b"abc"})
    data = path.read_bytes()
    start, stop = len(archive._Entry("manifest.json", 0, 0, 0).local), data.index(b"PK", 4)
    text = data[start:stop].replace(b'"note"', b'"note": 2, "note"')
    path.write_bytes(
        archive._Entry("manifest.json", len(text), zlib.crc32(text), 0).local + text + data[stop:]
    )
    with pytest.raises(ArtifactError, match="twice"):
        archive.read(path)


def test_a_manifest_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive.write(tmp_path / "a.ladder", {"note": "x" * 1000}, {"f.so": b"abc"})
    assert archive.read(path)[1] == {"f.so": b"abc"}
    monkeypatch.setattr(archive, "MOST_MANIFEST", 1000)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        archive.read(path)


def test_signatures(tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    mine, other = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    plain = archive.write(tmp_path / "plain", {}, {"f.so": b"abc"})
    signed = archive.write(tmp_path / "signed", {}, {"f.so": b"abc"}, mine)
    pem = mine.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key").write_bytes(pem)
    for key in (None, mine.public_key(), pem, tmp_path / "key"):
        assert archive.read(signed, key)[1] == {"f.so": b"abc"}
    with pytest.raises(ArtifactError, match="is not signed"):
        archive.read(plain, pem)
    with pytest.raises(ArtifactError, match="signature was not made by the given key"):
        archive.read(signed, other.public_key())
    for wrong in (b"no key", tmp_path / "missing", signed):
        with pytest.raises(ArtifactError, match="key cannot be read"):
            archive.read(signed, wrong)
    private = mine.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    assert signing.is_signed(pem, b"m", signing.sign(private, b"m"))
    assert not signing.is_signed(pem, b"n", signing.sign(private, b"m"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": 3}, ["does not fit this version", "manifest.device is 3"]),
        ({"ladder": "99.0.0"}, ["ladder 99.0.0", ladder_version()]),
        ({"tvm": "0.1.0"}, ["tvm 0.1.0", tvm_version()]),
        ({"device": "cuda/sm_90a", "family": "cuda"}, ["cuda/sm_90a", "this machine has"]),
        ({"device": "cpu/other", "features": ["avx999"]}, ["cpu/other", "avx999"]),
        ({"plan": "nonsense"}, ["does not fit this version", "nonsense"]),
        ({"entries": ["g"]}, ["does not fit this version", "are not for this product"]),
        ({"entries": []}, ["does not fit this version", "are not for this product"]),
        ({"gemm": {"n": 1}}, ["does not fit this version"]),
        ({"gemm": {"n": "1", "k": 1, "weight": "int4"}}, ["does not fit this version", "gemm.n"]),
    ],
)
def test_other_version_or_device(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = write(tmp_path / "a.ladder", **changes)
    with pytest.raises(ArtifactError) as caught:
        load(path)
    assert all(word in str(caught.value) for word in [str(path), *words])


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ArtifactError, match="no Ladder artefact"):
        load(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as other:
        other.writestr("manifest.json", "[]")
    with pytest.raises(ArtifactError, match="another Ladder's"):
        load(tmp_path / "zip")
    path = archive.write(tmp_path / "later", {"format": 99}, {})
    with pytest.raises(ArtifactError, match="format 99"):
        load(path)


def test_a_library_that_does_not_load_is_an_artefact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot load"):
        load(write(tmp_path / "a.ladder"))


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.ladder")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ArtifactError, match="disk full"):
        write(path, ladder="2")
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


@pytest.mark.parametrize("family", ["cuda", "cpu"])
def test_weights_that_an_older_ladder_packed_are_refused(family: str) -> None:
    """Their bits lie in another order, or their scales and zero points are numbers of 4 bytes."""
    import torch

    packed = PackedWeight(GEMM, family, {"words": torch.zeros(4)})
    fields = json.loads(packed.describe())
    del fields["packing"]
    with pytest.raises(ArtifactError, match="pack it again"):
        PackedWeight.from_arrays(json.dumps(fields), packed.arrays)


def test_rows_with_one_scale_that_were_packed_without_runs_are_refused() -> None:
    """Their columns end where those of the last run do not: kernels would leave some out."""
    import torch

    whole = Gemm(16, 160, "int8", "float16", "float16", 160, False)
    packed = PackedWeight(whole, "cpu", {"words": torch.zeros(4)})
    assert PackedWeight.from_arrays(packed.describe(), packed.arrays).gemm == whole
    fields = json.loads(packed.describe()) | {"packing": 3}
    with pytest.raises(ArtifactError, match="pack it again"):
        PackedWeight.from_arrays(json.dumps(fields), packed.arrays)
