"""A bundle, opened: prompts in, tokens and text out.

Nothing is kept between requests: caches, buffers and counters belong to the stream that a request gets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from ..bundle.errors import RequestError, field_error
from ..bundle.limits import ShapeLimits
from ..bundle.manifest import Manifest, Verify, check_files, manifest_from_bundle
from ..bundle.tensors import DRAFT, TARGET
from .accept import Acceptance, FinishReason
from .engine import GraphRunner
from .loop import Budget, run_loop
from .models import Draft, Target
from .stats import GenerationStats, Mode, Recorder
from .text import TextCodec

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Chunk:
    """What one round adds. `text` may be empty while a character is incomplete."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Generation:
    """A whole answer. A stop token that ended it is the last of `ids`."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True)
class Settings:
    """How a decoder works.

    Attributes:
        verify_rows: rows the target verifies in a round, the anchor and the first proposals.
        exact: compute a lone row in the company of another, so that plain and speculative decoding give the
            same bits (shown for ONNX Runtime on the CPU in float32); False is faster for plain decoding, and
            may choose otherwise where two tokens nearly tie.
        max_length: longest sequence in tokens, prompt and output.
    """

    verify_rows: int
    exact: bool
    max_length: int


class Stream(Iterator[Chunk]):
    """The chunks of one generation, computed as they are read.

    Dropping it, closing it, or an exception in the code that reads it ends the generation after the round
    in progress. May be used as a context manager.
    """

    def __init__(self, rounds: Iterator[Acceptance], codec: TextCodec | None, parts: _Parts):
        self._text = codec.stream() if codec is not None else None
        self._running: tuple[Iterator[Acceptance], _Parts] | None = (rounds, parts)
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._result: Generation | None = None

    def __next__(self) -> Chunk:
        if self._running is None:
            raise StopIteration
        rounds, parts = self._running
        began = perf_counter()
        try:
            outcome = next(rounds)
            text = ""
            if self._text is not None:
                text = self._text.push(outcome.ids)
                if outcome.finish is not None:
                    text += self._text.close()
        except BaseException:
            self._running = None
            raise
        self._ids += outcome.ids
        self._texts.append(text)
        parts.recorder.total_ms += (perf_counter() - began) * 1000.0
        if outcome.finish is not None:
            self._end(outcome.finish)
        return Chunk(outcome.ids, text)

    @property
    def result(self) -> Generation:
        """The whole generation, as soon as its last chunk was read or the stream was closed.

        Raises:
            RequestError: it has not ended, or ended in an error.
        """
        if self._result is None:
            raise RequestError("result: the stream has not ended; read it to its end or close it first")
        return self._result

    def close(self) -> None:
        """End the generation here and free its memory. Harmless at any time, and twice."""
        self._end(FinishReason.CANCELLED)

    def _end(self, finish: FinishReason) -> None:
        if self._running is not None:
            stats = self._running[1].stats()
            self._result = Generation(tuple(self._ids), "".join(self._texts), finish, stats)
            self._running = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Parts:
    """What a running generation holds."""

    target: Target
    draft: Draft | None
    recorder: Recorder

    def stats(self) -> GenerationStats:
        return self.recorder.stats(
            self.target.length.committed, self.draft.length.committed if self.draft is not None else 0
        )


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
        if not 2 <= settings.verify_rows <= most:
            raise field_error(
                RequestError, "verify_rows", settings.verify_rows, f"2 to {most} (anchor and proposals)"
            )
        if not 2 <= settings.max_length <= manifest.max_length:
            raise field_error(
                RequestError,
                "max_length",
                settings.max_length,
                f"2 to {manifest.max_length}",
                "export again with a larger --max-length",
            )
        self._limits = ShapeLimits.from_manifest(manifest, settings.max_length)

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
    ) -> Decoder:
        """Open a bundle.

        Args:
            bundle: the directory.
            provider: where to compute: cpu, cuda, tensorrt or tensorrt-rtx.
            threads: threads of one pass on the CPU; None takes the physical cores this process may use.
            verify_rows: rows the target verifies in a round, anchor included; None verifies every proposal.
                The drafted block stays whole.
            exact: see `Settings`.
            max_length: a limit below the bundle's, in tokens.
            verify: what is checked of the bundle's files.

        Raises:
            BundleError: the bundle is missing or damaged.
            ProviderError: the provider is not there, or cannot compute the bundle's dtype.
            RequestError: a setting is out of range.
        """
        from .ort_engine import check_provider, runner_from_onnx

        directory = Path(bundle)
        manifest = manifest_from_bundle(directory, Verify.SIZES)
        settings = Settings(
            manifest.draft.proposals + 1 if verify_rows is None else verify_rows,
            exact,
            manifest.max_length if max_length is None else max_length,
        )
        check_provider(provider, manifest.dtype)  # before any weight is read
        if verify is Verify.HASHES:
            check_files(manifest, directory, verify)
        codec = TextCodec.from_bundle(directory, manifest.tokenizer) if manifest.tokenizer.file else None
        target = runner_from_onnx(directory, manifest.graphs[TARGET], provider, threads)
        draft = runner_from_onnx(directory, manifest.graphs[DRAFT], provider, threads)
        return cls(manifest, target, draft, codec, settings)

    def with_settings(self, **changes: Any) -> Decoder:
        """A decoder over the same engines with some `Settings` changed. Closing either closes both."""
        settings = replace(self.settings, **changes)
        return Decoder(self.manifest, self._target, self._draft, self.codec, settings)

    @property
    def effective(self) -> Mapping[str, object]:
        """What is really in use: engine, version, provider, threads, and the settings."""
        return {
            **self._target.effective,
            "dtype": self.manifest.dtype.value,
            "verify_rows": self.settings.verify_rows,
            "exact": self.settings.exact,
            "max_length": self.settings.max_length,
        }

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = MAX_NEW_TOKENS,
        mode: Mode = Mode.SPECULATIVE,
        chat: bool = True,
        system: str | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Stream:
        """Start a generation; nothing is computed before the stream is read.

        Args:
            prompt: text, or token ids that are taken as they are.
            max_new_tokens: most tokens produced; `max_length` may allow fewer.
            mode: with the draft, or with the target alone.
            chat: put a text prompt into the model's chat template.
            system: the template's system message; None takes the template's own.
            stop_token_ids: ids that end the generation instead of the bundle's; an empty list ends it at
                `max_new_tokens` only.

        Raises:
            RequestError: the prompt is empty, too long or no token sequence, or a limit is out of range.
            EngineError: there is no memory for the caches, or the decoder is closed.
        """
        if not isinstance(mode, Mode):
            raise field_error(RequestError, "mode", mode, "Mode.SPECULATIVE or Mode.PLAIN")
        ids = self._prompt_ids(prompt, chat, system)
        new_tokens = min(_at_least_one(max_new_tokens), self.settings.max_length - len(ids))
        given = self.manifest.stop_token_ids if stop_token_ids is None else stop_token_ids
        stops = frozenset(self._checked(given, "stop_token_ids"))
        budget = Budget(new_tokens, self.settings.verify_rows, stops)
        recorder = Recorder(mode, len(ids))
        capacity = self._limits.capacity_for(len(ids) + new_tokens)
        info, speculative = self.manifest.draft, mode is Mode.SPECULATIVE
        target = Target(self._target, capacity, self.settings.exact, speculative, recorder)
        draft = None
        if speculative:
            draft = Draft(self._draft, info, self.manifest.target.vocab_size, capacity, recorder)
        return Stream(
            run_loop(target, draft, info, ids, budget, recorder), self.codec, _Parts(target, draft, recorder)
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = MAX_NEW_TOKENS,
        mode: Mode = Mode.SPECULATIVE,
        chat: bool = True,
        system: str | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Generation:
        """Generate to the end; see `stream`."""
        stream = self.stream(prompt, max_new_tokens, mode, chat, system, stop_token_ids)
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

    def _prompt_ids(self, prompt: str | Sequence[int], chat: bool, system: str | None) -> list[int]:
        if isinstance(prompt, str):
            if self.codec is None:
                raise RequestError("prompt: got text, but this bundle has no tokenizer; give token ids")
            ids = self.codec.encode_prompt(prompt, chat, system)
        elif system is not None:
            raise RequestError("system: got a system message beside token ids; put it into the ids")
        else:
            ids = self._checked(prompt, "prompt")
        if not ids:
            raise RequestError("prompt: got no tokens, expected at least one")
        most = self.settings.max_length - 1
        if len(ids) > most:
            raise field_error(
                RequestError,
                "prompt: length in tokens",
                len(ids),
                f"at most {most} (max_length is {self.settings.max_length}, one token has to fit behind it)",
                "shorten it, or export with a larger --max-length",
            )
        return ids

    def _checked(self, ids: Sequence[int], what: str) -> list[int]:
        rows = self.manifest.target.embedding_rows
        checked = []
        for index, token in enumerate(ids):
            try:
                value = operator.index(token)
            except TypeError:
                value = -1
            if not 0 <= value < rows:
                raise field_error(RequestError, f"{what}[{index}]", token, f"a token id, 0 <= id < {rows}")
            checked.append(value)
        return checked


def _at_least_one(max_new_tokens: int) -> int:
    try:
        value = operator.index(max_new_tokens)
    except TypeError:
        value = 0
    if value < 1:
        raise field_error(RequestError, "max_new_tokens", max_new_tokens, ">= 1")
    return value
