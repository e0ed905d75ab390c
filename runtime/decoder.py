"""A bundle, opened: prompts in, tokens and text out.

Nothing is kept between requests: caches, buffers and counters belong to the stream that a request gets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Unpack

from ..bundle.errors import DflashError, RequestError, field_error
from ..bundle.limits import PREFILL_ROWS, ShapeLimits
from ..bundle.manifest import Manifest, Verify, check_files, manifest_from_bundle
from ..bundle.tuned import least_rows
from .accept import FinishReason
from .backends import ONNXRUNTIME, runners_from_bundle
from .calibrate import calibrate
from .checks import check_flag, check_integer
from .choose import TokenLogprob
from .engine import GraphRunner
from .lane import Lane
from .loop import Job, Step, request_loop, run_alone
from .options import check_options
from .pair import Pair, prefill_rows
from .policy import AdaptiveRows, FixedRows, RowPolicy, few_counts
from .request import MAX_NEW_TOKENS, Prompt, Request, RequestOptions, job_from_request, request_from_call
from .stats import GenerationStats
from .text import TextCodec


@dataclass(frozen=True)
class Chunk:
    """What one round adds.

    Attributes:
        ids: tokens.
        text: what may be shown now; may be empty while a character, or what may be a stop string, is
            incomplete.
        logprobs: one for each token, if they were asked for.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    Attributes:
        ids: tokens; one that ended the answer is the last.
        text: what they say, without a stop string that ended it.
        finish_reason: why it ended.
        stats: figures.
        logprobs: one for each token, if they were asked for.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How a decoder works.

    Attributes:
        verify_rows: rows the target verifies in a round, the anchor and the first proposals; None chooses for
            each round what promises the most tokens, from what passes cost and how proposals fared. Requests
            with a temperature have all of them then, for a draw depends on what was proposed.
        exact: compute a lone row in the company of another, so that plain and speculative decoding give the
            same bits (shown for ONNX Runtime on the CPU in float32); False is faster for plain decoding, and
            may choose otherwise where two tokens nearly tie.
        max_length: longest sequence in tokens, prompt and output.
    """

    verify_rows: int | None
    exact: bool
    max_length: int


class Answer:
    """Gathers the steps of one request to a `Generation`."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def add(self, step: Step) -> Chunk:
        """Take the next step."""
        self._steps.append(step)
        return Chunk(step.ids, step.text, step.logprobs)

    def generation(self, finish: FinishReason, stats: GenerationStats) -> Generation:
        """All of it."""
        return Generation(
            tuple(token for step in self._steps for token in step.ids),
            "".join(step.text for step in self._steps),
            finish,
            stats,
            tuple(logprob for step in self._steps for logprob in step.logprobs),
        )


