"""The pair of `toy_onnx` with a real tokenizer and a chat template, so that text goes in and comes out.

Its 40 tokens are special ones, letters, and single bytes of two characters that take several. What it says
is nonsense, but not the same for every prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

import toy_onnx
from dflash_deploy.bundle.manifest import Manifest, TokenizerInfo, file_info, manifest_to_file

BOS, END, UNK = 0, 1, 2
SPECIAL = ("<s>", "<end>", "<unk>", "<mask>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in "€é".encode())
TOKENS = (*SPECIAL, *BYTES, *"abcdefghijklmnopqrstuvwxyz", " ", "\n", ".", "?", ":")
TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""


def tokenizer() -> Tokenizer:
    """One token a letter; what is none of them is unknown, but for the two characters it has bytes of."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(list(SPECIAL))
    return made


def write_text_bundle(directory: Path, max_length: int = 400) -> Manifest:
    """Write the bundle."""
    assert len(TOKENS) == toy_onnx.VOCAB
    plain = toy_onnx.write_bundle(directory, max_length=max_length)
    (directory / "tokenizer.json").write_text(tokenizer().to_str(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    info = TokenizerInfo(
        file="tokenizer.json",
        chat_template="chat_template.jinja",
        special={"bos_token": "<s>", "eos_token": "<end>"},
        bos_token_id=BOS,
    )
    added = {name: file_info(directory / name) for name in (info.file, info.chat_template)}
    manifest = replace(plain, tokenizer=info, stop_token_ids=(END,), files={**plain.files, **added})
    manifest_to_file(manifest, directory)
    return manifest
