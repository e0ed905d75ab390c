"""A round as one call of one graph against a round as two: verify, then draft.

    python benchmarks/fused_round.py BUNDLE --prompts demo/prompts.txt --verify-rows 4

Both ways decode each prompt greedily in a loop that does nothing else: every buffer is bound once an answer,
in place, and the same number of rows is verified in each round. The prompt is read, and the first block
drafted, by the bundle's two graphs either way, which is not timed. The ways take turns, round by round, so
that a slow moment of the machine hits both, and all tokens must be those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
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
from dflash_deploy.bundle.tuned import ALONE
from dflash_deploy.exporter.tune.fuse_round import ACCEPTED, VERIFY_ROWS, fuse_round, of_model
from dflash_deploy.runtime.accept import accept_greedy
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.ort_engine import SPIN_US, physical_cores
from dflash_deploy.runtime.stats import Mode

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
NUMPY: dict[t.DType, Any] = {
    t.DType.FLOAT32: np.float32,
    t.DType.FLOAT16: np.float16,
    t.DType.INT64: np.int64,
}

Array = NDArray[Any]


def session(bundle: Path, data: bytes) -> Any:
    """A graph of the bundle, as the runtime loads it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = physical_cores()
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class Call:
    """One graph, bound to arrays once; `run` reads and writes them."""

    def __init__(self, session: Any, inputs: dict[str, Array], outputs: dict[str, Array]):
        self._session, self._binding = session, session.io_binding()
        self._kept = inputs, outputs  # the binding holds addresses only
        for bind, arrays in ((self._binding.bind_input, inputs), (self._binding.bind_output, outputs)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


@dataclass
class Memory:
    """The caches of one answer and what goes in and out of a round, the same for both ways.

    Shapes: R rows, C slots of the caches, F feature size, Q block rows, P proposals.
    """

    manifest: Manifest
    rows: int
    slots: int  # C
    caches: dict[str, dict[str, Array]] = field(init=False)

    def __post_init__(self) -> None:
        target, draft = self.manifest.target, self.manifest.draft
        self.caches = {
            model: {
                name: np.zeros((1, cache.kv_heads, self.slots, cache.head_dim), NUMPY[cache.dtype])
                for name in cache.names()
            }
            for model, cache in ((t.TARGET, target.cache), (t.DRAFT, draft.cache))
        }
        self.all_slots = np.arange(self.slots)
        self.ids = np.zeros((1, self.rows), np.int64)
        self.start = np.zeros(1, np.int64)
        self.anchor = np.zeros(1, np.int64)
        self.block_ids = np.full((1, draft.block_size), draft.mask_token_id, np.int64)
        self.block_rows = np.full(1, draft.block_size, np.int64)
        self.verify_rows = np.zeros(1, np.int64)
        self.greedy_ids = np.zeros((1, self.rows), np.int64)
        self.accepted = np.zeros(1, np.int64)
        self.proposals = np.zeros((1, draft.proposals), np.int64)
        self.logit_sums = np.zeros((1, draft.proposals), np.float32)

    def features(self, rows: int) -> Array:
        size = len(self.manifest.draft.taps) * self.manifest.target.hidden_size
        return np.zeros((1, rows, size), np.float32)

    def presents(self, model: str) -> dict[str, Array]:
        return {t.present(name): cache for name, cache in self.caches[model].items()}


@dataclass
class Sessions:
    target: Any
    draft: Any
    fused: Any

    def verify(self, memory: Memory, ids: Array, wanted: Array, greedy: Array, features: Array) -> Call:
        """A pass of the target over `ids` [1, R] that writes into `greedy` and `features`."""
        inputs = {t.INPUT_IDS: ids, t.START: memory.start, t.SLOTS: memory.all_slots, t.WANTED_ROWS: wanted}
        return Call(
            self.target,
            {**inputs, **memory.caches[t.TARGET]},
            {t.GREEDY_IDS: greedy, t.FEATURES: features, **memory.presents(t.TARGET)},
        )

    def block(self, memory: Memory, features: Array) -> Call:
        """A pass of the draft over features [1, R, F]."""
        inputs = {
            t.FEATURES: features,
            t.START: memory.start,
            t.ANCHOR: memory.anchor,
            t.BLOCK_IDS: memory.block_ids,
            t.BLOCK_ROWS: memory.block_rows,
            t.SLOTS: memory.all_slots,
        }
        return Call(
            self.draft,
            {**inputs, **memory.caches[t.DRAFT]},
            {
                t.PROPOSALS: memory.proposals,
                t.LOGIT_SUMS: memory.logit_sums,
                **memory.presents(t.DRAFT),
            },
        )

    def round(self, memory: Memory) -> Call:
        """All of a round."""
        models = (t.TARGET, t.DRAFT)
        return Call(
            self.fused,
            {
                t.INPUT_IDS: memory.ids,
                VERIFY_ROWS: memory.verify_rows,
                t.START: memory.start,
                t.BLOCK_ROWS: memory.block_rows,
                **{of_model(model, t.SLOTS): memory.all_slots for model in models},
                **{of_model(m, name): cache for m in models for name, cache in memory.caches[m].items()},
            },
            {
                t.GREEDY_IDS: memory.greedy_ids,
                ACCEPTED: memory.accepted,
                t.PROPOSALS: memory.proposals,
                t.LOGIT_SUMS: memory.logit_sums,
                **{of_model(m, name): cache for m in models for name, cache in memory.presents(m).items()},
            },
        )


class OneCall:
    """Rounds of the fused graph."""

    def __init__(self, sessions: Sessions, memory: Memory):
        self._memory, self._round = memory, sessions.round(memory)

    def verify(self) -> int:
        """How many proposals stand; the next block is there, too."""
        self._round.run()
        return int(self._memory.accepted[0])

    def draft(self, accepted: int) -> None:
        """Nothing is left to do."""


class TwoCalls:
    """Rounds of two graphs; the features stay where the target wrote them."""

    def __init__(self, sessions: Sessions, memory: Memory):
        features, wanted = memory.features(memory.rows), np.arange(memory.rows)[None]
        self._memory = memory
        self._target = sessions.verify(memory, memory.ids, wanted, memory.greedy_ids, features)
        self._draft = sessions.block(memory, features)

    def verify(self) -> int:
        """How many proposals stand."""
        self._target.run()
        memory, count = self._memory, int(self._memory.verify_rows[0])
        proposals, greedy = memory.ids[0, 1:count].tolist(), memory.greedy_ids[0, :count].tolist()
        return accept_greedy(proposals, greedy, count, ()).accepted

    def draft(self, accepted: int) -> None:
        """Draft the next block."""
        memory = self._memory
        memory.anchor[0] = memory.start[0] + accepted + 1
        memory.block_ids[0, 0] = memory.greedy_ids[0, accepted]
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
        self._memory, self._stops, self._new = Memory(manifest, rows, slots), manifest.stop_token_ids, new
        self.ids = [prefill(sessions, self._memory, prompt)]
        self._memory.start[0] = len(prompt)
        self._rounds = WAYS[way](sessions, self._memory)
        self.rounds_ms: list[float] = []

    @property
    def ended(self) -> bool:
        return len(self.ids) >= self._new or self.ids[-1] in self._stops

    def step(self) -> None:
        """Decode a round: verify, accept, draft."""
        began, memory = perf_counter(), self._memory
        memory.ids[0, 0] = self.ids[-1]
        memory.ids[0, 1:] = memory.proposals[0, : memory.rows - 1]
        memory.verify_rows[0] = min(memory.rows, self._new - len(self.ids))
        accepted = self._rounds.verify()
        for token in memory.greedy_ids[0, : accepted + 1].tolist():
            self.ids.append(token)
            if token in self._stops:
                break
        if not self.ended:
            self._rounds.draft(accepted)
            memory.start[0] += accepted + 1
        self.rounds_ms.append((perf_counter() - began) * 1000.0)


def prefill(sessions: Sessions, memory: Memory, prompt: list[int]) -> int:
    """Read a prompt and draft the first block; gives the first token."""
    ids, features = np.array([prompt]), memory.features(len(prompt))
    greedy, last = np.zeros((1, 2), np.int64), np.full((1, 2), len(prompt) - 1)
    sessions.verify(memory, ids, last, greedy, features).run()
    memory.anchor[0], memory.block_ids[0, 0] = len(prompt), greedy[0, 0]
    sessions.block(memory, features).run()
    return int(greedy[0, 0])


def loaded(bundle: Path, manifest: Manifest) -> Sessions:
    """The bundle's two graphs, and one made of both."""
    infos: tuple[GraphInfo, GraphInfo] = (
        manifest.tuned.get(ALONE, manifest.graphs[t.TARGET]),
        manifest.graphs[t.DRAFT],
    )
    models = [ir.load(bundle / info.file) for info in infos]
    models.append(fuse_round(models[0], models[1], manifest))
    return Sessions(*(session(bundle, ir.to_proto(model).SerializeToString()) for model in models))


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