class Stream(Iterator[Chunk]):
    """The chunks of one generation, computed as they are read.

    Dropping it, closing it, or an exception in the code that reads it ends the generation after the round
    in progress. May be used as a context manager.
    """

    def __init__(self, steps: Iterator[Step], job: Job, lane: Lane):
        self._running: tuple[Iterator[Step], Job, Lane] | None = (steps, job, lane)
        self._answer = Answer()
        self._result: Generation | None = None
        self._error: BaseException | None = None

    def __next__(self) -> Chunk:
        if self._running is None:
            raise StopIteration
        steps, job, _ = self._running
        began = perf_counter()
        try:
            step = next(steps)
        except BaseException as error:
            self._running, self._error = None, error
            raise
        chunk = self._answer.add(step)
        job.recorder.total_ms += (perf_counter() - began) * 1000.0
        job.recorder.first_token_ms = job.recorder.first_token_ms or job.recorder.total_ms
        if step.finish is not None:
            self._end(step.finish)
        return chunk

    @property
    def result(self) -> Generation:
        """The whole generation, as soon as its last chunk was read or the stream was closed.

        Raises:
            RequestError: it has not ended, or ended in an error.
        """
        if self._error is not None:
            raise RequestError(f"result: the stream ended in an error: {self._error}") from self._error
        if self._result is None:
            raise RequestError("result: the stream has not ended; read it to its end or close it first")
        return self._result

    def close(self) -> None:
        """End the generation here and free its memory. Harmless at any time, and twice."""
        self._end(FinishReason.CANCELLED)

    def _end(self, finish: FinishReason) -> None:
        if self._running is not None:
            _, job, lane = self._running
            stats = job.recorder.stats(lane.target.committed, lane.draft.committed)
            self._result = self._answer.generation(finish, stats)
            self._running = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Decoder:
    """A target and its draft, ready to decode. Streams may be read in turn or from several threads."""

    def __init__(
        self,
        manifest: Manifest,
        target: GraphRunner,
        draft: GraphRunner,
        codec: TextCodec | None,
        settings: Settings,
    ):
        """Put a decoder together from parts; `Decoder.open` does it from a bundle.

        Raises:
            RequestError: the settings do not fit the manifest.
        """
        self.manifest = manifest
        self.settings = settings
        self.codec = codec
        self._target = target
        self._draft = draft
        most = manifest.draft.proposals + 1
        longest = longest_sequence(manifest, target, draft)
        check_flag("exact", settings.exact)
        if settings.verify_rows is not None:
            check_integer("verify_rows", settings.verify_rows, f"2 to {most} (anchor and proposals)", 2, most)
        check_integer(
            "max_length",
            settings.max_length,
            f"2 to {longest}",
            2,
            longest,
            "export again with a larger --max-length"
            if longest == manifest.max_length
            else "build the engines again with a larger --max-context",
        )
        self._limits = ShapeLimits.from_manifest(manifest, settings.max_length)
        self._prefill_rows = prefill_rows(target.limits, PREFILL_ROWS)
        self._most_rows = settings.verify_rows or most
        counts = None if target.limits is None else few_counts(most)
        least = partial(least_rows, target.info.passes, exact=settings.exact)
        self._adaptive = None if settings.verify_rows else AdaptiveRows(most, least, counts)
        self._calibrated = False
        self._calibrating = threading.Lock()

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        provider: str = "cpu",
        threads: int | None = None,
        verify_rows: int | None = None,
        exact: bool = True,
        max_length: int | None = None,
        verify: Verify = Verify.HASHES,
        backend: str = ONNXRUNTIME,
        together: bool = False,
    ) -> Decoder:
        """Open a bundle.

        Args:
            bundle: the directory.
            provider: where to compute: cpu, cuda, tensorrt or tensorrt-rtx.
            threads: threads of one pass on the CPU; None takes the physical cores this process may use.
            verify_rows: rows the target verifies in a round, anchor included; see `Settings`. The drafted
                block stays whole.
            exact: see `Settings`.
            max_length: a limit below the bundle's, in tokens.
            verify: what is checked of the bundle's files.
            backend: onnxruntime, or tensorrt or tensorrt-rtx for the engines that were built into the bundle.
            together: take the graph that is faster for many requests in a pass, as `Service.open` does. The
                tokens are the same.

        Raises:
            BundleError: the bundle is missing or damaged.
            ProviderError: the provider or backend is not there, or cannot compute the bundle's dtype.
            RequestError: a setting is out of range.
        """
        if not isinstance(bundle, str | os.PathLike):
            raise field_error(RequestError, "bundle", bundle, "a path")
        if not isinstance(verify, Verify):
            raise field_error(RequestError, "verify", verify, "a Verify")
        directory = Path(bundle)
        manifest = manifest_from_bundle(directory, Verify.SIZES)
        if backend == ONNXRUNTIME:
            from .ort_engine import check_provider

            check_provider(provider, manifest.dtype)  # before any weight is read
        weights = {name for info in manifest.graphs.values() for name in info.weights}
        check_files(manifest, directory, verify, manifest.files.keys() - weights)
        with ThreadPoolExecutor(1) as thread:  # weights run nothing: they may be hashed while they are read
            checked = thread.submit(check_files, manifest, directory, verify, weights)
            read = thread.submit(_codec_from_bundle, directory, manifest)
            try:
                target, draft = runners_from_bundle(
                    directory, manifest, backend, provider, threads, together=together
                )
            except DflashError:
                checked.result()  # damaged weights are the better reason
                raise
        try:
            checked.result()
            codec = read.result()
            longest = longest_sequence(manifest, target, draft)
            settings = Settings(verify_rows, exact, longest if max_length is None else max_length)
            decoder = cls(manifest, target, draft, codec, settings)
            decoder._calibrate()
            return decoder
        except BaseException:
            target.close()
            draft.close()
            raise

    @property
    def runners(self) -> tuple[GraphRunner, GraphRunner]:
        """Target and draft."""
        return self._target, self._draft

    def with_settings(self, **changes: Any) -> Decoder:
        """A decoder over the same engines with some `Settings` changed. Closing either closes both."""
        check_options(Decoder.with_settings, changes, Settings.__dataclass_fields__)
        settings = replace(self.settings, **changes)
        return Decoder(self.manifest, self._target, self._draft, self.codec, settings)

    @property
    def effective(self) -> Mapping[str, object]:
        """What is really in use: engine, version, provider, threads, and the settings."""
        return {
            **self._target.effective,
            "dtype": self.manifest.dtype.value,
            "verify_rows": self.settings.verify_rows or "adaptive",
            "exact": self.settings.exact,
            "max_length": self.settings.max_length,
        }

    def stream(
        self, prompt: Prompt, max_new_tokens: int = MAX_NEW_TOKENS, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Start a generation; nothing is computed before the stream is read.

        Args:
            prompt: a text, token ids that are taken as they are, or chat messages.
            max_new_tokens: most tokens produced; `max_length` may allow fewer.
            options: the other fields of `Request`.

        Raises:
            RequestError: the prompt is empty, too long or no token sequence, or an option is out of range.
            TypeError: an option has no such name.
            EngineError: there is no memory for the caches, or the decoder is closed.
        """
        return self._start(request_from_call(Decoder.stream, prompt, max_new_tokens, options))

    def _start(self, request: Request) -> Stream:
        job = job_from_request(request, self.manifest, self.codec, self.settings.max_length)
        pair = self._pair(len(job.prompt) + job.new_tokens, job.speculative)
        lane = pair.lanes[0]
        lane.recorder = job.recorder
        return Stream(self._steps(job, pair, lane), job, lane)

    def _pair(self, tokens: int, speculative: bool) -> Pair:
        """Caches for one request of so many tokens."""
        fixed = self._target.limits
        capacity = self._limits.capacity_for(tokens) if fixed is None else fixed.capacity
        draft = self._draft if speculative else None
        return Pair(self.manifest, self._target, draft, capacity, 1, self.settings.exact)

    def _steps(self, job: Job, pair: Pair, lane: Lane) -> Iterator[Step]:
        """Run a request, from its first read on."""
        policy: RowPolicy = FixedRows(self._most_rows)
        if self._adaptive is not None and job.speculative and job.rows_are_free:
            self._calibrate()
            policy = self._adaptive
        loop = request_loop(job, lane, self.manifest.draft, self._prefill_rows, lambda: policy.rows(1))
        yield from run_alone(loop, job, pair, lane, policy)

    def _calibrate(self) -> None:
        """Find out what passes cost, once, whichever of several streams comes first; the others wait."""
        if self._adaptive is None:
            return
        with self._calibrating:
            if not self._calibrated:
                calibrate(self._pair(1, True), self.manifest.draft, self._adaptive)
                self._calibrated = True

    def generate(
        self, prompt: Prompt, max_new_tokens: int = MAX_NEW_TOKENS, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Generate to the end; see `stream`."""
        stream = self._start(request_from_call(Decoder.generate, prompt, max_new_tokens, options))
        for _ in stream:
            pass
        return stream.result

    def close(self) -> None:
        """Free the engines. Streams of this decoder cannot be read further. Harmless twice."""
        self._target.close()
        self._draft.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _codec_from_bundle(directory: Path, manifest: Manifest) -> TextCodec | None:
    return TextCodec.from_bundle(directory, manifest.tokenizer) if manifest.tokenizer.file else None


def longest_sequence(manifest: Manifest, *runners: GraphRunner) -> int:
    """Longest sequence in tokens that a bundle and the engines built from it allow."""
    return min([manifest.max_length, *(r.limits.max_length for r in runners if r.limits is not None)])
