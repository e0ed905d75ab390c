"""The records of a bundle's manifest. `manifest` reads and writes them, `manifest_rules` checks them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from . import tuned
from .limits import ShapeLimits
from .tensors import CacheShape, DType, GraphIO

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
WEIGHT_FILE = "weights.bin"
"""All large weights of a bundle's graphs."""
_SUFFIX = ".onnx"
INT8 = "int8"
"""Among a graph's passes, where its weights were rounded."""
DRAFT_VOCABULARY = "draft-vocabulary"
"""Among a graph's passes, where the draft was made to propose among fewer tokens."""
TAP_CONVENTION = "tap i = output of decoder layer i (0-based), before the final norm"


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

    @property
    def name(self) -> str:
        """The graph's key in the manifest: its file is called after it."""
        return self.file.removesuffix(_SUFFIX)

    @property
    def field(self) -> str:
        """Where the manifest has it."""
        return f"tuned.{self.name}" if self.name in tuned.NAMES else f"graphs.{self.name}"


def graph_file(name: str) -> str:
    """The file of the graph that has this key in the manifest."""
    return name + _SUFFIX


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

    def is_rounded(self, graph: str | None = None) -> bool:
        """Whether a graph's weights are integers, or those of any; such graphs are for the CPU alone."""
        names = self.graphs if graph is None else (graph,)
        return any(INT8 in self.graphs[name].passes for name in names)
