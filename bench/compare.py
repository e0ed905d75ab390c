"""Several bundles and other programs, timed in one run over the same token ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .context import context_tasks
from .figures import Runs, differences, ratio, way_figures
from .machine import cpu_count, cpu_name
from .measure import SETTLE_S, Progress, Samples, Task, Way, interleave
from .opened import BenchSettings, OpenBundle, common_tasks, open_bundles
from .own import PLAIN, PLAIN_EXACT, SPECULATIVE, own_ways, uses_chat, way_name
from .peers.client import PeerPlace, PeerWay, open_peers
from .prompts import PromptSet, RandomPrompts
from .run import bundle_report, versions


def compare(
    bundles: Sequence[Path],
    prompts: PromptSet | RandomPrompts,
    settings: BenchSettings | None = None,
    peers: Sequence[str] = (),
    place: PeerPlace | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time bundles and other programs.

    Each bundle is compared with itself (`bundle_figures`); its tokens, and those of every other program, with
    the exact plain tokens of the first bundle.

    Args:
        bundles: directories; the first one's tokenizer and answers decide what everybody decodes.
        prompts: what to decode.
        settings: how.
        peers: names of other programs, see `PEERS`.
        place: what these need.
        progress: is told how many runs of how many are done.

    Returns:
        JSON values: ``bundles``, ``peers``, ``context``, ``settings``, ``versions``, ``cpu``.

    Raises:
        RequestError: a prompt or setting is not possible.
        BundleError, ProviderError, EngineError: a bundle or a program cannot be opened, or fails.
    """
    settings = settings or BenchSettings()
    with ExitStack() as stack:
        opened = open_bundles(stack, bundles, settings)
        first = opened[0].decoder
        chosen, tasks = common_tasks(opened, prompts, settings)
        behind = _contexts(opened, tasks, settings)  # before the work: a length may be refused
        effective = dict(first.effective)
        others = open_peers(stack, peers, place, int(str(effective.get("threads") or cpu_count())))
        ways: list[Way] = [way for one in opened for way in own_ways(one.decoder, one.label)]
        ways += others
        settle_s = SETTLE_S if len(opened) + len(others) > 1 else 0.0
        samples = interleave(ways, tasks, settings.repeats, progress, settle_s)
        reference = samples[way_name(opened[0].label, PLAIN_EXACT)]
        fastest = max(
            way_figures(samples[way_name(one.label, SPECULATIVE)])["tokens_per_s"] for one in opened
        )
        return {
            "bundles": [_bundle(one, samples, reference) for one in opened],
            "peers": [_peer(way, samples[way.name], reference, fastest) for way in others],
            "context": [
                _context(length, opened, others, interleave(ways, some, settings.repeats, progress, settle_s))
                for length, some in behind.items()
            ],
            "settings": {
                "prompts": chosen.name,
                "prompt_count": len(tasks),
                "prompt_tokens": sum(len(task.ids) for task in tasks),
                "length": chosen.length.value,
                "max_new_tokens": settings.max_new_tokens,
                "new_tokens": sum(task.new_tokens for task in tasks),
                "repeats": settings.repeats,
                "provider": effective.get("provider"),
                "threads": effective.get("threads"),
                "cpus": cpu_count(),
                "verify_rows": settings.verify_rows or "adaptive",
                "chat": uses_chat(first),
            },
            "versions": versions(effective),
            "cpu": cpu_name(),
        }


def _bundle(one: OpenBundle, samples: Samples, reference: Runs) -> dict[str, Any]:
    return {
        "label": one.label,
        "open_ms": one.open_ms,
        **bundle_report(one.decoder, samples, one.label),
        "unlike_first_bundle": differences(samples[way_name(one.label, PLAIN_EXACT)], reference),
    }


def _peer(way: PeerWay, runs: Runs, reference: Runs, fastest: float) -> dict[str, Any]:
    figures = way_figures(runs)
    return {
        "name": way.name,
        **way.opened.to_dict(),
        "open_ms": way.open_ms,
        **figures,
        "unlike_first_bundle": differences(runs, reference),
        "fastest_bundle_over_it": ratio(fastest, figures["tokens_per_s"]),
    }


def _contexts(
    opened: Sequence[OpenBundle], tasks: Sequence[Task], settings: BenchSettings
) -> dict[int, list[Task]]:
    most = min(one.decoder.settings.max_length for one in opened)
    prompts = [task.ids for task in tasks]
    return {
        length: context_tasks(prompts, length, settings.max_new_tokens, most) for length in settings.contexts
    }


def _context(
    length: int, opened: Sequence[OpenBundle], others: Sequence[PeerWay], samples: Samples
) -> dict[str, Any]:
    """Cost of a token behind a context; ``ms_per_token`` by way."""
    bundles = []
    for one in opened:
        report = bundle_report(one.decoder, samples, one.label)
        bundles.append(
            {
                "label": one.label,
                **{name: _cost(report[name]) for name in (PLAIN, PLAIN_EXACT, SPECULATIVE)},
                **{key: report[key] for key in ("speedup", "bound", "acceptance_length", "tokens_identical")},
            }
        )
    peers = [{"name": way.name, **_cost(way_figures(samples[way.name]))} for way in others]
    return {"length": length, "bundles": bundles, "peers": peers}


def _cost(figures: dict[str, Any]) -> dict[str, Any]:
    kept = ("first_token_ms", "verify_ms", "draft_ms", "other_ms", "other_share")
    return {
        "ms_per_token": ratio(1000.0, figures["tokens_per_s"]),
        **{key: figures[key] for key in kept if key in figures},
    }
