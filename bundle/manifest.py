"""`manifest.json`: everything the runtime needs to know about a bundle, parsed in one place."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import BundleError, field_error
from .files import atomic_file, safe_path, sha256_from_file
from .manifest_records import (
    DRAFT_VOCABULARY,
    INT8,
    MANIFEST,
    SCHEMA_VERSION,
    TAP_CONVENTION,
    WEIGHT_FILE,
    ConvInfo,
    DraftInfo,
    EngineFlag,
    EngineInfo,
    FileInfo,
    GraphInfo,
    Manifest,
    ProposalLaw,
    Provenance,
    QuantizationInfo,
    SelectorInfo,
    TargetInfo,
    TokenizerInfo,
    graph_file,
)
from .manifest_rules import check_manifest
from .records import record_from_dict, record_to_json

__all__ = [
    "DRAFT_VOCABULARY",
    "INT8",
    "MANIFEST",
    "SCHEMA_VERSION",
    "TAP_CONVENTION",
    "WEIGHT_FILE",
    "ConvInfo",
    "DraftInfo",
    "EngineFlag",
    "EngineInfo",
    "FileInfo",
    "GraphInfo",
    "Manifest",
    "ProposalLaw",
    "Provenance",
    "QuantizationInfo",
    "SelectorInfo",
    "TargetInfo",
    "TokenizerInfo",
    "Verify",
    "check_files",
    "check_manifest",
    "file_info",
    "graph_file",
    "manifest_alone",
    "manifest_from_bundle",
    "manifest_to_file",
]


class Verify(enum.Enum):
    """How much of a bundle is checked when it is opened."""

    HASHES = "hashes"
    SIZES = "sizes"


def manifest_to_file(manifest: Manifest, directory: Path) -> None:
    """Write the manifest whole or not at all."""
    with atomic_file(directory / MANIFEST) as path:
        path.write_text(record_to_json(manifest), encoding="utf-8")


def manifest_from_bundle(directory: Path, verify: Verify = Verify.HASHES) -> Manifest:
    """Read and check a bundle's manifest and files.

    Args:
        directory: the bundle.
        verify: compare every file's size and hash (default), or its size only.

    Raises:
        BundleError: no bundle there, a key is wrong, or a file is missing, changed or outside.
    """
    directory = Path(directory)
    manifest = manifest_alone(directory)
    check_files(manifest, directory, verify)
    return manifest


def manifest_alone(directory: Path) -> Manifest:
    """Read and check a bundle's manifest, and none of the files that it names.

    Raises:
        BundleError: no bundle there, or a key is wrong.
    """
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"bundle: no {MANIFEST} in {str(directory)!r}, expected a directory made by `dflash export`"
        )
    data = _json_from_file(path)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise field_error(
            BundleError,
            f"{MANIFEST}: schema_version",
            version,
            str(SCHEMA_VERSION),
            "export again with this version of dflash-deploy",
        )
    manifest = record_from_dict(Manifest, data, MANIFEST)
    check_manifest(manifest)
    return manifest


def _json_from_file(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise BundleError(f"{MANIFEST}: cannot be read ({cause.strerror}); check its permissions") from cause
    if not content.strip(b"\0 \t\r\n"):
        raise BundleError(f"{MANIFEST}: is empty; copy the bundle again or export again")
    try:
        data = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise BundleError(
            f"{MANIFEST}: is no text in UTF-8; copy the bundle again or export again"
        ) from cause
    except (ValueError, RecursionError) as cause:
        raise BundleError(
            f"{MANIFEST}: is no whole JSON ({cause}); copy the bundle again or export again"
        ) from cause
    if not isinstance(data, dict):
        raise field_error(BundleError, MANIFEST, type(data).__name__, "an object", "export again")
    return data


def check_files(
    manifest: Manifest, directory: Path, verify: Verify, names: Collection[str] | None = None
) -> None:
    """Compare the files on disk with the manifest; see `manifest_from_bundle` for what is raised.

    Args:
        manifest: says what the files are.
        directory: the bundle.
        verify: what is compared.
        names: the files to compare; None compares all.
    """
    for relative in manifest.files if names is None else names:
        info = manifest.files[relative]
        path = safe_path(directory, relative)
        if not path.is_file():
            raise BundleError(f"{relative}: missing from the bundle; copy it whole or export again")
        size = path.stat().st_size
        if size != info.bytes:
            raise BundleError(
                f"{relative}: got {size} bytes, expected {info.bytes}; copy it again or export again"
            )
        if verify is Verify.HASHES:
            digest = sha256_from_file(path)
            if digest != info.sha256:
                raise BundleError(
                    f"{relative}: got SHA-256 {digest}, expected {info.sha256}; it was changed after export"
                )


def file_info(path: Path) -> FileInfo:
    """Measure one file."""
    return FileInfo(path.stat().st_size, sha256_from_file(path))
