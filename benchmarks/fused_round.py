"""A round as one call of one graph against a round as two: verify, then draft.

    python benchmarks/fused_round.py BUNDLE --prompts demo/prompts.txt --verify-rows 4

Two calls are those of the runtime: the target's graph and the draft's that are tuned for the CPU, where the
bundle has them. One call is the bundle's `round.onnx`, which is made of the portable graphs (`dflash export
--round-graph`); of a bundle without one it is made here, of the two graphs that are called else. So the first
compares what a bundle has, tuning included, the second what the call alone is worth; the report says which
(`graphs`).

Both ways decode each prompt greedily in a loop that does nothing else: every buffer is bound once an answer,
in place, and the same number of rows is verified in each round. The prompt is read, and the first block
drafted, by the two graphs either way, which is not timed. The ways take turns, round by round, so that a slow
moment of the machine hits both, and all tokens must be those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.limits import KV_BUCKET, round_up
from dflash_deploy.bundle.manifest import GraphInfo, Manifest
from dflash_deploy.bundle.ort_options import session_options
from dflash_deploy.bundle.round_graph import ACCEPTED, ROUND, VERIFY_ROWS, of_model, round_io
from dflash_deploy.bundle.tuned import ALONE, DRAFT_ALONE
from dflash_deploy.exporter.tune.fuse_round import fuse_round
from dflash_deploy.runtime.accept import accept_greedy
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.ort_engine import physical_cores
from dflash_deploy.runtime.stats import Mode

NUMPY: dict[t.DType, Any] = {
    t.DType.FLOAT32: np.float32,
    t.DType.FLOAT16: np.float16,
    t.DType.INT64: np.int64,
}

Array = NDArray[Any]


def session(bundle: Path, data: bytes) -> Any:
    """A graph of the bundle, as the runtime loads it."""
    options = session_options(ort, physical_cores(), bundle)
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Sessions:
    """The bundle's two graphs as the runtime takes them, and that of a round."""

    target: Any
    draft: Any
    fused: Any


def io_of(manifest: Manifest) -> t.GraphIO:
    """Inputs and outputs of a round of the bundle's pair."""
    return round_io(manifest.target.cache, manifest.draft.cache, manifest.draft.proposals)


def arrays_for(manifest: Manifest, rows: int, slots: int) -> dict[str, Array]:
    """What goes in and out of a round, by its name in the fused graph, and what only two calls need.

    Args:
        manifest: the bundle's.
        rows: rows that are verified.
        slots: slots of all caches.
    """
    draft, io, sizes = manifest.draft, io_of(manifest), {t.BATCH: 1, t.ROWS: rows}
    arrays = {
        info.name: np.zeros(
            [sizes.get(axis, slots) if isinstance(axis, str) else axis for axis in info.axes],
            NUMPY[info.dtype],
        )
        for info in (*io.inputs, *io.outputs)
    }
    for info in io.inputs:
        if t.present(info.name) != info.name:
            arrays[t.present(info.name)] = arrays[info.name]  # in place
    for model in (t.TARGET, t.DRAFT):
        arrays[of_model(model, t.SLOTS)][:] = np.arange(slots)
    arrays[t.BLOCK_ROWS][:] = draft.block_size
    arrays[t.WANTED_ROWS], arrays[t.ANCHOR] = np.arange(rows)[None], np.zeros(1, np.int64)
    arrays[t.BLOCK_IDS] = np.full((1, draft.block_size), draft.mask_token_id)
    arrays[t.FEATURES] = features_of(manifest, rows)
    return arrays


def features_of(manifest: Manifest, rows: int) -> Array:
    return np.zeros((1, rows, len(manifest.draft.taps) * manifest.target.hidden_size), np.float32)


