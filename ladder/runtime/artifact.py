"""Kernels as files: one archive that runs with no compiler present.

The archive (`ladder.runtime.archive`) holds a manifest, one library per kernel and, if weights were exported
too, ``packed.safetensors``. Nothing is ever unpickled, but kernels are machine code: loading a file runs what
it holds.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ladder.installation import ladder_version, tvm_version
from ladder.runtime import archive, library
from ladder.runtime.archive import MANIFEST
from ladder.runtime.compile import Request, family_of, obtain, runs_code_of, target_of
from ladder.runtime.fields import UNPICKLED, refuse_contradiction, require
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.packed import (
    PackedWeight,
    gemm_from_dict,
    layout_of,
    own_order,
    pack,
    refuse_layout,
)
from ladder.runtime.tokens import quantize_tokens
from schedules.schedule import parse_plan
from targets import get_device, host_cpu
from tile_types.errors import (
    UNKNOWN_TYPE,
    UNREGISTERED,
    ArtifactError,
    DeviceError,
    DTypeError,
    MissingToolError,
    TypeValuesError,
    path_of,
)
from tile_types.identity import VALUES, own_values_named, require_values

if TYPE_CHECKING:
    import torch

    from ladder.ir.gemm import Gemm
    from ladder.runtime.signing import PrivateKey
    from targets import TileDevice
    from tile_types.quantized import QuantizedTensor

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

        Raises ArtifactError if no weight is given and none was exported.
        """
        weight = self.packed if packed is None else packed
        if weight is None:
            raise ArtifactError(
                "this artefact was exported without weights; pass packed=artifact.pack(weight)"
            )
        gemm = self.kernel.gemm
        if gemm.token_scale and token_scale is None and x.dtype != self.kernel.dtype:
            x, token_scale = quantize_tokens(x, gemm.activation, gemm.token_group)
        try:
            return self.kernel(x, weight, bias, token_scale)
        except Exception as error:
            refuse_contradiction(error)
            raise

    def __copy__(self) -> Artifact:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Artifact:
        """Return an operator of the same kernels with a weight of its own."""
        return replace(self, packed=copy.deepcopy(self.packed, memo))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise DTypeError(UNPICKLED)

    def pack(self, weight: QuantizedTensor) -> PackedWeight:
        """Bring a quantized matrix into the kernel's layout."""
        return pack(self.kernel.gemm, get_device(self.manifest["device"]), weight)


def export(
    request: Request,
    path: str | os.PathLike[str],
    packed: PackedWeight | None = None,
    sign: PrivateKey | None = None,
) -> Path:
    """Write an operator, compiled for its target, to one file.

    request: The operator.
    path: The file to write; replaced in one step if it exists.
    packed: A weight to put beside the kernel.
    sign: An Ed25519 key that signs the file, see `ladder.runtime.signing`.
    Returns: The path.
    Raises ArtifactError if the file cannot be written.
    Raises ShapeError if the weight was packed for another operator, or a device with another order of bits.
    """
    expected = layout_of(request.gemm, family_of(request.target), own_order(request.gemm, request.target))
    if packed is not None and packed.layout != expected:
        refuse_layout(packed.layout, expected)
    plan, kernels = obtain(request)
    members = {f"{kernel.entry}.so": kernel.library.read_bytes() for kernel in kernels}
    if packed is not None:
        members[WEIGHTS] = packed.to_bytes()
    content = {
        "gemm": asdict(request.gemm),
        "plan": str(plan),
        "entries": [kernel.entry for kernel in kernels],
    }
    return write_archive(path_of(path, "the file"), request.target, content, members, sign)


def write_archive(
    path: Path,
    device: TileDevice,
    content: Mapping[str, Any],
    members: Mapping[str, bytes],
    sign: PrivateKey | None = None,
) -> Path:
    """Write an archive with a manifest that says what it is for.

    path: The file; replaced in one step if it exists.
    device: What the code in it is for: a GPU is identified by its name, a CPU by the features that code may
        use.
    content: What the manifest says beyond versions, device and digests.
    members: Name -> bytes.
    sign: An Ed25519 key.
    Returns: The path.
    Raises ArtifactError if it cannot be written; an older file at ``path`` stays as it was.
    """
    own = own_values_named(json.dumps(content))
    manifest = {
        "ladder": ladder_version(),
        "tvm": tvm_version(),
        "device": device.name,
        "family": family_of(device),
        "features": [] if device.is_gpu else sorted(device.features),
        **({VALUES: own} if own else {}),
        **content,
    }
    return archive.write(path, manifest, members, sign)


