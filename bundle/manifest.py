"""`manifest.json`: everything the runtime needs to know about a bundle, parsed in one place."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from . import tuned
from .errors import BundleError, field_error
from .files import atomic_file, safe_path, sha256_from_file
from .limits import ShapeLimits
from .records import record_from_dict, record_to_json
from .tensors import DRAFT, MOST_SLOTS, TARGET, CacheShape, DType, GraphIO, draft_io, target_io

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
INT8 = "int8"
"""Among a graph's passes, where its weights were rounded."""
DRAFT_VOCABULARY = "draft-vocabulary"
"""Among a graph's passes, where the draft was made to propose among fewer tokens."""
TAP_CONVENTION = "tap i = output of decoder layer i (0-based), before the final norm"


class Verify(enum.Enum):
    """How much of a bundle is checked when it is opened."""

    HASHES = "hashes"
    SIZES = "sizes"


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class GraphInfo:
    """One ONNX graph: its file, versions, interface, and the named intermediate values in it."""

    file: str
    opset: int
    ir_version: int
    io: GraphIO
    stages: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetInfo:
    """The target model."""

    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    embedding_rows: int
    cache: CacheShape


@dataclass(frozen=True)
class SelectorInfo:
    """DFlash2's candidate selector."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class ConvInfo:
    """DFlash2's grouped dynamic convolutions."""

    kernel_size: int
    group_size: int


class ProposalLaw(enum.Enum):
    """What a sampled proposal can be drawn from.

    ROWS: from each row's logits by themselves. CANDIDATES: from the candidates' scores, which depend on the
    candidate before. FIXED: from nothing; the draft has no law of its own over the target's vocabulary, or
    its rows saw each other's tokens, and what it proposes is taken as it is.
    """

    ROWS = "rows"
    CANDIDATES = "candidates"
    FIXED = "fixed"


@dataclass(frozen=True)
class DraftInfo:
    """The draft model. `first_proposal_row` is 1, or 0 where the anchor's own row proposes a token."""

    family: str
    format: str
    hidden_size: int
    num_layers: int
    block_size: int
    first_proposal_row: int
    mask_token_id: int
    taps: tuple[int, ...]
    cache: CacheShape
    draft_vocab_size: int
    conv: ConvInfo | None = None
    selector: SelectorInfo | None = None
    proposal_law: ProposalLaw = ProposalLaw.FIXED
    tap_convention: str = TAP_CONVENTION

    @property
    def proposals(self) -> int:
        """Tokens proposed a round."""
        return self.block_size - self.first_proposal_row


@dataclass(frozen=True)
class QuantizationInfo:
    """How weights were rounded, and what that did to the target over a text.

    Attributes:
        scheme: in words.
        perplexity: of the float32 target.
        perplexity_ratio: of the quantised target, over it.
        greedy_agreement: share of places where both choose the same token.
        tokens: how many there were.
        ids_sha256: of the text's token ids, as little-endian int64; calibrated and checked with in turn.
    """

    scheme: str
    perplexity: float
    perplexity_ratio: float
    greedy_agreement: float
    tokens: int
    ids_sha256: str


@dataclass(frozen=True)
class TokenizerInfo:
    """Text side. Paths are inside the bundle; `special` holds the template's named tokens as text."""

    file: str | None = None
    chat_template: str | None = None
    special: dict[str, str] = field(default_factory=dict)
    bos_token_id: int | None = None


@dataclass(frozen=True)
class Provenance:
    """Where a checkpoint came from: its format, its name, and the hashes of the files that were read."""

    format: str
    name: str
    dtype: str
    files: dict[str, FileInfo] = field(default_factory=dict)
    note: str = ""


class EngineFlag(enum.Enum):
    """What is special about an engine.

    Members:
        DECOMPOSABLE_ATTENTION: attention may run as separate matrix products and a softmax.
        STRIPPED: holds no weights; it is refitted from the bundle when it is loaded.
        WEIGHT_STREAMING: may keep part of its weights in host memory.
        USER_ALLOCATION: takes its working memory from the caller, so that its passes can be captured.
    """

    DECOMPOSABLE_ATTENTION = "decomposable-attention"
    STRIPPED = "stripped"
    WEIGHT_STREAMING = "weight-streaming"
    USER_ALLOCATION = "user-allocation"


