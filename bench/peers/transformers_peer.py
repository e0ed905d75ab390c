"""transformers: `generate` in float32, plain or with proposals looked up in the text so far."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .checkpoint import from_pretrained
from .protocol import Answer, Opened, OpenRequest

LOOKUP_TOKENS = 10
"""Proposals a round, as in transformers' own documentation of the option."""


class TransformersPeer:
    """A model of transformers."""

    def __init__(self, request: OpenRequest):
        """Load it."""
        import torch
        import transformers

        torch.set_num_threads(request.threads)
        self._model: Any = from_pretrained(
            transformers.AutoModelForCausalLM, request.target, dtype=torch.float32
        ).eval()
        # The token that ends an answer is a token like others here.
        self._model.generation_config.eos_token_id = None
        lookup = request.variant == "prompt-lookup"
        self._options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
        note = f"prompt_lookup_num_tokens={LOOKUP_TOKENS}" if lookup else ""
        self.opened = Opened(f"{transformers.__version__} (torch {torch.__version__})", "float32", note)

    def generate(self, ids: list[int], new_tokens: int) -> Answer:
        """See `Peer`."""
        import torch

        prompt = torch.tensor([ids])
        clock = _FirstToken(perf_counter())
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
                **self._options,
            )
        total_ms = (perf_counter() - clock.began) * 1000.0
        tokens = tuple(output[0, len(ids) :].tolist())
        return Answer(tokens, clock.tokens, clock.first_ms, total_ms)


class _FirstToken:
    """A streamer of transformers that only looks at the clock. The first thing it is given is the prompt."""

    def __init__(self, began: float):
        self.began = began
        self.tokens = 0
        self.first_ms = 0.0
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.tokens = int(value.numel())
            self.first_ms = (perf_counter() - self.began) * 1000.0

    def end(self) -> None:
        pass


def open_peer(request: OpenRequest) -> TransformersPeer:
    """Open it."""
    return TransformersPeer(request)
