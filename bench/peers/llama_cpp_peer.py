"""llama.cpp, through xllamacpp, whose server runs in this process and listens on this machine alone."""

from __future__ import annotations

import http.client
import json
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from .protocol import Answer, Opened, OpenRequest


class LlamaCppPeer:
    """A model of llama.cpp."""

    def __init__(self, request: OpenRequest):
        """Load it, with one slot and without its prompt cache."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(request.target)
        params.n_ctx = 0  # the model's own
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = request.threads
        params.cpuparams_batch.n_threads = request.threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.fit_params = False
        self._server: Any = xllamacpp.Server(params)
        address = urlsplit(self._server.listening_address)
        self._address = (address.hostname or "127.0.0.1", address.port)
        features = " ".join(xllamacpp.get_system_info().replace(" = 1", "").replace(" |", "").split())
        self.opened = Opened(f"xllamacpp {xllamacpp.__version__}", f"as in {request.target.name}", features)

    def generate(self, ids: list[int], new_tokens: int) -> Answer:
        """See `Peer`. The time to the first token is what the server says it took to read the prompt."""
        body = {
            "prompt": ids,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        # A connection of its own each time: the server ends one that was idle while others were timed.
        connection = http.client.HTTPConnection(*self._address)
        began = perf_counter()
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        told = json.loads(response.read())
        total_ms = (perf_counter() - began) * 1000.0
        connection.close()
        if response.status != http.client.OK:
            raise RuntimeError(f"the server answers {response.status}: {told}")
        first_ms = min(float(told["timings"]["prompt_ms"]), total_ms)
        return Answer(tuple(told["tokens"]), 1, first_ms, total_ms)


def open_peer(request: OpenRequest) -> LlamaCppPeer:
    """Open it."""
    return LlamaCppPeer(request)
