"""onnxruntime-genai, with the model that its own builder makes of the target, in float32 or int4."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from .checkpoint import dense_folder, fingerprint, made_once
from .protocol import Answer, Opened, OpenRequest

_PRECISIONS = {"fp32": "float32", "int4": "int4 weights"}


class GenaiPeer:
    """A model of onnxruntime-genai."""

    def __init__(self, request: OpenRequest):
        """Build it if it is not in the cache, and load it."""
        import onnxruntime
        import onnxruntime_genai as genai

        assert request.cache is not None, "choose_peers asks for one"
        folder = build_model(request.target, request.cache, request.variant, genai.__version__)
        config = genai.Config(str(folder))
        options = {"intra_op_num_threads": request.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._genai: Any = genai
        self._model = genai.Model(config)
        version = f"{genai.__version__} (onnxruntime {onnxruntime.__version__})"
        note = f"onnxruntime_genai.models.builder -p {request.variant} -e cpu"
        self.opened = Opened(version, _PRECISIONS[request.variant], note)

    def generate(self, ids: list[int], new_tokens: int) -> Answer:
        """See `Peer`."""
        length = len(ids) + new_tokens
        began = perf_counter()
        params = self._genai.GeneratorParams(self._model)
        # A shortest length that is the longest one: the token that ends an answer is never chosen.
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first_ms = (perf_counter() - began) * 1000.0
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        total_ms = (perf_counter() - began) * 1000.0
        tokens = tuple(int(token) for token in generator.get_sequence(0)[len(ids) :])
        return Answer(tokens, 1, first_ms, total_ms)


def build_model(target: Path, cache: Path, precision: str, version: str) -> Path:
    """Run the builder, once for each target, precision and version.

    Raises:
        RuntimeError: it failed; its last lines say why.
    """
    folder = cache / f"{target.stem}-{fingerprint(target)}-genai-{version}-{precision}"

    def make(work: Path) -> None:
        source = dense_folder(target, cache)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        places = ["-i", str(source), "-o", str(work), "-c", str(cache / "genai-builder")]
        done = subprocess.run(
            [*builder, *places, "-p", precision, "-e", "cpu"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the builder failed: {' | '.join(done.stderr.splitlines()[-3:])}")

    return made_once(folder, make)


def open_peer(request: OpenRequest) -> GenaiPeer:
    """Open it."""
    return GenaiPeer(request)
