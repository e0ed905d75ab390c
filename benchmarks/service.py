"""Many requests at once over one bundle, beside one request at a time.

    python benchmarks/service.py demo-output/bundle --prompts demo/prompts.txt

Checks that every request gives what it gives alone, and prints tokens per second of both, the time between
tokens as a reader sees it, and the memory of the process while requests come and go.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dflash_deploy.bench.machine import cpu_name
from dflash_deploy.bundle.manifest import Verify
from dflash_deploy.runtime.decoder import Decoder, Generation
from dflash_deploy.runtime.service import Service, ServiceSettings


def alone(decoder: Decoder, requests: Sequence[tuple[str, int]]) -> tuple[list[Generation], float]:
    """One request after the other; answers and seconds."""
    began = perf_counter()
    answers = [decoder.generate(prompt, tokens) for prompt, tokens in requests]
    return answers, perf_counter() - began


def together(
    service: Service, requests: Sequence[tuple[str, int]]
) -> tuple[list[Generation], float, list[float], list[float]]:
    """All at once; answers, seconds, milliseconds between tokens, milliseconds to each first token."""
    gaps: list[float] = []
    firsts: list[float] = []
    began = perf_counter()

    def read(ticket: Any) -> None:
        last = None
        for chunk in ticket:
            now = perf_counter()
            if last is None:
                firsts.append((now - began) * 1000.0)
            else:
                gaps.extend([(now - last) * 1000.0 / len(chunk.ids)] * len(chunk.ids))
            last = now

    tickets = [service.submit(prompt, tokens) for prompt, tokens in requests]
    readers = [threading.Thread(target=read, args=(ticket,)) for ticket in tickets]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = perf_counter() - began
    return [ticket.result() for ticket in tickets], seconds, gaps, firsts


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(service: Service, prompts: Sequence[str], count: int, tokens: int) -> list[float]:
    """Resident megabytes after each tenth of so many requests."""
    found = []
    for begin in range(0, count, max(count // 10, 1)):
        batch = [prompts[i % len(prompts)] for i in range(begin, min(begin + max(count // 10, 1), count))]
        for ticket in [service.submit(prompt, tokens, wait_s=600.0) for prompt in batch]:
            ticket.result()
        found.append(round(resident_mb(), 1))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="one a line")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=32, help="new tokens of the shortest request")
    parser.add_argument("--longest", type=int, default=128, help="new tokens of the longest request")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--verify-rows", type=int, help="of the requests alone; the service chooses for itself"
    )
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--memory-requests", type=int, default=300)
    parser.add_argument("--memory-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    lengths = np.linspace(options.shortest, options.longest, options.requests).astype(int).tolist()
    requests = [(prompts[i % len(prompts)], length) for i, length in enumerate(lengths)]
    with Decoder.open(
        options.bundle,
        threads=options.threads,
        verify_rows=options.verify_rows,
        verify=Verify.SIZES,
    ) as decoder:
        decoder.generate(prompts[0], 8)
        expected, alone_s = alone(decoder, requests)
        settings = ServiceSettings(max_requests=options.requests, max_length=options.max_length)
        with Service(decoder, settings) as service:
            got, together_s, gaps, firsts = together(service, requests)
            stats = service.stats()
            found = memory(service, prompts, options.memory_requests, options.memory_tokens)
            tokens = sum(len(answer.ids) for answer in expected)
            result = {
                "requests": options.requests,
                "new_tokens": tokens,
                "equal_to_single_runs": sum(
                    (a.ids, a.text, a.finish_reason) == (b.ids, b.text, b.finish_reason)
                    for a, b in zip(expected, got, strict=True)
                ),
                "alone_tokens_per_s": tokens / alone_s,
                "together_tokens_per_s": tokens / together_s,
                "ratio": alone_s / together_s,
                "ms_between_tokens_median": float(np.median(gaps)),
                "ms_between_tokens_p95": float(np.percentile(gaps, 95)),
                "ms_to_first_token_median": float(np.median(firsts)),
                "mean_batch": stats.cycle_requests / stats.cycles,
                "acceptance_length": stats.acceptance_length,
                "resident_mb": found,
                "settings": dict(service.effective),
                "cpu": cpu_name(),
            }
    for name, value in result.items():
        print(f"{name:<26} {value:.2f}" if isinstance(value, float) else f"{name:<26} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
