"""Ed25519 signatures of manifests. Needs the package ``cryptography``, which the extra ``sign`` brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tile_types.errors import ArtifactError, MissingToolError

PrivateKey = Any
"""An ``Ed25519PrivateKey`` of ``cryptography``, its PEM text as bytes, or the path of such a file."""

PublicKey = Any
"""An ``Ed25519PublicKey`` of ``cryptography``, its PEM text as bytes, or the path of such a file."""

BYTES = 64
"""Length of a signature."""

PURPOSE = b"ladder artefact\0"
"""Precedes what is signed, so that a signature for another purpose is none here."""


def sign(key: PrivateKey, manifest: bytes) -> bytes:
    """Return the signature of a manifest.

    key: An ``Ed25519PrivateKey``, its PEM text as bytes without password, or the path of such a file.
    Raises MissingToolError if ``cryptography`` is not installed.
    Raises ArtifactError if the key is none.
    """
    ed25519, serialization = _modules()
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        key = _parsed(key, lambda text: serialization.load_pem_private_key(text, None))
        _require(key, ed25519.Ed25519PrivateKey)
    return bytes(key.sign(PURPOSE + manifest))


def is_signed(key: PublicKey, manifest: bytes, signature: bytes) -> bool:
    """Tell whether the owner of a key signed a manifest; keys and errors as of `sign`."""
    ed25519, serialization = _modules()
    from cryptography.exceptions import InvalidSignature

    if not isinstance(key, ed25519.Ed25519PublicKey):
        key = _parsed(key, serialization.load_pem_public_key)
        _require(key, ed25519.Ed25519PublicKey)
    try:
        key.verify(signature, PURPOSE + manifest)
    except InvalidSignature:
        return False
    return True


def _modules() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingToolError(
            "signatures need the package cryptography: install ladder-compiler[sign]"
        ) from error
    return ed25519, serialization


def _parsed(key: Any, parse: Any) -> Any:
    """Return a key from its PEM text, or from a file of that."""
    try:
        return parse(key if isinstance(key, bytes) else Path(key).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"the key cannot be read: {error}; pass an Ed25519 key in PEM form") from error


def _require(key: Any, kind: type) -> None:
    if not isinstance(key, kind):
        raise ArtifactError(f"the key is a {type(key).__name__}, signatures are by Ed25519")
