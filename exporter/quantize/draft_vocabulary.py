"""A draft that proposes among the likeliest tokens alone, so that its head has fewer rows.

What the draft cannot propose the target still says: the tokens are the same, in more rounds. Draft ids are
positions in a list of target ids that rises, so that of two equal logits the lower id is still the first;
they become target ids where the draft has chosen, before anything is looked up by them.

Shapes: V vocabulary, N tokens that are kept, H hidden size, S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...bundle import tensors as t
from ...bundle.errors import RequestError, UnsupportedError, field_error
from ...bundle.manifest import DRAFT_VOCABULARY, DraftInfo, GraphInfo, Manifest, ProposalLaw
from ..nodes import constant
from .linear import array_of, weight_name
from .measure import expected_counts

HEAD = "draft.likeliest.lm_head.weight"
"""Name of the shorter head; other than that of a head of the draft's own."""

_IDS = "draft.likeliest.ids"
_MOST_ASKED = 64  # windows of a long text that the target is asked about; it is counted whole
_CHOICES = {"TopK": 1, "ArgMax": 0}  # which output of the operator holds ids

Ids = NDArray[np.int64]


def check_size(manifest: Manifest, size: int) -> None:
    """Refuse a size that the draft cannot have.

    Raises:
        RequestError: it is out of range.
        UnsupportedError: the draft has a vocabulary of its own already.
    """
    vocabulary, selector = manifest.target.vocab_size, manifest.draft.selector
    if manifest.draft.draft_vocab_size != vocabulary:
        raise UnsupportedError(
            f"draft_vocabulary: this draft proposes among {manifest.draft.draft_vocab_size} tokens already; "
            "leave it out, or start from a bundle whose draft proposes among all"
        )
    least = 1 if selector is None else selector.top_k
    if not least <= size < vocabulary:
        raise field_error(
            RequestError,
            "draft_vocabulary",
            size,
            f"{least} <= tokens < {vocabulary}, the target's vocabulary",
            "leave it out to propose among all tokens",
        )


def likeliest(bundle: Path, manifest: Manifest, texts: Sequence[Sequence[int]], size: int) -> Ids:
    """Choose tokens by how often they stand in texts, and how often the target expects them there.

    A short text holds a small part of the vocabulary; the target's own probabilities, summed over its
    places, tell what else stands in texts like it. Tokens that end an answer are always among those kept.

    Args:
        bundle: the bundle whose target is asked.
        manifest: its manifest.
        texts: token ids, seen each by itself.
        size: N.

    Returns:
        Target ids [N], rising.
    """
    counts = expected_counts(bundle, manifest, texts[:_MOST_ASKED])  # [V]
    vocabulary = len(counts)
    said = np.concatenate([np.asarray(text, np.int64) for text in texts])
    counts += np.bincount(said[said < vocabulary], minlength=vocabulary)
    stops = [stop for stop in manifest.stop_token_ids if stop < vocabulary]
    counts[stops] = np.inf
    order = np.lexsort((np.arange(vocabulary), -counts))  # of equals the lower id: a tokenizer's older merge
    return np.sort(order[:size]).astype(np.int64)


def reduce_draft(model: ir.Model, head: str, ids: Ids) -> None:
    """Shorten the head of a draft's graph, in place.

    Args:
        model: the draft's graph in float32, whose head is the target's.
        head: name of the target's head [V, H].
        ids: target ids [N], rising.
    """
    graph = model.graph
    product = next((node for node in graph if node.op_type == "Gemm" and weight_name(node) == head), None)
    if product is None:
        raise UnsupportedError("draft_vocabulary: the draft's head is not the target's; leave it out")
    weight = array_of(product.inputs[1])
    product.replace_input_with(1, constant(graph, HEAD, np.ascontiguousarray(weight[ids])))
    _shorten(product.outputs[0], len(weight), len(ids))
    _to_target_ids(graph, _choice(graph), ids)


def reduce_selector(model: ir.Model, ids: Ids) -> None:
    """Let the graph of the selector alone take the shorter head's logits, in place."""
    (logits,) = (value for value in model.graph.inputs if value.name == t.UNARY_LOGITS)
    assert logits.shape is not None and isinstance(logits.shape[-1], int)
    _shorten(logits, logits.shape[-1], len(ids))
    _to_target_ids(model.graph, _choice(model.graph), ids)


def reduced(manifest: Manifest, models: Mapping[str, ir.Model], head: str, ids: Ids) -> Manifest:
    """Reduce a bundle's graphs, in place, and say so in its manifest.

    Args:
        manifest: of the bundle in float32.
        models: its graphs by name.
        head: name of the target's head.
        ids: target ids [N], rising.
    """
    draft, graphs = manifest.draft, dict(manifest.graphs)
    reduce_draft(models[t.DRAFT], head, ids)
    graphs[t.DRAFT] = _reduced_graph(graphs[t.DRAFT], draft, len(ids))
    if t.SELECTOR in graphs:
        reduce_selector(models[t.SELECTOR], ids)
        graphs[t.SELECTOR] = _reduced_graph(graphs[t.SELECTOR], draft, len(ids))
    law = draft.proposal_law
    if law is ProposalLaw.ROWS:
        law = ProposalLaw.FIXED  # the logits are about other ids than the target's
    draft = replace(draft, draft_vocab_size=len(ids), proposal_law=law)
    return replace(manifest, draft=draft, graphs=graphs)


def _reduced_graph(info: GraphInfo, draft: DraftInfo, size: int) -> GraphInfo:
    def shorter(value: t.TensorInfo) -> t.TensorInfo:
        if value.name not in (t.DRAFT_LOGITS, t.UNARY_LOGITS):
            return value
        assert value.axes[-1] == draft.draft_vocab_size
        return replace(value, axes=(*value.axes[:-1], size))

    io = t.GraphIO(tuple(map(shorter, info.io.inputs)), tuple(map(shorter, info.io.outputs)))
    return replace(info, io=io, passes=(*info.passes, DRAFT_VOCABULARY))


def _choice(graph: ir.Graph) -> ir.Value:
    """The ids that are chosen first: a selector's candidates, or the proposals."""
    found = next(node for node in graph if node.op_type in _CHOICES)
    return found.outputs[_CHOICES[found.op_type]]


def _to_target_ids(graph: ir.Graph, chosen: ir.Value, ids: Ids) -> None:
    """Put a look-up of the target's ids behind `chosen`; it takes over the name and all uses."""
    node = chosen.producer()
    assert node is not None
    mapped = ir.node("Gather", [constant(graph, _IDS, ids), chosen], {"axis": 0}, name=f"{_IDS}.Gather")
    new = mapped.outputs[0]
    chosen.replace_all_uses_with(new, replace_graph_outputs=True)
    mapped.replace_input_with(1, chosen)
    new.shape, new.type = chosen.shape, chosen.type
    name, chosen.name = chosen.name, f"{chosen.name}.draft"
    new.name = name
    graph.insert_after(node, mapped)


def _shorten(logits: ir.Value, long: int, short: int) -> None:
    """Write down the new length of the last axis, of the logits and of what is as long as they are."""
    if logits.shape is not None:
        if logits.shape[-1] != long:
            return
        logits.shape = ir.Shape([*logits.shape.dims[:-1], short])
    for use in logits.uses():
        for value in use.node.outputs:
            if use.node.op_type not in _CHOICES:
                _shorten(value, long, short)
