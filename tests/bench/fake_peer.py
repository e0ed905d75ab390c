"""A program to time that needs nothing installed. Its target is a JSON file that says how it behaves."""

from __future__ import annotations

import json
import os
import sys
from time import sleep

from dflash_deploy.bench.peers.protocol import Answer, Opened, OpenRequest


class FakePeer:
    def __init__(self, request: OpenRequest):
        self.how = json.loads(request.target.read_text())
        if "refuse" in self.how:
            raise ValueError(self.how["refuse"])
        print("chatter that is no part of the protocol")
        os.write(1, b"and some from below Python\n")
        self.opened = Opened(
            "1.2", "float32", f"{request.threads} threads, OMP {os.environ['OMP_NUM_THREADS']}"
        )
        self.calls = 0

    def generate(self, ids: list[int], new_tokens: int) -> Answer:
        self.calls += 1
        if self.calls == self.how.get("die_at"):
            sys.stderr.write("the last words\n")
            sys.stderr.flush()
            os._exit(3)
        if self.calls == self.how.get("fail_at"):
            raise RuntimeError("out of luck")
        if self.calls == self.how.get("nonsense_at"):
            return Answer((), 0, 1.0, 2.0)
        sleep(self.how.get("sleep_s", 0.0))
        tokens = self.how.get("tokens", {}).get(",".join(map(str, ids)), [7] * new_tokens)
        return Answer(tuple(tokens[:new_tokens]), 1, 5.0, 5.0 + 2.0 * (new_tokens - 1))


def open_peer(request: OpenRequest) -> FakePeer:
    return FakePeer(request)