@dataclass(frozen=True)
class EngineInfo:
    """One built engine.

    Attributes:
        graph: the graph it was built from.
        backend: the library that built it.
        version: the library's version, to the last part.
        file: path inside the bundle.
        precision: element type of weights and caches.
        compute_capabilities: GPU generations it runs on.
        graph_sha256: hash of the graph's file at the time.
        profiles: for each profile, in the engine's order, the (least, typical, largest) size of each axis.
        limits: the limits that the profiles were planned for.
        weights_sha256: hash of each weight file at the time.
        flags: what is special about it.
        plugin: name and version of the plugin it was built with, e.g. ``dflash::GroupedDynamicConv 1``.
    """

    graph: str
    backend: str
    version: str
    file: str
    precision: str
    compute_capabilities: tuple[str, ...]
    graph_sha256: str
    profiles: dict[str, dict[str, tuple[int, int, int]]]
    limits: ShapeLimits
    weights_sha256: dict[str, str] = field(default_factory=dict)
    flags: tuple[EngineFlag, ...] = ()
    plugin: str | None = None


@dataclass(frozen=True)
class Manifest:
    """A bundle's contract.

    `max_length` is the longest sequence (prompt and output) in tokens; caches hold `max_length +
    slack_slots` slots, so that a whole block may be verified and padded up to the very end.
    `tuned` are graphs for ONNX Runtime on the CPU, see `bundle.tuned`.
    """

    schema_version: int
    name: str
    dtype: DType
    float32_parts: tuple[str, ...]
    max_length: int
    slack_slots: int
    target: TargetInfo
    draft: DraftInfo
    stop_token_ids: tuple[int, ...]
    tokenizer: TokenizerInfo
    graphs: dict[str, GraphInfo]
    provenance: dict[str, Provenance]
    exported_with: dict[str, str]
    files: dict[str, FileInfo]
    engines: dict[str, EngineInfo] = field(default_factory=dict)
    quantization: QuantizationInfo | None = None
    tuned: dict[str, GraphInfo] = field(default_factory=dict)

    def check(self) -> None:
        """Check what a hand-edited manifest could break.

        Raises:
            BundleError: naming the field, the value and what it must be.
        """

        def need(ok: bool, what: str, got: object, expected: str) -> None:
            if not ok:
                raise field_error(BundleError, f"{MANIFEST}: {what}", got, expected)

        draft, target = self.draft, self.target
        longest = MOST_SLOTS - self.slack_slots
        need(2 <= self.max_length <= longest, "max_length", self.max_length, f"2 <= length <= {longest}")
        need(draft.proposals >= 1, "draft.block_size", draft.block_size, ">= 1 row that proposes")
        need(
            0 <= draft.mask_token_id < target.embedding_rows,
            "draft.mask_token_id",
            draft.mask_token_id,
            f"0 <= id < {target.embedding_rows} (rows of the target's embedding)",
        )
        need(
            draft.first_proposal_row in (0, 1),
            "draft.first_proposal_row",
            draft.first_proposal_row,
            "0 or 1",
        )
        need(
            draft.tap_convention == TAP_CONVENTION,
            "draft.tap_convention",
            draft.tap_convention,
            TAP_CONVENTION,
        )
        need(bool(draft.taps), "draft.taps", draft.taps, "at least one tap")
        for tap in draft.taps:
            need(
                0 <= tap < target.num_layers,
                "draft.taps",
                tap,
                f"0 <= tap < {target.num_layers} (layers of the target)",
            )
        for stop in self.stop_token_ids:
            need(
                0 <= stop < target.embedding_rows,
                "stop_token_ids",
                stop,
                f"0 <= id < {target.embedding_rows}",
            )
        for name in (TARGET, DRAFT):
            need(name in self.graphs, "graphs", sorted(self.graphs), f"a graph named {name!r}")
        self._check_graphs(need)
        laws = {ProposalLaw.FIXED}  # what any draft may do
        if draft.selector is not None:
            laws.add(ProposalLaw.CANDIDATES)
        elif draft.draft_vocab_size == target.vocab_size:
            laws.add(ProposalLaw.ROWS)
        need(
            draft.proposal_law in laws,
            "draft.proposal_law",
            draft.proposal_law.value,
            "one of " + ", ".join(sorted(law.value for law in laws)) + ", which this draft can do",
        )
        rounded = any(INT8 in graph.passes for graph in self.graphs.values())
        need(
            rounded == (self.quantization is not None),
            "quantization",
            None if self.quantization is None else self.quantization.scheme,
            "a description, for the graphs were rounded" if rounded else "none, for no graph was rounded",
        )
        if self.quantization is not None:
            figures = self.quantization
            need(
                math.isfinite(figures.perplexity_ratio) and figures.perplexity_ratio > 0,
                "quantization.perplexity_ratio",
                figures.perplexity_ratio,
                "a number > 0",
            )
            need(
                0 <= figures.greedy_agreement <= 1,
                "quantization.greedy_agreement",
                figures.greedy_agreement,
                "0 to 1",
            )
        need(
            draft.block_size <= self.slack_slots <= 2 * draft.block_size,
            "slack_slots",
            self.slack_slots,
            f"{draft.block_size} to {2 * draft.block_size}, one or two blocks",
        )
        for name, engine in self.engines.items():
            need(
                engine.graph in self.graphs,
                f"engines.{name}.graph",
                engine.graph,
                f"one of {sorted(self.graphs)}",
            )
        self._check_tuned(need)
        graphs = [*self.graphs.values(), *self.tuned.values()]
        needed = [path for graph in graphs for path in (graph.file, *graph.weights)]
        needed += [f for f in (self.tokenizer.file, self.tokenizer.chat_template) if f]
        needed += [e.file for e in self.engines.values()]
        for path in needed:
            need(path in self.files, "files", path, "every file the manifest uses, with size and hash")
        stored = sum(self.files[path].bytes for path in self.graphs[TARGET].weights)
        most = 2 * stored // target.hidden_size  # rows of four bits a number, the least that any scheme has
        need(
            not stored or target.embedding_rows <= most,
            "target.embedding_rows",
            target.embedding_rows,
            f"<= {most}, as many as the target's weight files have room for",
        )

    def _check_tuned(self, need: Callable[[bool, str, object, str], None]) -> None:
        """Tuned graphs compute what the target's portable graph computes, and differ in known ways."""
        target = self.graphs[TARGET]
        for name, graph in self.tuned.items():
            need(name in tuned.NAMES, "tuned", name, "one of " + ", ".join(tuned.NAMES))
            need(graph.file == f"{name}.onnx", f"tuned.{name}.file", graph.file, f"{name}.onnx")
            need(graph.io == target.io, f"tuned.{name}.io", graph.io, "that of the target's graph")
            done = [step for step in graph.passes if step not in target.passes]
            known = [step for step in tuned.PASSES if step in done]
            need(
                done == known, f"tuned.{name}.passes", done, "some of " + ", ".join(tuned.PASSES) + " in turn"
            )

    def _check_graphs(self, need: Callable[[bool, str, object, str], None]) -> None:
        """Compare what the manifest says of both models with the interfaces of their graphs."""
        draft, target = self.draft, self.target
        need(target.cache.dtype is self.dtype, "dtype", self.dtype.value, target.cache.dtype.value)
        features = len(draft.taps) * target.hidden_size
        top_k = None if draft.selector is None else draft.selector.top_k
        expected = {
            TARGET: target_io(target.cache, target.vocab_size, features),
            DRAFT: draft_io(
                draft.cache, features, draft.block_size, draft.proposals, draft.draft_vocab_size, top_k
            ),
        }
        for name, io in expected.items():
            found = self.graphs[name].io
            for side, infos, promised in (
                ("inputs", found.inputs, io.inputs),
                ("outputs", found.outputs, io.outputs),
            ):
                for info, promise in zip_longest(infos, promised):
                    need(info == promise, f"graphs.{name}.io.{side}", info, f"{promise} by {name}'s sizes")


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
    manifest.check()
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