class Call:
    """A graph, bound to arrays once; `run` reads and writes them. Outputs without an array are not wanted."""

    def __init__(self, session: Any, io: t.GraphIO, arrays: Mapping[str, Array], model: str = ""):
        """Bind. `model` says whose of both models' arrays are meant, for a graph of one of them."""
        self._session, self._binding = session, session.io_binding()
        self._kept: list[Array] = []  # the binding holds addresses only
        for bind, infos in ((self._binding.bind_input, io.inputs), (self._binding.bind_output, io.outputs)):
            for info in infos:
                array = arrays.get(of_model(model, info.name), arrays.get(info.name))
                if array is not None:
                    bind(info.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
                    self._kept.append(array)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


def target_call(sessions: Sessions, manifest: Manifest, arrays: Mapping[str, Array]) -> Call:
    return Call(sessions.target, manifest.graphs[t.TARGET].io, arrays, t.TARGET)


def draft_call(sessions: Sessions, manifest: Manifest, arrays: Mapping[str, Array]) -> Call:
    return Call(sessions.draft, manifest.graphs[t.DRAFT].io, arrays, t.DRAFT)


class OneCall:
    """Rounds of the fused graph."""

    def __init__(self, sessions: Sessions, manifest: Manifest, arrays: Mapping[str, Array]):
        self._arrays, self._round = arrays, Call(sessions.fused, io_of(manifest), arrays)

    def verify(self) -> int:
        """How many proposals stand; the next block is there, too."""
        self._round.run()
        return int(self._arrays[ACCEPTED][0])

    def draft(self, accepted: int) -> None:
        """Nothing is left to do."""


class TwoCalls:
    """Rounds of two graphs; the features stay where the target wrote them."""

    def __init__(self, sessions: Sessions, manifest: Manifest, arrays: Mapping[str, Array]):
        self._arrays = arrays
        self._target = target_call(sessions, manifest, arrays)
        self._draft = draft_call(sessions, manifest, arrays)

    def verify(self) -> int:
        """How many proposals stand."""
        self._target.run()
        arrays, count = self._arrays, int(self._arrays[VERIFY_ROWS][0])
        proposals, greedy = (
            arrays[t.INPUT_IDS][0, 1:count].tolist(),
            arrays[t.GREEDY_IDS][0, :count].tolist(),
        )
        return accept_greedy(proposals, greedy, count, ()).accepted

    def draft(self, accepted: int) -> None:
        """Draft the next block."""
        arrays = self._arrays
        arrays[t.ANCHOR][0] = arrays[t.START][0] + accepted + 1
        arrays[t.BLOCK_IDS][0, 0] = arrays[t.GREEDY_IDS][0, accepted]
        self._draft.run()


WAYS: dict[str, type[OneCall] | type[TwoCalls]] = {"two_calls": TwoCalls, "one_call": OneCall}


class Answer:
    """One way's answer to one prompt, a round at a time.

    Attributes:
        ids: tokens so far.
        rounds_ms: milliseconds of each round. Of two calls the last is one: nothing is left to draft for.
        ended: whether the answer is complete.
    """

    def __init__(
        self, way: str, sessions: Sessions, manifest: Manifest, prompt: list[int], new: int, rows: int
    ):
        slots = round_up(len(prompt) + new + manifest.slack_slots, KV_BUCKET)
        self._arrays, self._stops, self._new = arrays_for(manifest, rows, slots), manifest.stop_token_ids, new
        self.ids = [prefill(sessions, manifest, self._arrays, prompt)]
        self._rounds = WAYS[way](sessions, manifest, self._arrays)
        self.rounds_ms: list[float] = []

    @property
    def ended(self) -> bool:
        return len(self.ids) >= self._new or self.ids[-1] in self._stops

    def step(self) -> None:
        """Decode a round: verify, accept, draft."""
        began, arrays = perf_counter(), self._arrays
        ids, count = arrays[t.INPUT_IDS], arrays[t.INPUT_IDS].shape[1]
        ids[0, 0], ids[0, 1:] = self.ids[-1], arrays[t.PROPOSALS][0, : count - 1]
        arrays[VERIFY_ROWS][0] = min(count, self._new - len(self.ids))
        accepted = self._rounds.verify()
        for token in arrays[t.GREEDY_IDS][0, : accepted + 1].tolist():
            self.ids.append(token)
            if token in self._stops:
                break
        if not self.ended:
            self._rounds.draft(accepted)
            arrays[t.START][0] += accepted + 1
        self.rounds_ms.append((perf_counter() - began) * 1000.0)


def prefill(sessions: Sessions, manifest: Manifest, arrays: Mapping[str, Array], prompt: list[int]) -> int:
    """Read a prompt and draft the first block; gives the first token."""
    count = len(prompt)
    own = {
        **arrays,
        t.INPUT_IDS: np.array([prompt]),
        t.WANTED_ROWS: np.full((1, 2), count - 1),
        t.GREEDY_IDS: np.zeros((1, 2), np.int64),
        t.FEATURES: features_of(manifest, count),
    }
    target_call(sessions, manifest, own).run()
    first = int(own[t.GREEDY_IDS][0, 0])
    arrays[t.ANCHOR][0], arrays[t.BLOCK_IDS][0, 0] = count, first
    draft_call(sessions, manifest, own).run()
    arrays[t.START][0] = count
    return first


def loaded(bundle: Path, manifest: Manifest) -> Sessions:
    """The two graphs that the runtime takes, and that of a round: the bundle's, or one made of the two."""
    target, draft = (ir.load(bundle / info.file) for info in two_graphs(manifest))
    own = manifest.graphs.get(ROUND)
    if own is None:
        fused = fuse_round(target, draft, manifest.target, manifest.draft)
    else:
        fused = ir.load(bundle / own.file)
    models = (target, draft, fused)
    return Sessions(*(session(bundle, ir.to_proto(model).SerializeToString()) for model in models))


def two_graphs(manifest: Manifest) -> tuple[GraphInfo, GraphInfo]:
    """Target's and draft's, as the runtime takes them for one request on the CPU."""
    graphs, tuned = manifest.graphs, manifest.tuned
    return tuned.get(ALONE, graphs[t.TARGET]), tuned.get(DRAFT_ALONE, graphs[t.DRAFT])


def compared(manifest: Manifest) -> dict[str, str]:
    """Which graphs each way calls."""
    two = " and ".join(info.file for info in two_graphs(manifest))
    own = manifest.graphs.get(ROUND)
    return {"two_calls": two, "one_call": f"made of {two}" if own is None else own.file}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="one a line")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--verify-rows", type=int, default=4, help="anchor and proposals, at least 2")
    parser.add_argument("--limit", type=int, default=8, help="prompts taken")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    bundle, new, rows = arguments.bundle.absolute(), arguments.max_new_tokens, arguments.verify_rows
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][: arguments.limit]
    with Decoder.open(bundle) as decoder:
        manifest, codec = decoder.manifest, decoder.codec
        if codec is None or not 2 <= rows <= manifest.draft.proposals + 1:
            raise SystemExit("BUNDLE needs a tokenizer, and --verify-rows is 2 to its proposals + 1")
        prompts = [codec.encode_prompt(text, codec.has_chat_template) for text in texts]
        plain = [list(decoder.generate(prompt, new, mode=Mode.PLAIN).ids) for prompt in prompts]
    sessions = loaded(bundle, manifest)
    answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
    for turn in range(arguments.repeats + 1):  # the first warms up
        for text, prompt, expected in zip(texts, prompts, plain, strict=True):
            pair = {way: Answer(way, sessions, manifest, prompt, new, rows) for way in WAYS}
            order = [*pair.values()]
            while not all(answer.ended for answer in order):
                for answer in order:
                    answer.step()
                order.reverse()
            for way, answer in pair.items():
                if answer.ids != expected:
                    raise SystemExit(f"{text!r}: tokens of {way} are not those of plain decoding")
                if turn:
                    answers[way].append(answer)
            if not turn:
                break
    print(json.dumps(report(manifest, rows, answers), indent=2))


