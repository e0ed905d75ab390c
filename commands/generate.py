"""`dflash generate`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .options import backend_option, provider_option, remark_on_draft, threads_option, verify_rows_option
from .shared import bundle_argument


@click.command("generate")
@bundle_argument
@click.argument("prompt", required=False)
@click.option(
    "--ids",
    metavar="N,N,...",
    help="The prompt as token ids, taken as they are; the answer is ids too. Needs no tokenizer.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N")
@backend_option
@provider_option
@verify_rows_option
@threads_option
@click.option("--plain", is_flag=True, help="Decode with the target alone.")
@click.option(
    "--chat/--no-chat", default=None, help="Use the chat template [default: if the bundle has one]."
)
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option(
    "--min-new-tokens", type=int, default=0, metavar="N", help="Choose no end token before so many."
)
@click.option("--temperature", type=float, metavar="X", help="[default: 0, the most probable token]")
@click.option(
    "--top-k",
    type=int,
    metavar="N",
    help="Draw from the N best tokens only; like all draws, at a temperature above 0.",
)
@click.option("--top-p", type=float, metavar="X", help="Draw from the best that together reach X only.")
@click.option("--min-p", type=float, metavar="X", help="Draw from those at least X times the best one only.")
@click.option("--repetition-penalty", type=float, metavar="X", help="Above 1 discourages what was there.")
@click.option("--presence-penalty", type=float, metavar="X", help="Subtracted if it is in the answer.")
@click.option("--frequency-penalty", type=float, metavar="X", help="Subtracted for each time it is.")
@click.option("--seed", type=int, metavar="N", help="The same seed draws the same answer.")
def generate_command(
    bundle: Path,
    prompt: str | None,
    ids: str | None,
    max_new_tokens: int,
    backend: str,
    provider: str,
    verify_rows: int | None,
    threads: int | None,
    plain: bool,
    chat: bool | None,
    system: str | None,
    stop: tuple[str, ...],
    min_new_tokens: int,
    **sampling: Any,
) -> None:
    """Answer a prompt.

    The text goes to standard output as it comes, a summary to standard error.
    """
    if (prompt is None) == (ids is None):
        raise click.UsageError("give a PROMPT, or its token ids with --ids")
    if ids is not None and chat:
        raise click.UsageError("--chat: token ids are taken as they are; leave one of the two out")
    from ..runtime.decoder import Decoder
    from ..runtime.sampling import Sampling
    from ..runtime.stats import Mode

    with Decoder.open(
        bundle, provider=provider, threads=threads, verify_rows=verify_rows, backend=backend
    ) as decoder:
        if chat is None:
            chat = decoder.codec is not None and decoder.codec.has_chat_template
        stream = decoder.stream(
            _token_ids(ids) if ids is not None else prompt or "",
            max_new_tokens,
            min_new_tokens=min_new_tokens,
            mode=Mode.PLAIN if plain else Mode.SPECULATIVE,
            chat=chat,
            system=system,
            stop=stop,
            sampling=Sampling(**{name: value for name, value in sampling.items() if value is not None}),
        )
        with _warnings_afterwards():
            for number, chunk in enumerate(stream):
                added = "," * (number > 0) + ",".join(map(str, chunk.ids)) if ids is not None else chunk.text
                click.echo(added, nl=False)
                sys.stdout.flush()
        click.echo(_summary(stream.result), err=True)
        stats = stream.result.stats
        if stats.draft_ms and not stats.draft_failure:
            remark_on_draft(stats.rounds, stats.acceptance_length)


def _token_ids(text: str) -> list[int]:
    from ..bundle.errors import RequestError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as cause:
        raise RequestError(f"--ids: got {text!r}, expected numbers with commas between them") from cause


@contextmanager
def _warnings_afterwards() -> Iterator[None]:
    """End the line of a streamed text, and keep warnings of the library until then: not inside the text."""
    held: list[str] = []

    class Holder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(record.getMessage())

    handler = Holder(logging.WARNING)
    logger = logging.getLogger(__name__.partition(".")[0])
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        click.echo()
        for message in held:
            click.echo(f"dflash: {message}", err=True)


def _summary(result: Any) -> str:
    stats = result.stats
    parts = [
        f"{len(result.ids)} tokens ({result.finish_reason.value})",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"prompt {stats.prompt_tokens} tokens in {stats.prefill_ms:.0f} ms",
    ]
    if stats.rounds:
        draft = f"draft {stats.draft_ms / stats.rounds:.1f} ms, " if stats.draft_ms else ""
        parts.append(f"{stats.rounds} rounds of {draft}target {stats.verify_ms / stats.rounds:.1f} ms")
    if stats.draft_ms:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    if stats.draft_failure:
        parts.append(f"the draft failed ({stats.draft_failure}); the rest was decoded plainly")
    return " | ".join(parts)
