"""Text of one request, up to a stop string.

A stop string may lie anywhere in the text: in one token, over tokens and blocks, and begin inside a token.
So the text is watched a character at a time, and what may still become a stop string is held back. The first
string to be complete ends the text; of two that end at the same character, the longer one. How the text was
cut into tokens and blocks makes no difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..bundle.errors import RequestError, field_error
from .text import TextStream

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000


def stop_strings_from(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Check the stop strings of a request; a lone string is one, None is none.

    Raises:
        RequestError: there are too many, or one is empty, too long or no text.
    """
    if given is None:
        return ()
    if not isinstance(given, Iterable):
        raise field_error(RequestError, "stop", given, "a string, or several")
    strings = (given,) if isinstance(given, str) else tuple(given)
    if len(strings) > MAX_STOP_STRINGS:
        raise field_error(RequestError, "stop", len(strings), f"at most {MAX_STOP_STRINGS} strings")
    for index, string in enumerate(strings):
        what = f"stop[{index}]"
        if not isinstance(string, str) or not string:
            raise field_error(RequestError, what, string, "a string of at least one character")
        if len(string) > MAX_STOP_LENGTH:
            raise field_error(
                RequestError, what, f"{len(string)} characters", f"at most {MAX_STOP_LENGTH} characters"
            )
    return strings


class TextWatch:
    """Text of tokens that arrive one by one, held back where it may become a stop string.

    What `take` and `close` return, joined, is the decoded text up to the stop string, or all of it.

    The text of byte tokens of a SentencePiece tokenizer is certain only with the token behind them, but it is
    watched at once: a newline that is such a token ends the text there and then. A special token has no text,
    so no stop string can match it.

    Attributes:
        stopped: the stop string that ended the text; None as long as none did.
    """

    def __init__(
        self,
        stream: TextStream | None,
        stop_strings: str | Sequence[str] | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin a text.

        Args:
            stream: new; None if there is no tokenizer, and then there is no text.
            stop_strings: see `stop_strings_from`.
            include_stop: let the text end behind the stop string and not before it.
            min_tokens: text of that many first tokens is no part of a stop string.

        Raises:
            RequestError: see `stop_strings_from`; or there is no text to stop on.
        """
        strings = stop_strings_from(stop_strings)
        if strings and stream is None:
            raise RequestError(
                "stop: the bundle has no tokenizer, so there is no text to stop on; give stop token ids"
            )
        self.stopped: str | None = None
        self._stream = stream
        self._include_stop = include_stop
        self._unwatched = min_tokens
        self._pushed = 0
        self._skipped = 0  # characters to come that belong to unwatched tokens
        self._root = self._state = _automaton(strings)
        self._text = ""  # not taken yet

    def push(self, token: int) -> bool:
        """Take a token; whether a stop string is complete with it. Then no other may follow."""
        if self.stopped is not None:
            raise ValueError(f"the text has ended with the stop string {self.stopped!r}")
        if self._stream is None:
            return False
        self._pushed += 1
        self._watch(self._stream.push([token]))
        if self.stopped is not None or not self._root.next:
            return self.stopped is not None
        held = self._stream.peek()
        if not self._watching:
            self._skipped = len(held)
        elif self._reaches_stop(held[self._skipped :]):
            self._watch(held)
        return self.stopped is not None

    def take(self) -> str:
        """Give the text that is certain to be before any stop string, and was not given yet."""
        held = 0 if self.stopped is not None else self._state.depth
        cut = len(self._text) - held
        text, self._text = self._text[:cut], self._text[cut:]
        return text

    def close(self) -> str:
        """End the text; give what is left. `stopped` may be set by it. A second call gives nothing."""
        if self._stream is not None and self.stopped is None:
            self._watch(self._stream.close())
        self._state = self._root
        return self.take()

    @property
    def _watching(self) -> bool:
        return self._pushed > self._unwatched

    def _reaches_stop(self, text: str) -> bool:
        state = self._state
        for char in text:
            state = state.after(char)
            if state.stop is not None:
                return True
        return False

    def _watch(self, text: str) -> None:
        if not self._watching:
            self._text += text
            return
        skipped = min(self._skipped, len(text))
        self._skipped -= skipped
        self._text, text = self._text + text[:skipped], text[skipped:]
        for index, char in enumerate(text):
            self._state = self._state.after(char)
            stop = self._state.stop
            if stop is not None:
                self.stopped = stop
                self._text += text[: index + 1]
                if not self._include_stop:
                    self._text = self._text[: len(self._text) - len(stop)]
                return
        self._text += text


@dataclass(eq=False, slots=True)
class _State:
    """The longest end of the text that begins a stop string (Aho and Corasick, 1975).

    Attributes:
        depth: its length.
        next: states one character further along a stop string.
        shorter: the state of the longest shorter such end; None at the root, which is for the empty one.
        stop: the longest stop string that the text ends with.
    """

    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None
    stop: str | None = None

    def after(self, char: str) -> _State:
        state = self
        while char not in state.next:
            if state.shorter is None:
                return state
            state = state.shorter
        return state.next[char]


def _automaton(strings: Sequence[str]) -> _State:
    root = _State(0)
    for string in strings:
        state = root
        for char in string:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.stop = string
    queue = deque([root])
    while queue:  # by depth: what is shorter is known before it is needed
        state = queue.popleft()
        for char, child in state.next.items():
            child.shorter = root if state.shorter is None else state.shorter.after(char)
            child.stop = child.stop or child.shorter.stop
            queue.append(child)
    return root
