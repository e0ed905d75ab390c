"""Plain and speculative decoding of the same prompts, timed in one run.

Three ways are timed in turn for every prompt, so that a slow minute of the machine hits all of them:
`plain`, the fastest plain decoding there is; `plain_exact`, plain decoding whose bits do not depend on how
many rows are computed together; `speculative`, which is exact too and is compared token by token.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..bundle.errors import RequestError, field_error
from .backends import ONNXRUNTIME
from .decoder import Decoder, Generation
from .stats import GenerationStats, Mode

if TYPE_CHECKING:
    from rich.table import Table

Prompt = str | Sequence[int]
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class _Way:
    """One way of decoding that is timed."""

    name: str
    mode: Mode
    exact: bool


PLAIN = _Way("plain", Mode.PLAIN, exact=False)
PLAIN_EXACT = _Way("plain_exact", Mode.PLAIN, exact=True)
SPECULATIVE = _Way("speculative", Mode.SPECULATIVE, exact=True)
_WAYS = (PLAIN, PLAIN_EXACT, SPECULATIVE)


def run_bench(
    bundle: Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    verify_rows: int | None = None,
    threads: int | None = None,
    provider: str = "cpu",
    repeats: int = 1,
    progress: Callable[[int, int], None] | None = None,
    backend: str = ONNXRUNTIME,
) -> dict[str, Any]:
    """Open a bundle and time it; see `bench_decoder` for the figures.

    Args:
        bundle: the directory.
        prompts: texts, put into the chat template if the bundle has one, or token ids.
        max_new_tokens: most tokens produced for each.
        verify_rows: see `Decoder.open`.
        threads: see `Decoder.open`.
        provider: see `Decoder.open`.
        repeats: runs of each prompt and way, of which the fastest counts.
        progress: is told how many runs of how many are done.
        backend: see `Decoder.open`.

    Raises:
        RequestError: there is no prompt, or a prompt or setting is not possible.
        BundleError, ProviderError, EngineError: see `Decoder`.
    """
    with Decoder.open(
        bundle, provider=provider, threads=threads, verify_rows=verify_rows, backend=backend
    ) as decoder:
        return bench_decoder(decoder, prompts, max_new_tokens, repeats, progress)


def bench_decoder(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    repeats: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Time an open decoder.

    Returns:
        JSON values. Times are milliseconds: ``prefill_ms`` a prompt, the others a round (a plain step is a
        round of one token). ``tokens_per_s`` is decoding without the prefill,
        ``end_to_end_tokens_per_s`` with it. ``speedup`` is speculative over plain ``tokens_per_s``.
        ``bound`` is the speedup if nothing but the engines took time: acceptance length / (verify + draft)
        x plain step. ``tokens_identical`` compares speculative with plain_exact;
        ``prompts_unlike_fast_plain`` counts the prompts where `plain` chose otherwise somewhere.
    """
    if not prompts:
        raise RequestError("prompts: got none, expected at least one")
    if repeats < 1:
        raise field_error(RequestError, "repeats", repeats, ">= 1")
    chat = decoder.codec is not None and decoder.codec.has_chat_template
    decoders = {way: decoder.with_settings(exact=way.exact) for way in _WAYS}
    best: dict[tuple[_Way, int], Generation] = {}
    total, done = len(prompts) * repeats * len(_WAYS), 0

    def run(way: _Way, prompt: Prompt, tokens: int) -> Generation:
        return decoders[way].generate(prompt, tokens, mode=way.mode, chat=chat)

    for way in _WAYS:
        run(way, prompts[0], min(WARM_UP_TOKENS, max_new_tokens))
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            turn = (index + repeat) % len(_WAYS)
            for way in _WAYS[turn:] + _WAYS[:turn]:
                got = run(way, prompt, max_new_tokens)
                old = best.get((way, index))
                if old is None or got.stats.total_ms < old.stats.total_ms:
                    best[way, index] = got
                done += 1
                if progress is not None:
                    progress(done, total)

    answers = {way: [best[way, index] for index in range(len(prompts))] for way in _WAYS}
    figures = {way.name: _figures([g.stats for g in answers[way]]) for way in _WAYS}
    plain, speculative = figures[PLAIN.name], figures[SPECULATIVE.name]
    stats = [g.stats for g in answers[SPECULATIVE]]
    rounds = sum(s.rounds for s in stats)
    acceptance = sum(sum(s.acceptance_lengths) for s in stats) / rounds if rounds else 0.0
    speedup = _ratio(speculative["tokens_per_s"], plain["tokens_per_s"])
    bound = acceptance * _ratio(plain["verify_ms"], speculative["verify_ms"] + speculative["draft_ms"])
    return {
        **figures,
        "speedup": speedup,
        "acceptance_length": acceptance,
        "bound": bound,
        "bound_reached": _ratio(speedup, bound),
        "tokens_identical": _differing(answers[SPECULATIVE], answers[PLAIN_EXACT]) == 0,
        "prompts_unlike_fast_plain": _differing(answers[SPECULATIVE], answers[PLAIN]),
        "rounds": rounds,
        "draft_failures": sum(s.draft_failures for s in stats),
        "threads": decoder.effective.get("threads"),
        "settings": {
            **decoder.effective,
            "max_new_tokens": max_new_tokens,
            "prompts": len(prompts),
            "repeats": repeats,
            "chat": chat,
        },
        "bundle": decoder.manifest.name,
        "versions": {
            "dflash-deploy": __version__,
            str(decoder.effective.get("engine")): decoder.effective.get("engine_version"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "cpu": cpu_name(),
    }


def _figures(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Sums over all prompts, as rates and means."""
    rounds = max(sum(s.rounds for s in stats), 1)
    tokens, decoded = sum(s.new_tokens for s in stats), sum(s.new_tokens - 1 for s in stats)
    decode_ms, other_ms = sum(s.decode_ms for s in stats), sum(s.other_ms for s in stats)
    return {
        "tokens_per_s": 1000.0 * _ratio(decoded, decode_ms),
        "end_to_end_tokens_per_s": 1000.0 * _ratio(tokens, sum(s.total_ms for s in stats)),
        "tokens": tokens,
        "rounds": sum(s.rounds for s in stats),
        "prefill_ms": sum(s.prefill_ms for s in stats) / len(stats),
        "verify_ms": sum(s.verify_ms for s in stats) / rounds,
        "draft_ms": sum(s.draft_ms for s in stats) / rounds,
        "other_ms": other_ms / rounds,
        "other_share": _ratio(other_ms, decode_ms),
    }


def _differing(some: Sequence[Generation], others: Sequence[Generation]) -> int:
    return sum(
        (a.ids, a.finish_reason) != (b.ids, b.finish_reason) for a, b in zip(some, others, strict=True)
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def bench_table(result: dict[str, Any]) -> Table:
    """The figures of `bench_decoder` as a table for a terminal."""
    from rich.table import Table

    settings = result["settings"]
    reached = f"{result['bound_reached']:.0%} of the bound {result['bound']:.2f}"
    same = "identical to plain" if result["tokens_identical"] else "NOT IDENTICAL to plain"
    place = settings["provider"]
    if result["threads"] is not None:
        place += f", {result['threads']} threads"
    table = Table(
        title=f"{result['bundle']}: {settings['prompts']} prompts, up to {settings['max_new_tokens']} tokens,"
        f" {place}, {settings['verify_rows']} rows verified",
        caption=f"speedup {result['speedup']:.2f} ({reached}), acceptance length "
        f"{result['acceptance_length']:.3f}, tokens {same}",
    )
    table.add_column("")
    columns = {
        "tokens_per_s": "tokens/s",
        "rounds": "rounds",
        "verify_ms": "target ms",
        "draft_ms": "draft ms",
        "other_ms": "other ms",
        "other_share": "other",
        "prefill_ms": "prefill ms",
    }
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for way in _WAYS:
        cells = []
        for key in columns:
            value = result[way.name][key]
            form = "{:.1%}" if key == "other_share" else "{:d}" if key == "rounds" else "{:.2f}"
            cells.append(form.format(value))
        table.add_row(way.name.replace("_", " "), *cells)
    return table
