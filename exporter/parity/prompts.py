"""Prompts as token ids, by the bundle's own tokenizer and chat template, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...bundle.errors import BundleError, RequestError
from ...bundle.files import safe_path
from ...bundle.manifest import Manifest


def prompt_ids(directory: Path, manifest: Manifest, prompts: Sequence[str], most: int) -> list[list[int]]:
    """Turn prompts into ids, each at most `most` long (its end is kept).

    A bundle without a tokenizer gets valid ids made from the text: its bytes, spread over the vocabulary.

    Raises:
        RequestError: there is no prompt, or one gives no tokens.
        BundleError: the tokenizer cannot be read.
    """
    if not prompts:
        raise RequestError("prompts: got none, expected at least one")
    info = manifest.tokenizer
    if info.file is None:
        step = max(1, manifest.target.vocab_size // 97)
        encoded = [[byte * step % manifest.target.vocab_size for byte in text.encode()] for text in prompts]
    else:
        encoded = _encode(directory, manifest, prompts)
    for text, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise RequestError(f"prompts: {text!r} gives no tokens, expected at least one")
    return [ids[-most:] for ids in encoded]


def _encode(directory: Path, manifest: Manifest, prompts: Sequence[str]) -> list[list[int]]:
    from transformers import PreTrainedTokenizerFast

    info = manifest.tokenizer
    assert info.file is not None
    try:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(safe_path(directory, info.file)), **info.special
        )
    except Exception as cause:  # the tokenizers library raises a bare Exception
        raise BundleError(f"{info.file}: not a tokenizer ({cause}); export again") from cause
    if info.chat_template is None:
        return [[int(i) for i in tokenizer(text)["input_ids"]] for text in prompts]
    tokenizer.chat_template = safe_path(directory, info.chat_template).read_text(encoding="utf-8")
    return [
        [
            int(i)
            for i in tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        ]
        for text in prompts
    ]
