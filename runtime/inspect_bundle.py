"""What a bundle is and what would go wrong with it, from its manifest and files alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from ..bundle.manifest import Manifest, Verify, manifest_from_bundle
from ..bundle.tensors import DRAFT, DType
from ..bundle.tuned import PURPOSES
from .text import TextCodec

# Distribution of each engine backend, whose version an engine is tied to.
_BACKENDS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt-rtx-cu13"}


def describe_bundle(directory: Path, verify: Verify = Verify.HASHES) -> dict[str, Any]:
    """Describe a bundle in plain JSON values; what would go wrong is the list ``warnings``.

    Raises:
        BundleError: it is no bundle, or its files are not those of the manifest.
    """
    directory = Path(directory)
    manifest = manifest_from_bundle(directory, verify)
    codec = TextCodec.from_bundle(directory, manifest.tokenizer) if manifest.tokenizer.file else None
    target, draft = manifest.target, manifest.draft
    special: dict[str, Any] = {} if draft.conv is None else {"conv": vars(draft.conv)}
    if draft.selector is not None:
        special["selector"] = vars(draft.selector)
    return {
        "kind": "bundle",
        "name": manifest.name,
        "precision": manifest.dtype.value,
        "float32_parts": list(manifest.float32_parts),
        "quantization": None if manifest.quantization is None else vars(manifest.quantization),
        "max_length": manifest.max_length,
        "target": {
            "family": target.family,
            "layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "embedding_rows": target.embedding_rows,
            "cache_bytes_per_token": target.cache.bytes(1, 1),
        },
        "draft": {
            "family": draft.family,
            "format": draft.format,
            "layers": draft.num_layers,
            "hidden_size": draft.hidden_size,
            "block_size": draft.block_size,
            "proposals": draft.proposals,
            "first_proposal_row": draft.first_proposal_row,
            "taps": list(draft.taps),
            "tap_convention": draft.tap_convention,
            "mask_token_id": draft.mask_token_id,
            "mask_token": _token(codec, draft.mask_token_id),
            "vocab_size": draft.draft_vocab_size,
            "rounded": manifest.is_rounded(DRAFT),
            "cache_bytes_per_token": draft.cache.bytes(1, 1),
            **special,
        },
        "stop_tokens": {str(stop): _token(codec, stop) for stop in manifest.stop_token_ids},
        "tokenizer": manifest.tokenizer.file,
        "chat_template": manifest.tokenizer.chat_template,
        "graphs": {
            name: {"file": graph.file, "opset": graph.opset, "ir_version": graph.ir_version}
            for name, graph in manifest.graphs.items()
        },
        "tuned": {
            name: {"file": graph.file, "passes": list(graph.passes), "for": PURPOSES[name]}
            for name, graph in manifest.tuned.items()
        },
        "engines": {
            name: {
                "backend": engine.backend,
                "version": engine.version,
                "precision": engine.precision,
                "compute_capabilities": list(engine.compute_capabilities),
                "limits": vars(engine.limits),
                "flags": [flag.value for flag in engine.flags],
            }
            for name, engine in manifest.engines.items()
        },
        "files": {name: info.bytes for name, info in manifest.files.items()},
        "total_bytes": sum(info.bytes for info in manifest.files.values()),
        "provenance": {
            name: {"name": source.name, "format": source.format, "dtype": source.dtype, "note": source.note}
            for name, source in manifest.provenance.items()
        },
        "exported_with": dict(manifest.exported_with),
        "warnings": bundle_warnings(manifest, codec),
    }


def description_lines(found: dict[str, Any]) -> list[str]:
    """Write a description for a screen: one fact a line, names in a column."""
    target, draft = found["target"], found["draft"]
    first = draft["first_proposal_row"]
    mask = f"id {draft['mask_token_id']}" + (f" ({draft['mask_token']})" if draft["mask_token"] else "")
    stops = ", ".join(f"{i} ({text})" if text else i for i, text in found["stop_tokens"].items())
    rows = [
        ("bundle", found["name"]),
        ("precision", found["precision"] + _apart(found["float32_parts"])),
        *_rounding(found["quantization"], draft["rounded"]),
        ("longest", f"{found['max_length']} tokens"),
        ("target", f"{target['family']}, {target['layers']} layers, hidden {target['hidden_size']}"),
        ("vocabulary", f"{target['vocab_size']} ids, {target['embedding_rows']} embedding rows"),
        ("draft", f"{draft['family']} in the format of {draft['format']}, {draft['layers']} layers"),
        (
            "block",
            f"{draft['block_size']} rows, {draft['proposals']} proposals from row {first}",
        ),
        *_among(draft["vocab_size"], target["vocab_size"]),
        ("taps", f"{', '.join(map(str, draft['taps']))} ({draft['tap_convention']})"),
        ("mask", mask),
    ]
    if conv := draft.get("conv"):
        rows.append(
            (
                "convolutions",
                f"kernel {conv['kernel_size']}, groups of {conv['group_size']}",
            )
        )
    if selector := draft.get("selector"):
        rows.append(("selector", f"rank {selector['rank']}, top {selector['top_k']}"))
    rows += [
        ("cache", f"{target['cache_bytes_per_token'] + draft['cache_bytes_per_token']} bytes a token"),
        ("stops at", stops or "no id"),
        ("chat template", "yes" if found["chat_template"] else "none"),
        ("graphs", ", ".join(f"{name} (opset {graph['opset']})" for name, graph in found["graphs"].items())),
        *(
            ("tuned graph", f"{name}, {graph['for']} ({', '.join(graph['passes'])})")
            for name, graph in found["tuned"].items()
        ),
        *((f"engine {name}", _engine(engine)) for name, engine in found["engines"].items()),
        ("files", f"{len(found['files'])}, {found['total_bytes'] / 1e6:.1f} MB"),
        *((f"{side} from", _origin(source)) for side, source in found["provenance"].items()),
        ("exported with", ", ".join(f"{name} {version}" for name, version in found["exported_with"].items())),
        *(("warning", warning) for warning in found["warnings"]),
    ]
    width = max(14, *(len(name) for name, _ in rows))
    return [f"{name:<{width}} {text}" for name, text in rows]


def _among(proposed: int, ids: int) -> list[tuple[str, str]]:
    return [("proposes", f"among {proposed} of {ids} tokens")] if proposed < ids else []


def _apart(float32_parts: list[str]) -> str:
    return f", {', '.join(float32_parts)} in float32" if float32_parts else ""


def _rounding(quantization: dict[str, Any] | None, draft_rounded: bool) -> list[tuple[str, str]]:
    if quantization is None:
        return [("draft weights", "int8; those of the target are not rounded")] if draft_rounded else []
    quality = (
        f"perplexity {quantization['perplexity_ratio']:.4f} x that of float32, the same greedy choice in "
        f"{quantization['greedy_agreement']:.1%} of {quantization['tokens']} places"
    )
    return [("weights", quantization["scheme"]), ("quality", quality)]


def _engine(engine: dict[str, Any]) -> str:
    gpus = ", ".join(engine["compute_capabilities"]) or "of the machine that built it"
    return f"{engine['backend']} {engine['version']}, {engine['precision']}, compute capability {gpus}"


def _origin(source: dict[str, Any]) -> str:
    note = f"; {source['note']}" if source["note"] else ""
    return f"{source['name']} ({source['format']}, {source['dtype']}{note})"


def _token(codec: TextCodec | None, token_id: int) -> str | None:
    return None if codec is None else codec.token(token_id)


def bundle_warnings(manifest: Manifest, codec: TextCodec | None) -> list[str]:
    """What would go wrong with a bundle whose manifest holds, here or anywhere."""
    warnings = []
    draft = manifest.draft
    if importlib.util.find_spec("onnxruntime") is None:
        warnings.append("onnxruntime is not installed here: pip install 'dflash-deploy[cpu]'")
    if manifest.dtype is DType.BFLOAT16:
        warnings.append("bfloat16 does not run on ONNX Runtime's CPU provider; it needs a GPU")
    if draft.mask_token_id in manifest.stop_token_ids:
        warnings.append(
            f"the mask token {draft.mask_token_id} is also a stop token: the draft sees masks as ends of text"
        )
    if not manifest.stop_token_ids:
        warnings.append("there is no stop token: every answer runs to its limit")
    if codec is None:
        warnings.append("there is no tokenizer: the bundle takes and gives token ids only")
    else:
        if not codec.has_chat_template:
            warnings.append("there is no chat template: prompts are sent as plain text")
        if codec.token(draft.mask_token_id) is None:
            warnings.append(
                f"the mask token {draft.mask_token_id} is beyond the tokenizer, inside the padded embedding; "
                "that is fine if the draft was trained so"
            )
    for name, engine in manifest.engines.items():
        built_from = {manifest.graphs[engine.graph].file: engine.graph_sha256, **engine.weights_sha256}
        for file, digest in built_from.items():
            if file not in manifest.files or manifest.files[file].sha256 != digest:
                warnings.append(f"engine {name} was built from another {file}; build it again")
        installed = _installed(engine.backend)
        if installed is not None and installed != engine.version:
            warnings.append(
                f"engine {name} was built with {engine.backend} {engine.version}, and {installed} is here; "
                "build it again"
            )
    return warnings


def _installed(backend: str) -> str | None:
    try:
        return importlib.metadata.version(_BACKENDS.get(backend, backend))
    except importlib.metadata.PackageNotFoundError:
        return None
