"""Text to token ids and back: a bundle's tokenizer, its chat template, and streams of decoded text.

Needs `tokenizers` and jinja2 only. The template is rendered as transformers renders it, in a sandbox.

Two kinds of tokenizer decode differently, and a stream has to know which:

    bytes     byte-level BPE: every token is some bytes, and a text is their UTF-8 decoding. Exact per byte.
    window    everything else (SentencePiece style): a token's text depends on its neighbours, so new tokens
              are decoded behind the last few old ones and the old text is cut off.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle.errors import BundleError, RequestError
from ..bundle.files import safe_path
from ..bundle.manifest import TokenizerInfo

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

Message = Mapping[str, Any]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_TOKENS = 8
_REPLACEMENT = "\ufffd"


class TextCodec:
    """A bundle's tokenizer and chat template."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, info: TokenizerInfo | None = None
    ) -> None:
        """Use a tokenizer as it is.

        Args:
            tokenizer: the tokenizer.
            template: the chat template's source, None if the model has none.
            info: gives the template's named tokens and the id of the beginning-of-text token.

        Raises:
            BundleError: the template is not valid jinja2.
        """
        info = info or TokenizerInfo()
        self._tokenizer = tokenizer
        self._template = None if template is None else _compile(template)
        self._special_text = dict(info.special)
        self._bos = info.bos_token_id
        steps = _decoder_steps(tokenizer)
        self._bytewise = "ByteLevel" in steps
        self._fallback = "ByteFallback" in steps
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_bundle(cls, directory: Path, info: TokenizerInfo) -> TextCodec:
        """Load the tokenizer a manifest names.

        Raises:
            RequestError: the bundle has no tokenizer.
            BundleError: its files are missing or damaged.
        """
        if info.file is None:
            raise RequestError(
                "tokenizer: the bundle has none, so it cannot turn text into tokens; give token ids, or "
                "export again from a checkpoint that has a tokenizer.json"
            )
        from tokenizers import Tokenizer

        source = _read(directory, info.file)
        try:
            tokenizer = Tokenizer.from_str(source)
        except Exception as cause:  # tokenizers raises a bare Exception
            raise BundleError(f"{info.file}: not a tokenizer ({cause}); export again") from cause
        template = None if info.chat_template is None else _read(directory, info.chat_template)
        return cls(tokenizer, template, info)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, messages: Sequence[Message]) -> str:
        """Write a conversation in the model's own form, ready for the assistant's next answer.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "chat template: the bundle has none; send the prompt as plain text (`--no-chat`)"
            )
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_text,
            )
        except (
            Exception
        ) as cause:  # the template is code that came with the model: any failure is its refusal
            raise RequestError(f"chat template: refuses these messages ({cause})") from cause

    def encode_chat(self, messages: str | Sequence[Message], system: str | None = None) -> list[int]:
        """Turn a conversation, or one user message, into token ids.

        Args:
            messages: objects with ``role`` and ``content``; a text is one user message.
            system: a system message put before them; None leaves the template's own.
        """
        turns: list[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        )
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        # The template writes every special token itself, the first one included.
        return self._ids(self.render(turns), add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Turn plain text into token ids, with the special tokens the tokenizer puts around a text."""
        return self._ids(text, add_special_tokens=True)

    def encode_prompt(self, prompt: str, chat: bool, system: str | None = None) -> list[int]:
        """Turn a prompt into token ids, as a user's message or as plain text.

        Raises:
            RequestError: the prompt is empty, is not valid text, or the template refuses it.
        """
        if not prompt.strip():
            raise RequestError(f"prompt: got {prompt!r}, expected some text")
        if not chat and system is not None:
            raise RequestError("system message: only a chat has one; leave it out of a plain-text prompt")
        return self.encode_chat(prompt, system) if chat else self.encode(prompt)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as cause:
            raise RequestError(
                "prompt: is not valid Unicode text, it has half a character in it; where it comes from a "
                "terminal, check the terminal's encoding"
            ) from cause
        while len(ids) > 1 and ids[0] == ids[1] == self._bos:
            del ids[0]  # the text brought one, the tokenizer added another
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens have none."""
        if self._bytewise:
            return b"".join(map(self._token_bytes, ids)).decode("utf-8", "replace")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """Start a stream of text from token ids as they come."""
        return _ByteStream(self) if self._bytewise else _WindowStream(self)

    def token(self, token_id: int) -> str | None:
        """The token as the tokenizer writes it, or None for an id it does not have."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token is None else str(token)

    def _visible(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i not in self._special and self.token(i) is not None]

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None or token_id in self._special:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token) if self._fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        table = _byte_table()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode("utf-8")  # an added token, written as plain text

    def _open_run(self, ids: Sequence[int]) -> bool:
        """Whether `ids` ends in byte tokens that later ones may still complete to a character.

        A run of byte tokens is decoded as a whole: to characters if all of it is valid, else to one
        replacement mark a byte. So an all-valid run is open however many characters it holds, and a run with
        an impossible byte in it is settled.
        """
        run = bytearray()
        for token_id in reversed(ids):
            byte = _BYTE_TOKEN.fullmatch(self.token(token_id) or "") if self._fallback else None
            if byte is None:
                break
            run.insert(0, int(byte[1], 16))
        try:
            codecs.getincrementaldecoder("utf-8")("strict").decode(bytes(run))
        except UnicodeDecodeError:
            return False
        return bool(run)

    def _ends_in_byte(self, ids: Sequence[int]) -> bool:
        return self._fallback and bool(ids) and _BYTE_TOKEN.fullmatch(self.token(ids[-1]) or "") is not None


