"""`dflash demo --family simple`: the seed program's experiment with its own random pair, from a bundle.

Its baseline, its speculative decoding, their comparison, and both again as means of ten runs. The draft is
random, so it is hardly ever right: there is no speedup to see, only that the tokens are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle.errors import ParityError, RequestError, field_error

if TYPE_CHECKING:
    from rich.console import Console

    from ..exporter.progress import Progress
    from ..runtime.decoder import Decoder, Generation
    from ..runtime.stats import Mode

PROMPT = (1, 2, 3, 4, 5)
RUNS = 10


def run_simple_demo(
    output: Path, prompt: str | None, max_new_tokens: int, console: Console, progress: Progress
) -> dict[str, Any]:
    """Make the pair, export it, decode with it both ways, and measure; print what was done.

    Args:
        output: directory for checkpoints and bundle, made if it is not there.
        prompt: token ids with spaces or commas between them; None takes the seed program's.
        max_new_tokens: tokens produced each time.
        console: where the report goes.
        progress: is told about stages.

    Returns:
        JSON values: ``ids``, ``acceptance_length``, ``target_passes`` (plain, speculative), and ``mean_ms`` a
        generation (plain, speculative).

    Raises:
        RequestError: the prompt is no sequence of token ids.
        ParityError: the two ways of decoding differ.
        DflashError: see export and decoder.
    """
    ids = prompt_ids(prompt)
    from ..exporter.export import export_bundle
    from ..exporter.simple.seed import seed_checkpoints
    from ..runtime.decoder import Decoder
    from ..runtime.stats import Mode

    with progress.stage("make checkpoints"):
        target, draft = seed_checkpoints(output / "simple")
    bundle = output / "simple" / "bundle"
    manifest = export_bundle(str(target), str(draft), bundle, progress=progress)
    console.print(f"bundle:  {bundle}")
    console.print(
        f"target:  {manifest.target.vocab_size} ids, hidden {manifest.target.hidden_size}, "
        f"{manifest.target.num_layers} layers"
    )
    console.print(f"draft:   blocks of {manifest.draft.block_size}")
    console.print(f"prompt:  {ids}, {max_new_tokens} new tokens")
    with Decoder.open(bundle) as decoder:
        plain = _show(decoder, ids, max_new_tokens, Mode.PLAIN, console)
        speculative = _show(decoder, ids, max_new_tokens, Mode.SPECULATIVE, console)
        if plain.ids != speculative.ids:
            raise ParityError(
                "tokens: speculative ones differ from plain ones; this is a bug, please report it"
            )
        mean_ms = _means(decoder, ids, max_new_tokens)
    figures = {
        "ids": list(plain.ids),
        "acceptance_length": speculative.stats.acceptance_length,
        "target_passes": {
            "plain": plain.stats.rounds + 1,
            "speculative": speculative.stats.rounds + 1,
        },
        "mean_ms": mean_ms,
    }
    console.rule("comparison", align="left", characters="-")
    console.print("every token is the same")
    console.print(f"plain        {mean_ms['plain']:.2f} ms, mean of {RUNS} runs")
    console.print(f"speculative  {mean_ms['speculative']:.2f} ms, mean of {RUNS} runs")
    console.print(f"speedup      {mean_ms['plain'] / mean_ms['speculative']:.2f}")
    return figures


def prompt_ids(prompt: str | None) -> list[int]:
    """Read token ids from text.

    Raises:
        RequestError: it holds something else.
    """
    if prompt is None:
        return list(PROMPT)
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise field_error(
            RequestError, "prompt", prompt, "token ids, e.g. '1 2 3' (this pair has no tokenizer)"
        ) from None


def _show(
    decoder: Decoder, prompt: list[int], max_new_tokens: int, mode: Mode, console: Console
) -> Generation:
    console.rule(f"{mode.value} decoding", align="left", characters="-")
    got = decoder.generate(prompt, max_new_tokens, mode=mode)
    stats = got.stats
    console.print(f"tokens       {list(got.ids)}", soft_wrap=True)
    console.print(f"time         {stats.total_ms:.2f} ms, {stats.rounds + 1} passes of the target")
    if stats.draft_ms:
        console.print(f"accepted     {stats.acceptance_length:.2f} tokens a round, the target's own included")
    return got


def _means(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> dict[str, float]:
    """Milliseconds of a generation, for each mode; the modes take turns."""
    from ..runtime.stats import Mode

    totals = dict.fromkeys((mode.value for mode in Mode), 0.0)
    for _ in range(RUNS):
        for mode in Mode:
            totals[mode.value] += decoder.generate(prompt, max_new_tokens, mode=mode).stats.total_ms
    return {name: total / RUNS for name, total in totals.items()}
