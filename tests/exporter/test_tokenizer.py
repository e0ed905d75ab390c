"""A folder's tokenizer in a bundle gives what transformers gives from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_deploy.bundle.errors import CheckpointError
from dflash_deploy.exporter.tokenizer import tokenizer_to_bundle
from dflash_deploy.runtime.text import TextCodec

transformers = pytest.importorskip("transformers")

CHAT = [{"role": "user", "content": "hello <s> wörld"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def _source(folder: Path, format: str = "safetensors", **config: Any) -> Any:  # noqa: A002
    return SimpleNamespace(
        format=format,
        name=folder.name,
        config=config,
        files=lambda: (folder / "config.json",),
        tokenizer_folder=lambda: folder if (folder / "tokenizer.json").is_file() else None,
    )


def _folder(folder: Path, post_bos: bool = False, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    if post_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": TEMPLATE},
        {"chat_template": TEMPLATE, "add_bos_token": True},
        {"chat_template": TEMPLATE, "add_bos_token": False, "post_bos": True},
        {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "no"}]},
        {"chat_template": TEMPLATE, "additional_special_tokens": ["<pad>", "<|täg|>"]},
    ],
)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path, config):
    folder, bundle = _folder(tmp_path / "model", **config), tmp_path / "bundle"
    bundle.mkdir()
    codec = TextCodec.from_bundle(bundle, tokenizer_to_bundle(_source(folder), bundle))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert codec.encode_chat(CHAT) == theirs.apply_chat_template(CHAT, truncation=False, return_dict=False)
    for text in ("hello", "<|täg|> behind <s>", "a much longer text than the truncation it was saved with"):
        assert codec.encode(text) == theirs(text, truncation=False, padding=False)["input_ids"]


def test_the_template_file_goes_before_the_config(tmp_path):
    folder = _folder(tmp_path / "model", chat_template="old")
    (folder / "chat_template.jinja").write_text("new ü")
    info = tokenizer_to_bundle(_source(folder), tmp_path)
    assert (tmp_path / str(info.chat_template)).read_text(encoding="utf-8") == "new ü"
    assert {"bos_token": "<s>", "eos_token": "</s>"}.items() <= info.special.items()
    assert info.bos_token_id == 256


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    folder = _folder(tmp_path / "model", chat_template=TEMPLATE)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tokenizer_to_bundle(_source(folder), tmp_path / name)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_model_without_a_template(tmp_path):
    info = tokenizer_to_bundle(_source(_folder(tmp_path / "model")), tmp_path)
    assert info.chat_template is None
    assert not (tmp_path / "chat_template.jinja").exists()


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    info = tokenizer_to_bundle(_source(tmp_path, bos_token_id=7), tmp_path)
    assert info.file is None
    assert info.bos_token_id == 7
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tokenizer_is_the_checkpoints_fault(tmp_path):
    folder = _folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="model: its tokenizer cannot be read"):
        tokenizer_to_bundle(_source(folder), tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    folder = _folder(
        tmp_path / "model",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    tokenizer_to_bundle(_source(folder), tmp_path)
    assert not (tmp_path / "ran").exists()
