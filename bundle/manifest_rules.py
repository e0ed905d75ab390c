"""What must hold between the records of a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest

from . import tuned
from .errors import BundleError, field_error
from .manifest_records import MANIFEST, TAP_CONVENTION, Manifest, ProposalLaw, graph_file
from .round_graph import ROUND, round_io
from .tensors import DRAFT, MOST_SLOTS, TARGET, draft_io, target_io

Need = Callable[[bool, str, object, str], None]


def check_manifest(manifest: Manifest) -> None:
    """Check what a hand-edited manifest could break.

    Raises:
        BundleError: naming the field, the value and what it must be.
    """

    def need(ok: bool, what: str, got: object, expected: str) -> None:
        if not ok:
            raise field_error(BundleError, f"{MANIFEST}: {what}", got, expected)

    longest = MOST_SLOTS - manifest.slack_slots
    need(2 <= manifest.max_length <= longest, "max_length", manifest.max_length, f"2 <= length <= {longest}")
    _check_draft(manifest, need)
    for name in (TARGET, DRAFT):
        need(name in manifest.graphs, "graphs", sorted(manifest.graphs), f"a graph named {name!r}")
    _check_graphs(manifest, need)
    _check_proposals(manifest, need)
    _check_quantization(manifest, need)
    for name, engine in manifest.engines.items():
        need(
            engine.graph in manifest.graphs,
            f"engines.{name}.graph",
            engine.graph,
            f"one of {sorted(manifest.graphs)}",
        )
    _check_tuned(manifest, need)
    _check_files(manifest, need)


def _check_draft(manifest: Manifest, need: Need) -> None:
    """The draft's part, and the end tokens."""
    draft, target = manifest.draft, manifest.target
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
    for stop in manifest.stop_token_ids:
        need(
            0 <= stop < target.embedding_rows,
            "stop_token_ids",
            stop,
            f"0 <= id < {target.embedding_rows}",
        )
    bos = manifest.tokenizer.bos_token_id
    need(
        bos is None or 0 <= bos < target.embedding_rows,
        "tokenizer.bos_token_id",
        bos,
        f"0 <= id < {target.embedding_rows}, or none",
    )


def _check_proposals(manifest: Manifest, need: Need) -> None:
    """How the draft may propose, and room for its blocks."""
    draft, target = manifest.draft, manifest.target
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
    need(
        draft.block_size <= manifest.slack_slots <= 2 * draft.block_size,
        "slack_slots",
        manifest.slack_slots,
        f"{draft.block_size} to {2 * draft.block_size}, one or two blocks",
    )


def _check_quantization(manifest: Manifest, need: Need) -> None:
    """A rounded target is described, and figures are possible ones."""
    rounded = manifest.is_rounded(TARGET)
    need(
        rounded == (manifest.quantization is not None),
        "quantization",
        None if manifest.quantization is None else manifest.quantization.scheme,
        "a description, for the target was rounded" if rounded else "none, for the target was not rounded",
    )
    if manifest.quantization is not None:
        figures = manifest.quantization
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


def _check_files(manifest: Manifest, need: Need) -> None:
    """Every file that is named is known, and the target's weights are as many as its sizes say."""
    target = manifest.target
    for kind, found in (("graphs", manifest.graphs), ("tuned", manifest.tuned)):
        for name, graph in found.items():
            need(graph.file == graph_file(name), f"{kind}.{name}.file", graph.file, graph_file(name))
    graphs = [*manifest.graphs.values(), *manifest.tuned.values()]
    needed = [path for graph in graphs for path in (graph.file, *graph.weights)]
    needed += [f for f in (manifest.tokenizer.file, manifest.tokenizer.chat_template) if f]
    needed += [e.file for e in manifest.engines.values()]
    for path in needed:
        need(path in manifest.files, "files", path, "every file the manifest uses, with size and hash")
    stored = sum(manifest.files[path].bytes for path in manifest.graphs[TARGET].weights)
    most = 2 * stored // target.hidden_size  # rows of four bits a number, the least that any scheme has
    need(
        not stored or target.embedding_rows <= most,
        "target.embedding_rows",
        target.embedding_rows,
        f"<= {most}, as many as the target's weight files have room for",
    )


def _check_tuned(manifest: Manifest, need: Need) -> None:
    """Tuned graphs compute what the portable graphs compute, and differ in known ways."""
    for name, graph in manifest.graphs.items():  # an engine that is built from it has no labels to say no
        done = [step for step in graph.passes if step in tuned.PASSES]
        need(not done, f"graphs.{name}.passes", done, "none of those that only tuned graphs have")
    for name, graph in manifest.tuned.items():
        need(name in tuned.NAMES, "tuned", name, "one of " + ", ".join(tuned.NAMES))
        made_from = tuned.portable(name)
        portable = manifest.graphs[made_from]
        need(graph.io == portable.io, f"tuned.{name}.io", graph.io, f"that of the {made_from}'s graph")
        done = [step for step in graph.passes if step not in portable.passes]
        known = [step for step in tuned.PASSES if step in done]
        need(
            bool(done) and done == known,
            f"tuned.{name}.passes",
            done,
            "some of " + ", ".join(tuned.PASSES) + " in turn",
        )
        need(
            (tuned.GROUP_HEADS in done) == (name == tuned.TOGETHER),
            f"tuned.{name}.passes",
            done,
            f"{tuned.GROUP_HEADS} in {tuned.TOGETHER} and there alone",
        )


def _check_graphs(manifest: Manifest, need: Need) -> None:
    """Compare what the manifest says of both models with the interfaces of their graphs."""
    draft, target = manifest.draft, manifest.target
    need(target.cache.dtype is manifest.dtype, "dtype", manifest.dtype.value, target.cache.dtype.value)
    features = len(draft.taps) * target.hidden_size
    top_k = None if draft.selector is None else draft.selector.top_k
    expected = {
        TARGET: target_io(target.cache, target.vocab_size, features),
        DRAFT: draft_io(
            draft.cache, features, draft.block_size, draft.proposals, draft.draft_vocab_size, top_k
        ),
    }
    if ROUND in manifest.graphs:
        expected[ROUND] = round_io(target.cache, draft.cache, draft.proposals)
    for name, io in expected.items():
        found = manifest.graphs[name].io
        for side, infos, promised in (
            ("inputs", found.inputs, io.inputs),
            ("outputs", found.outputs, io.outputs),
        ):
            for info, promise in zip_longest(infos, promised):
                need(info == promise, f"graphs.{name}.io.{side}", info, f"{promise} by {name}'s sizes")