def check_header(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check what the manifests of operators and models have alike.

    Raises ArtifactError if the file is of another version or for another device.
    Raises TypeValuesError if types of its weights have other values here.
    """
    _check_version(path, manifest)
    with reading(path, MANIFEST):
        require(manifest, HEADER, "manifest")
    try:
        require_values(manifest.get(VALUES))
    except TypeValuesError as error:
        raise TypeValuesError(f"{path}: {error}") from error
    check_device(path, manifest)


def load_operator(
    path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes], device: Any = None
) -> Artifact:
    """Return the operator of an archive whose members are verified.

    Raises ArtifactError if it does not fit this version of Ladder.
    """
    with reading(path, MANIFEST):
        require(manifest, OPERATOR, "manifest")
        kernel = _operator(manifest, members)
    packed = None
    if WEIGHTS in members:
        with reading(path, WEIGHTS):
            packed = PackedWeight.from_bytes(members[WEIGHTS], device or manifest["family"])
            if packed.layout != kernel.layout:
                refuse_layout(packed.layout, kernel.layout)
    return Artifact(kernel, packed, manifest)


HEADER = {"device": str, "family": str, "features": [str]}
"""Fields of every manifest beyond format, versions and members; see `ladder.runtime.fields`."""

OPERATOR = {"gemm": {str: object}, "plan": str, "entries": [str]}
"""Fields of an operator's manifest."""


@contextmanager
def reading(path: Path, member: str) -> Iterator[None]:
    """Name file and member in the error for content that this version of Ladder cannot have written.

    Whatever a check finds or a constructor cannot take, the caller sees one class of error.
    """
    try:
        yield
    except MissingToolError:
        raise
    except Exception as error:
        text = str(error) or type(error).__name__
        if UNKNOWN_TYPE in text:
            raise ArtifactError(f"{path}: {member}: {text}; {UNREGISTERED}") from error
        raise ArtifactError(
            f"{path}: {member} does not fit this version of Ladder: {text}; export it again"
        ) from error


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

    Raises ArtifactError: Names both devices.
    """
    device = str(manifest["device"])
    advice = "export it for this device"
    if manifest["family"] == "cpu":
        missing = sorted(set(manifest["features"]) - host_cpu().features)
        if missing:
            raise ArtifactError(f"{path} is for {device}; this CPU lacks {', '.join(missing)}; {advice}")
        return
    here = _local_gpu()
    if here is None or not runs_code_of(here, device):
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


def _operator(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> CompiledGemm:
    """Load the kernels of the one product."""
    load_entry = loader(members, manifest["family"])
    gemm = gemm_from_dict(manifest["gemm"])
    return operator_of(gemm, manifest["plan"], manifest["entries"], load_entry, manifest)


def operator_of(
    gemm: Gemm, plan: str, names: Sequence[str], load_entry: Callable[[str], Any], manifest: Mapping[str, Any]
) -> CompiledGemm:
    """Return the operator of a product, once what is said of its kernels fits.

    gemm: The problem.
    plan: Text of the schedules.
    names: Of the kernels, one per schedule: each is a digest of problem, device and schedule.
    load_entry: Kernel -> its function.
    manifest: Says device and family.
    Raises ArtifactError if a kernel is not for this problem.
    """
    from ladder.lower.build import entry_name

    entries = parse_plan(plan).entries
    expected = [entry_name(gemm, manifest["device"], schedule) for _, schedule in entries]
    if expected != list(names):
        raise ArtifactError(f"the kernels {', '.join(names)} are not for this product and plan")
    limits = [limit for limit, _ in entries]
    order = own_order(gemm, get_device(manifest["device"]))
    return CompiledGemm(gemm, manifest["family"], limits, [load_entry(name) for name in names], order)


def loader(members: Mapping[str, bytes], family: str) -> Callable[[str], Any]:
    """Return what gives the function of a kernel whose library is a member; each is loaded once."""

    @cache
    def load_entry(name: str) -> Any:
        if f"{name}.so" not in members:
            raise ArtifactError(f"there is no member {name}.so")
        module = library.load_library(members[f"{name}.so"], f"{name}.so", family)
        return library.entry_of(module, name, family)

    return load_entry
