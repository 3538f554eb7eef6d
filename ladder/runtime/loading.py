"""Load an exported operator or model from a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ladder.runtime import archive, artifact
from tile_types.errors import path_of

if TYPE_CHECKING:
    import torch

    from ladder.runtime.model.whole import WholeModel
    from ladder.runtime.signing import PublicKey


def load(
    path: str | os.PathLike[str], device: torch.device | str | None = None, *, verify: PublicKey | None = None
) -> artifact.Artifact | WholeModel:
    """Load an exported operator or model. Needs TVM's runtime library, no compiler.

    A file holds machine code, which runs: load only what you trust, or give the key of whom you trust.

    Parameters
    ----------
    path
        The file.
    device
        Where to put the exported weights: by default the CPU or the current GPU.
    verify
        The Ed25519 key that must have signed the file, see `ladder.runtime.signing`.

    Returns
    -------
    What to call as the operator or the model.

    Raises
    ------
    ArtifactError
        If the file is truncated or changed, not signed by ``verify``, of another version, or for another
        device.
    MissingToolError
        If the runtime library is not installed; to verify, if ``cryptography`` is not.
    """
    source = path_of(path, "the file")
    manifest, members = archive.read(source, verify)
    artifact.check_header(source, manifest)
    if manifest.get("kind") == "model":
        from ladder.runtime.model.saved import load_model

        return load_model(source, manifest, members, device)
    return artifact.load_operator(source, manifest, members, device)
