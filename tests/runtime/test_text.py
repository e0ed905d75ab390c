"""Text in and out: the same ids as transformers, and streams that join to the whole (case D01)."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_deploy.bundle.errors import BundleError, RequestError
from dflash_deploy.bundle.manifest import TokenizerInfo
from dflash_deploy.demo import demo_reference
from dflash_deploy.runtime.text import TextCodec, _byte_table

TEXTS = (
    "plain words",
    "an emoji 🚀, two 🚀🚀",
    "a family: 👨‍👩‍👧‍👦 of one character",
    "漢字とひらがな",
    "שלום עולם",
    "e\u0301 combined, n\u0303 too",
    "one\u00a0space \u2014 and a dash",
    " leading and trailing ",
    "\n\n\ttabs\n",
    "\ufffd itself",
)


@functools.cache
def byte_level() -> TextCodec:
    """One token a byte, and a special and an ordinary added token behind them."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(_byte_table()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<täg x>", normalized=False)])
    return TextCodec(tokenizer)


@functools.cache
def byte_fallback() -> TextCodec:
    """SentencePiece style: a few words, single bytes for the rest, a space lost at the very start."""
    words = ["<unk>", "<s>", "▁", "▁hello", "▁world", "a", "e\u0301", "漢", "\ufffd", "<0x"]
    pieces = words + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return TextCodec(tokenizer)


@functools.cache
def wordpiece() -> TextCodec:
    tokenizer = Tokenizer(
        models.WordPiece({"un": 0, "##able": 1, "do": 2, ",": 3, "[UNK]": 4}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    return TextCodec(tokenizer)


CODECS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "wordpiece": wordpiece}
SIZES = {"byte_level": 260, "byte_fallback": 268, "wordpiece": 6}  # ids beyond the vocabulary, too


def _stream(codec: TextCodec, chunks: Sequence[Sequence[int]]) -> list[str]:
    stream = codec.stream()
    return [*(stream.push(chunk) for chunk in chunks), stream.close()]


def _chunks(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_whole(name, data):
    """Any ids, valid text or not, in chunks of any size."""
    codec = CODECS[name]()
    chunks = data.draw(st.lists(st.lists(st.integers(0, SIZES[name]), max_size=9), max_size=12))
    ids = [i for chunk in chunks for i in chunk]
    assert "".join(_stream(codec, chunks)) == codec.decode(ids)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_decoding_is_the_tokenizers_own(name, data):
    codec = CODECS[name]()
    ids = data.draw(st.lists(st.integers(0, SIZES[name]), max_size=40))
    assert codec.decode(ids) == codec._tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_character_is_broken(text, size):
    codec = byte_level()
    deltas = _stream(codec, _chunks(codec.encode(text), size))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_an_answer_cut_inside_a_character_is_flushed_once(name):
    codec = CODECS[name]()
    first = 10 if name == "byte_fallback" else 0
    ids = [first + byte for byte in "a🚀".encode()[:-1]]
    stream = codec.stream()
    pushed = "".join(stream.push([i]) for i in ids)
    rest = stream.close()
    assert pushed + rest == codec.decode(ids)
    assert "\ufffd" not in pushed
    assert "\ufffd" in rest
    assert stream.close() == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_invalid_bytes_do_not_hold_the_stream(name):
    """A byte that begins nothing comes out at once, and those behind it do too."""
    codec = CODECS[name]()
    first = 10 if name == "byte_fallback" else 0
    stream = codec.stream()
    assert stream.push([first + 0xFF]) == "\ufffd"
    assert stream.push([first + 0xFE]) == "\ufffd"


def test_complete_text_is_not_held_back():
    stream = byte_level().stream()
    assert [stream.push([byte]) for byte in "é!".encode()] == ["", "é", "!"]


def test_special_tokens_have_no_text():
    codec = byte_level()
    end = 256
    assert codec.token(end) == "<|end|>"
    assert codec.decode([104, 105, end]) == "hi"
    assert codec.stream().push([104, end, 105]) == "hi"
    assert codec.decode([257]) == "<täg x>"
    assert codec.token(10**6) is None


TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ '[' + message['role'] + '] ' }}{% generation %}{{ message['content'] | tojson }}{% endgeneration %}