def report(manifest: Manifest, rows: int, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """Medians over rounds that both ways draft in, what one call saves of each, and tokens per second."""
    ms = {way: np.array([ms for a in of for ms in a.rounds_ms[:-1]]) for way, of in answers.items()}
    saved = ms["two_calls"] - ms["one_call"]
    speed = {
        way: sum(len(a.ids) - 1 for a in of) / sum(sum(a.rounds_ms) for a in of) * 1000.0
        for way, of in answers.items()
    }
    return {
        "bundle": manifest.name,
        "dtype": manifest.dtype.value,
        "rounded": manifest.quantization is not None,
        "threads": physical_cores(),
        "graphs": compared(manifest),
        "verify_rows": rows,
        "answers": len(answers["one_call"]),
        "rounds": saved.size,
        "ms_a_round": {way: round(float(np.median(of)), 3) for way, of in ms.items()},
        "saved_ms_a_round": round(float(np.median(saved)), 3),
        "saved_quartiles_ms": [round(float(of), 3) for of in np.percentile(saved, (25, 75))],
        "tokens_per_s": {way: round(of, 1) for way, of in speed.items()},
        "speedup": round(speed["one_call"] / speed["two_calls"], 3),
        "tokens_identical": True,
    }


if __name__ == "__main__":
    main()