class TextStream:
    """Text of tokens that arrive in pieces.

    What `push` and `close` return, joined, is `TextCodec.decode` of all ids: a character that is not
    complete yet is held back, and what is left at the end comes with `close`, once.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; give the text that is now certain, possibly none."""
        raise NotImplementedError

    def peek(self) -> str:
        """Give what `close` would give now, if that is whole characters; ends nothing."""
        raise NotImplementedError

    def close(self) -> str:
        """End the stream; give what was held back. A second call gives nothing."""
        raise NotImplementedError


class _ByteStream(TextStream):
    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._codec._token_bytes, ids)))

    def peek(self) -> str:
        return ""  # whole characters are given at once

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream(TextStream):
    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._context: list[int] = []  # already given out, decoded again only to be cut off
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._pending += self._codec._visible(ids)
        if self._codec._open_run(self._context + self._pending):
            return ""
        return self._flush()

    def peek(self) -> str:
        text = self._new_text()
        return "" if _REPLACEMENT in text else text

    def close(self) -> str:
        return self._flush()

    def _new_text(self) -> str:
        if not self._pending:
            return ""
        seen = len(self._codec.decode(self._context))
        return self._codec.decode(self._context + self._pending)[seen:]

    def _flush(self) -> str:
        if not self._pending:
            return ""
        text, window = self._new_text(), self._context + self._pending
        # A spoilt run of byte tokens goes on spoiling those behind it: its start has to stay in view.
        self._context = window if self._codec._ends_in_byte(window) else window[-_WINDOW_TOKENS:]
        self._pending = []
        return text


def _read(directory: Path, relative: str) -> str:
    try:
        return safe_path(directory, relative).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise BundleError(
            f"{relative}: cannot be read ({cause}); copy the bundle whole or export again"
        ) from cause


def _decoder_steps(tokenizer: Tokenizer) -> set[str]:
    """Kinds of the tokenizer's decoder: itself, or the members of a sequence."""

    def kinds(decoder: Any) -> set[str]:
        return {str(decoder["type"])}.union(*(kinds(step) for step in decoder.get("decoders", ())))

    return set() if tokenizer.decoder is None else kinds(json.loads(tokenizer.decoder.__getstate__()))


@functools.cache
def _byte_table() -> dict[str, int]:
    """Byte of each character that byte-level tokenizers write bytes as.

    Printable Latin-1 bytes stand for themselves, the others are numbered up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _compile(source: str) -> Template:
    """Compile a chat template the way transformers does; its result must be the same text."""
    import jinja2
    import jinja2.ext
    import jinja2.parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks assistant text for training; here its body is all there is."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as cause:
        raise BundleError(f"chat template: line {cause.lineno}: {cause.message}; export again") from cause
