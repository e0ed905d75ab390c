"""The process that a program runs in: `python -m dflash_deploy.bench.peers.worker MODULE`.

Standard output belongs to the protocol; whatever the program prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from .protocol import ERROR, OpenRequest, Peer


def serve(module: str, requests: IO[str], answers: IO[str]) -> None:
    """Open a program and answer until the requests end.

    Args:
        module: a module with ``open_peer(request) -> Peer``.
        requests: lines to read.
        answers: lines are written here.
    """
    peer: Peer | None = None
    for line in requests:
        asked = json.loads(line)
        try:
            if peer is None:
                peer = importlib.import_module(module).open_peer(OpenRequest.from_json(asked))
                told: dict[str, Any] = peer.opened.to_dict()
            else:
                told = asdict(peer.generate(asked["ids"], asked["new_tokens"]))
        except Exception as error:  # whatever a program throws is its answer
            told = {ERROR: f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def main() -> None:
    """Entry point."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
