"""Stop strings over tokens and blocks (case D02), with real tokenizers, and characters over tokens (D01)."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_deploy.bundle.errors import RequestError
from dflash_deploy.runtime.stops import TextWatch, stop_strings_from
from dflash_deploy.runtime.text import TextCodec, _byte_table


@functools.cache
def byte_level() -> TextCodec:
    """Single bytes, and merges that put stop strings inside of tokens, at their borders and across."""
    merges = [
        ("a", "a"),
        ("aa", "b"),
        ("E", "N"),
        ("EN", "D"),
        ("x", "E"),
        (".", "Ċ"),
        ("Ċ", "Ċ"),
        ("b", "c"),
    ]
    words = ["".join(pair) for pair in merges]
    vocab = dict(_byte_table()) | {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TextCodec(tokenizer)


WORDS = ["<unk>", "<s>", "▁", "▁a", "a", "aa", "aab", "b", "▁b", "xE", "N", "D", "END", ".", "▁END", "漢"]


@functools.cache
def sentencepiece() -> TextCodec:
    """Words with a space before, and single bytes for the rest: a newline is one of these."""
    pieces = WORDS + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return TextCodec(tokenizer)


CODECS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


def read(codec: TextCodec, ids, stops, block: int = 1, **options) -> tuple[str, int, list[str], str | None]:
    """What a reader gets who takes text behind each block: text, tokens used, deltas, and the stop."""
    watch = TextWatch(codec.stream(), stops, **options)
    deltas, used = [], 0
    for begin in range(0, len(ids), block):
        for token in ids[begin : begin + block]:
            used += 1
            if watch.push(token):
                break
        deltas.append(watch.take())
        if watch.stopped is not None:
            break
    deltas.append(watch.close())
    assert watch.close() == watch.take() == ""
    return "".join(deltas), used, deltas, watch.stopped


def expected(text: str, stops) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; of those that end together, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def byte_ids(text: str) -> list[int]:
    """One token a byte."""
    vocabulary = byte_level()._tokenizer.get_vocab()
    chars = {byte: char for char, byte in _byte_table().items()}
    return [vocabulary[chars[byte]] for byte in text.encode()]


def pieces(text: str) -> list[int]:
    """Tokens cut at the bars: merged tokens where there is one, else one a byte."""
    vocabulary = byte_level()._tokenizer.get_vocab()
    ids: list[int] = []
    for piece in text.split("|"):
        token = vocabulary.get(piece.replace("\n", "Ċ"))
        ids += byte_ids(piece) if token is None else [token]
    return ids


@pytest.mark.parametrize("block", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("cut", "stops", "text", "used"),
    [
        ("ok |END| more", ["END"], "ok ", 4),  # one token
        ("ok |E|N|D| more", ["END"], "ok ", 6),  # three tokens, over blocks
        ("ok |EN|D| more", ["END"], "ok ", 5),  # two
        ("ok|xE|N|D|x", ["END"], "okx", 5),  # begins inside a token
        ("one|.\n|\n|two", ["\n"], "one.", 4),  # inside a token
        ("one|\n\n|two", ["\n"], "one", 4),  # text of the same token is behind it
        ("one|.\n|\n|two", ["\n\n"], "one.", 5),
        ("aa|aab|!", ["aab"], "aa", 2),
        ("a|a|a|b|!", ["aab"], "a", 4),  # what was held back is let go in part
        ("aa|a|b|!", ["aab"], "a", 3),
        ("a|aa|b|c", ["aab"], "a", 3),
        ("a|a|a|a|c", ["aab"], "aaaac", 5),
        ("a|aa|bc", ["aab"], "a", 3),  # ends inside a token
        ("a|b|c|a|b|d", ["abd"], "abc", 6),
        ("x|a|b|c|y", ["bcz", "cy", "abd"], "xab", 5),  # several begin, one is it
        ("x|a|b|c|y", ["abcd", "bc"], "xa", 4),  # a short one inside a longer one
        ("x|a|b|c|y", ["c", "abc"], "x", 4),  # both end here: nothing of the longer one is sent
        ("x|a|b|c|y", ["cy", "b"], "xa", 3),  # the first to be complete, not the first in the list
        ("né🚀e", ["🚀"], "né", 7),  # a character of four tokens
        ("END", ["END"], "", 1),
        ("so EN", ["END"], "so EN", 5),  # the text ends first
    ],
)  # fmt: skip
def test_text_is_cut_exactly_before_the_stop(cut, stops, text, used, block):
    codec, ids = byte_level(), pieces(cut)
    got, pushed, deltas, stopped = read(codec, ids, stops, block)
    assert (got, pushed) == (text, used)
    assert (stopped in stops) is (text != codec.decode(ids))
    assert all(text.startswith("".join(deltas[:count])) for count in range(len(deltas)))
    with_stop, *_ = read(codec, ids, stops, block, include_stop=True)
    assert with_stop == text + (stopped or "")


def test_pieces_are_tokens_as_written():
    codec = byte_level()
    for cut in ("xE|N|D", "END", ".\n|\n", "\n\n", "aa|aab|bc"):
        assert "|".join(codec.decode([token]) for token in pieces(cut)) == cut


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_any_stops_any_blocks(name, data):
    """It ends with the first token whose text is enough, however tokens are cut into blocks."""
    codec = CODECS[name]()
    if name == "byte_level":
        pool = [*range(256, 265), *byte_ids("abcxEND.\n é"), 500]
    else:
        first = len(WORDS)
        pool = [*range(first), *(first + byte for byte in "\na\né".encode()), 999]
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=24))
    stops = data.draw(st.lists(st.text("abcxEND.\n é", min_size=1, max_size=4), max_size=4))
    # Told the other way round: decode every beginning as a whole.
    texts = [codec.decode(ids[:count]) for count in range(len(ids) + 1)]
    used = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), len(ids))
    text, stop = expected(texts[used], stops)
    for block in (1, 3, 50):
        got, pushed, _, stopped = read(codec, ids, stops, block)
        assert (got, pushed, stopped) == (text, used, stop)
        included, *_ = read(codec, ids, stops, block, include_stop=True)
        assert included == text + (stop or "")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    codec = byte_level()
    watch, out = TextWatch(codec.stream(), stops), ""
    for count, token in enumerate(byte_ids(text), 1):
        if watch.push(token):
            break
        out += watch.take()
        held = text[len(out) : count]
        assert out + held == text[:count]
        possible = [n for n in range(count + 1) if any(s.startswith(text[count - n : count]) for s in stops)]
        assert len(held) == max(possible)


def test_without_stops_all_text_goes_out_at_once():
    watch = TextWatch(byte_level().stream())
    deltas = []
    for token in byte_ids("aé🚀"):
        assert watch.push(token) is False
        deltas.append(watch.take())
    assert deltas == ["a", "", "é", "", "", "", "🚀"]
    assert watch.close() == ""


def test_an_answer_cut_inside_a_character_is_flushed_once():
    watch = TextWatch(byte_level().stream(), ["zz"])
    for token in byte_ids("az🚀")[:-1]:
        watch.push(token)
    assert watch.take() == "a"
    assert watch.close() == "z\ufffd"
    assert watch.close() == ""


def test_a_newline_that_is_a_byte_token_stops_at_once():
    """Its text would be certain only with the next token, whose text may not go out."""
    newline, a = len(WORDS) + ord("\n"), WORDS.index("a")
    watch = TextWatch(sentencepiece().stream(), ["\n"])
    assert [watch.push(token) for token in (a, newline)] == [False, True]
    assert watch.take() + watch.close() == "a"
    first = len(WORDS) + "é".encode()[0]
    watch = TextWatch(sentencepiece().stream(), ["\n"])
    assert [watch.push(token) for token in (a, first, newline, a)] == [False] * 4, "the run is not valid"
    assert watch.take() + watch.close() == "a\ufffd\ufffda"
    watch = TextWatch(sentencepiece().stream(), ["\ufffd"])
    assert not any(watch.push(len(WORDS) + byte) for byte in "é".encode()), "a character is not complete yet"
    assert watch.take() + watch.close() == "é"


def test_a_stop_may_appear_when_the_text_is_closed():
    """A replacement mark is a character too, and what is behind it does not go out."""
    codec = byte_level()
    watch = TextWatch(codec.stream(), ["\ufffd"])
    assert not any(watch.push(token) for token in byte_ids("aé")[:-1])
    assert watch.take() + watch.close() == "a"
    assert watch.stopped == "\ufffd"


def test_behind_a_stop_nothing_may_be_pushed():
    watch = TextWatch(byte_level().stream(), ["b"])
    assert watch.push(byte_ids("b")[0])
    with pytest.raises(ValueError, match="ended with the stop string 'b'"):
        watch.push(0)


def test_text_of_the_first_tokens_is_not_watched():
    codec = byte_level()
    text, used, _, stopped = read(codec, byte_ids("babab"), ["b"], min_tokens=3)
    assert (text, used, stopped) == ("baba", 5, "b")
    text, used, _, stopped = read(codec, byte_ids("xaab"), ["aab"], min_tokens=2)
    assert (text, used, stopped) == ("xaab", 4, None)
    text, *_, stopped = read(codec, byte_ids("b"), ["b"], min_tokens=1)
    assert (text, stopped) == ("b", None)
    newline = len(WORDS) + ord("\n")
    text, used, _, stopped = read(sentencepiece(), [newline] * 3, ["\n"], min_tokens=1)
    assert (text, used, stopped) == ("\n", 2, "\n")


def test_special_tokens_have_no_text_to_stop_on():
    codec = byte_level()
    end = codec._tokenizer.token_to_id("<|end|>")
    text, _, _, stopped = read(codec, [*byte_ids("a"), end, *byte_ids("b")], ["<|end|>", "ab"])
    assert (text, stopped) == ("", "ab")


def test_without_a_tokenizer_there_is_no_text():
    watch = TextWatch(None)
    assert watch.push(3) is False
    assert watch.take() == watch.close() == ""
    with pytest.raises(RequestError, match=r"stop: the bundle has no tokenizer.*give stop token ids"):
        TextWatch(None, ["a"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", r"stop\[0\]: got '', expected a string of at least one character"),
        (["a", ""], r"stop\[1\]: got ''"),
        ([3], r"stop\[0\]: got 3"),
        (["a"] * 17, "stop: got 17, expected at most 16 strings"),
        (["a" * 1001], r"stop\[0\]: got '1001 characters', expected at most 1000"),
    ],
)
def test_senseless_stop_strings_are_refused(given, message):
    with pytest.raises(RequestError, match=message):
        TextWatch(byte_level().stream(), given)


def test_a_lone_string_is_one_stop_string():
    assert stop_strings_from("END") == ("END",)
    assert stop_strings_from(None) == stop_strings_from([]) == ()
    assert len(stop_strings_from(["a" * 1000] * 16)) == 16
