"""Kernels as files: one archive that runs with no compiler present.

The archive is an uncompressed zip of ``manifest.json``, one library per kernel and, if weights
were exported too, ``packed.safetensors``. The manifest holds the digest of each member.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.installation import ladder_version, tvm_version
from ladder.runtime import library
from ladder.runtime.cache import MANIFEST
from ladder.runtime.compile import Request, family_of, obtain, target_of
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.packed import PackedWeight, gemm_from_dict, pack
from ladder.runtime.tokens import quantize_tokens
from schedules.schedule import parse_plan
from tile_types.errors import ArtifactError, DeviceError, ParseError

if TYPE_CHECKING:
    import torch

    from ladder.runtime.model.whole import WholeModel
    from targets import TileDevice
    from tile_types.quantized import QuantizedTensor

FORMAT = 1
WEIGHTS = "packed.safetensors"


@dataclass(frozen=True)
class Artifact:
    """A loaded artefact: call it like the operator that was exported.

    Parameters
    ----------
    kernel
        The operator.
    packed
        The exported weight, if there was one.
    manifest
        What the archive says about itself.
    """

    kernel: CompiledGemm
    packed: PackedWeight | None
    manifest: Mapping[str, Any]

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedWeight | None = None,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply ``x[..., K]`` by ``packed`` or by the exported weight; see `CompiledGemm`.

        For 8-bit activations a float x is quantized here, with one scale per row.

        Raises
        ------
        ArtifactError
            If no weight is given and none was exported.
        """
        weight = self.packed if packed is None else packed
        if weight is None:
            raise ArtifactError(
                "this artefact was exported without weights; pass packed=artifact.pack(weight)"
            )
        gemm = self.kernel.gemm
        if gemm.token_scale and token_scale is None and x.dtype != self.kernel.dtype:
            x, token_scale = quantize_tokens(x, gemm.activation, gemm.token_group)
        return self.kernel(x, weight, bias, token_scale)

    def pack(self, weight: QuantizedTensor) -> PackedWeight:
        """Bring a quantized matrix into the kernel's layout."""
        from targets import get_device

        return pack(self.kernel.gemm, get_device(self.manifest["device"]), weight)


def export(request: Request, path: str | os.PathLike[str], packed: PackedWeight | None = None) -> Path:
    """Write an operator, compiled for its target, to one file.

    Parameters
    ----------
    request
        The operator.
    path
        The file to write; replaced in one step if it exists.
    packed
        A weight to put beside the kernel.

    Returns
    -------
    The path.

    Raises
    ------
    ArtifactError
        If the file cannot be written.
    """
    plan, kernels = obtain(request)
    members = {f"{kernel.entry}.so": kernel.library.read_bytes() for kernel in kernels}
    if packed is not None:
        members[WEIGHTS] = packed.to_bytes()
    content = {
        "gemm": asdict(request.gemm),
        "plan": str(plan),
        "entries": [kernel.entry for kernel in kernels],
    }
    return write_archive(Path(path), request.target, content, members)


def _digest(data: bytes) -> str:
    """Return the digest that the manifest holds of a member."""
    return hashlib.sha256(data).hexdigest()


