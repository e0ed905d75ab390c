"""A conversation in a service: its requests reuse what they have in common with the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..bundle.errors import RequestError
from .request import MAX_NEW_TOKENS, Prompt, Request, RequestOptions, request_from_call
from .text import Message
from .ticket import Entry, Ticket

if TYPE_CHECKING:
    from .service import Service


class Session:
    """Requests one after the other. What one has in common with the last is not computed again.

    For one thread at a time, but for `close`, which any may call. Dropping it closes it.

    Attributes:
        messages: the conversation that `send` keeps. Edit it as you like between requests.
    """

    def __init__(self, service: Service, key: int):
        self._service = service
        self._key = key
        self._closed = False
        # Not tickets: to drop a ticket cancels its request, and that is its reader's to decide.
        self._last: Entry | None = None
        self._answer: Entry | None = None  # to the message that `send` added last
        self._asked: Message | None = None
        self.messages: list[Message] = []

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        wait_s: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Ticket:
        """Submit the whole conversation so far; see `Service.submit`. `messages` are not touched.

        Right behind a cancelled request it waits for the end of it, which is a round away.

        Raises:
            RequestError: the request before it has not ended, or the session is closed.
        """
        request = request_from_call(Session.submit, prompt, max_new_tokens, options)
        return self._submit(request, deadline_s, wait_s)

    def send(
        self,
        text: str,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        wait_s: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Ticket:
        """Add a user's message to the conversation and ask for the answer; see `submit`.

        What was delivered of the last answer is added to the conversation first.
        """
        self._check_idle()
        asked: Message = {"role": "user", "content": text}
        messages = [*self.settled(), asked]
        request = request_from_call(Session.send, messages, max_new_tokens, options)
        ticket = self._submit(request, deadline_s, wait_s)
        self.messages, self._asked, self._answer = messages, asked, self._last
        return ticket

    def settled(self) -> Sequence[Message]:
        """The conversation with the last answer in it, as far as it was delivered."""
        answer = self._answer
        if answer is not None and answer.ended:
            if answer.result is not None:
                self.messages = [*self.messages, {"role": "assistant", "content": answer.result.text}]
            elif self.messages and self.messages[-1] is self._asked:
                self.messages = self.messages[:-1]  # it failed, and what it was asked is not answered
            self._answer = None
        return self.messages

    def close(self) -> None:
        """Cancel what runs, and free what is kept. Harmless twice."""
        self._closed = True
        if self._last is not None:
            self._service._cancel(self._last)
        self._service._forget(self._key)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # May run anywhere, also where a lock is held: what is kept is freed later, by somebody else.
        self._service._dropped.append(self._key)

    def _check_idle(self) -> None:
        if self._closed:
            raise RequestError("session: is closed; begin another")
        if self._last is not None and not self._last.ended:
            if not self._last.cancelled:
                raise RequestError("session: its last request has not ended; read it to its end or cancel it")
            self._service._wait_for_end(self._last)

    def _submit(self, request: Request, deadline_s: float | None, wait_s: float) -> Ticket:
        self._check_idle()
        entry = self._service._entry(request, self._key, deadline_s, wait_s)
        self._last = entry  # before it is in the queue: `close` may come at any time
        try:
            self._service._queue.join(entry, wait_s)
        except BaseException:
            self._last = None
            raise
        return Ticket(entry, self._service._cancel)