{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}
"""


def _codec(template: str | None, post_bos: bool = False) -> TextCodec:
    tokenizer = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    if post_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<|end|> $A", special_tokens=[("<|end|>", 256)]
        )
    return TextCodec(tokenizer, template, TokenizerInfo(special={"bos_token": "<|end|>"}, bos_token_id=256))


MESSAGES = [{"role": "system", "content": "Sei nett."}, {"role": "user", "content": "<b>ü & \"'\n</b>"}]


def test_a_template_renders_as_transformers_renders_it():
    transformers = pytest.importorskip("transformers")
    codec = _codec(TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=codec._tokenizer, bos_token="<|end|>")
    for messages in (MESSAGES, MESSAGES * 3):
        text = theirs.apply_chat_template(
            messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
        )
        assert codec.render(messages) == text
        assert "ü" in text


@pytest.mark.parametrize("post_bos", [False, True])
def test_a_chat_begins_with_one_bos(post_bos):
    """Whether the template writes it, the tokenizer adds it, or both."""
    codec = _codec(TEMPLATE, post_bos)
    ids = codec.encode_prompt("hi", chat=True)
    assert ids[0] == 256
    assert ids.count(256) == 1
    plain = codec.encode("<|end|>hi")
    assert plain == [256, *b"hi"]
    assert codec.encode("hi") == ([256] if post_bos else []) + [*b"hi"]


def test_a_system_message_goes_first():
    codec = _codec("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    assert codec.decode(codec.encode_chat("q", system="s")) == "system=s;user=q;"
    assert codec.decode(codec.encode_chat(MESSAGES[1:], system="")) == "system=;user=<b>ü & \"'\n</b>;"


def test_what_a_template_refuses_is_told():
    codec = _codec(TEMPLATE)
    with pytest.raises(RequestError, match=r"chat template: refuses these messages \(no tools here\)"):
        codec.render([{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="refuses"):
        codec.render([{"role": "user"}])  # no content: tojson of something undefined


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_cannot_reach_out(template):
    with pytest.raises(RequestError, match="refuses"):
        _codec(template).render([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_template():
    with pytest.raises(BundleError, match=r"chat template: line 2: .*; export again"):
        _codec("a\n{% if %}")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt, chat):
    with pytest.raises(RequestError, match="expected some text"):
        _codec(TEMPLATE).encode_prompt(prompt, chat)


def test_a_prompt_that_is_not_unicode_is_refused():
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level().encode_prompt("a\udcff", chat=False)


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(RequestError, match="--no-chat"):
        byte_level().encode_prompt("hi", chat=True)
    with pytest.raises(RequestError, match="only a chat has one"):
        byte_level().encode_prompt("hi", chat=False, system="s")


def test_a_bundle_without_a_tokenizer(tmp_path):
    with pytest.raises(RequestError, match="give token ids"):
        TextCodec.from_bundle(tmp_path, TokenizerInfo())


def test_a_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(BundleError, match=r"tokenizer\.json: cannot be read"):
        TextCodec.from_bundle(tmp_path, TokenizerInfo("tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer"):
        TextCodec.from_bundle(tmp_path, TokenizerInfo("tokenizer.json"))


@pytest.fixture(scope="module")
def smollm(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    from dflash_deploy.exporter.checkpoint import checkpoint_from_source
    from dflash_deploy.exporter.tokenizer import tokenizer_to_bundle

    folder = tmp_path_factory.mktemp("tokenizer")
    info = tokenizer_to_bundle(checkpoint_from_source(str(demo_target)), folder)
    assert info.special["eos_token"] == "<|im_end|>"
    assert info.bos_token_id == 1
    return TextCodec.from_bundle(folder, info)


@pytest.fixture(scope="module")
def theirs(demo_target: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(demo_target.parent), gguf_file=demo_target.name)


def test_the_demos_prompts_have_the_references_ids(smollm):
    reference = json.loads(demo_reference().read_text(encoding="utf-8"))
    assert len(reference["prompts"]) == 20
    for item in reference["prompts"]:
        assert smollm.encode_prompt(item["prompt"], chat=True) == item["prompt_ids"]
        for size in (1, 3, 8):
            deltas = _stream(smollm, _chunks(item["greedy_ids"], size))
            assert "".join(deltas) == smollm.decode(item["greedy_ids"])


def test_smollm_is_as_transformers_has_it(smollm, theirs):
    chats = [[{"role": "user", "content": text}] for text in TEXTS] + [
        [*MESSAGES, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "und?"}]
    ]
    for chat in chats:
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert smollm.encode_chat(chat) == ids
        assert smollm.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for text in TEXTS:
        assert smollm.encode(text) == theirs(text)["input_ids"]
        assert "".join(_stream(smollm, _chunks(smollm.encode(text), 1))) == text