def write_archive(
    path: Path, device: TileDevice, content: Mapping[str, Any], members: Mapping[str, bytes]
) -> Path:
    """Write an archive beside its final place, then rename it.

    Parameters
    ----------
    path
        The final place.
    device
        What the code in it is for: a GPU is identified by its name, a CPU by the features that code may use.
    content
        What the manifest says beyond versions, device and digests.
    members
        Name -> bytes.

    Returns
    -------
    The path.

    Raises
    ------
    ArtifactError
        If it cannot be written; an older file at ``path`` stays as it was.
    """
    manifest = {
        "format": FORMAT,
        "ladder": ladder_version(),
        "tvm": tvm_version(),
        "device": device.name,
        "family": family_of(device),
        "features": [] if device.is_gpu else sorted(device.features),
        "members": {name: _digest(data) for name, data in members.items()},
        **content,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
            for name, data in members.items():
                archive.writestr(name, data)
        temporary.replace(path)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Artifact | WholeModel:
    """Load an exported operator or model. Needs TVM's runtime library, no compiler.

    Parameters
    ----------
    path
        The file.
    device
        Where to put the exported weights: by default the CPU or the current GPU.

    Returns
    -------
    What to call as the operator or the model.

    Raises
    ------
    ArtifactError
        If the file is truncated or changed, of another version, or for another device.
    MissingToolError
        If the runtime library is not installed.
    """
    source = Path(path)
    manifest, members = _read(source)
    _check_version(source, manifest)
    check_device(source, manifest)
    if manifest.get("kind") == "model":
        from ladder.runtime.model.saved import load_model

        return load_model(source, manifest, members, device)
    kernel = _operator(source, manifest, members)
    packed = None
    if WEIGHTS in members:
        packed = PackedWeight.from_bytes(members[WEIGHTS], device or manifest["family"])
    return Artifact(kernel, packed, manifest)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the members, all of them verified."""
    advice = "export it again or copy it again"
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
                found = manifest.get("format") if isinstance(manifest, dict) else None
                raise ArtifactError(
                    f"{path} has format {found}, this Ladder reads format {FORMAT}; export it again"
                )
            members = {name: archive.read(name) for name in manifest["members"]}
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist") from error
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise ArtifactError(f"{path} is truncated or no Ladder artefact ({error}); {advice}") from error
    for name, data in members.items():
        if _digest(data) != manifest["members"][name]:
            raise ArtifactError(f"{path}: {name} does not match its digest, the file was changed; {advice}")
    return manifest, members


def _check_version(path: Path, manifest: Mapping[str, Any]) -> None:
    """Kernels call the runtime they were built with: its minor version must be the same."""
    for name, here in (("tvm", tvm_version()), ("ladder", ladder_version())):
        there = str(manifest.get(name))
        if there.split(".")[:2] != here.split(".")[:2]:
            raise ArtifactError(
                f"{path} was exported with {name} {there}, this process has {name} {here};"
                f" export it again or install {name} {there}"
            )


def check_device(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise unless this machine runs code for the artefact's device.

    Raises
    ------
    ArtifactError
        Names both devices.
    """
    device = str(manifest["device"])
    advice = "export it for this device"
    if manifest["family"] == "cpu":
        from targets import host_cpu

        missing = sorted(set(manifest["features"]) - host_cpu().features)
        if missing:
            raise ArtifactError(f"{path} is for {device}; this CPU lacks {', '.join(missing)}; {advice}")
        return
    here = _local_gpu()
    if here != device:
        raise ArtifactError(f"{path} is for {device}; this machine has {here or 'no usable GPU'}; {advice}")


def _local_gpu() -> str | None:
    """Return the target of torch's current GPU, None without a usable one."""
    import torch

    try:
        return (
            target_of(torch.device("cuda", torch.cuda.current_device()))
            if torch.cuda.is_available()
            else None
        )
    except DeviceError:
        return None


def _operator(path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> CompiledGemm:
    """Load the kernel libraries; their files are not needed after that."""
    family, names = str(manifest["family"]), list(manifest["entries"])
    functions: dict[str, Any] = {}
    try:
        gemm = gemm_from_dict(manifest["gemm"])
        limits = [limit for limit, _ in parse_plan(manifest["plan"]).entries]
        with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
            for name in dict.fromkeys(names):
                shared = Path(folder) / f"{name}.so"
                shared.write_bytes(members[shared.name])
                functions[name] = library.load_module(shared, family)[name]
    except (KeyError, TypeError, AttributeError, ParseError) as error:
        raise ArtifactError(
            f"{path} does not fit this version of Ladder: {error}; export it again"
        ) from error
    return CompiledGemm(gemm, family, limits, [functions[name] for name in names], names)
