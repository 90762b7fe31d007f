"""Passes a decode stream to the client, with flow control and deadlines, and ends it honestly.

A stream that dies after its first data event gets an error event, as OpenAI clients know it, and is then cut off
without ``[DONE]`` and without the last chunk, so that neither SSE nor HTTP readers can take it for whole. So does one
that the router itself cuts off when it stops, and one in which the engine itself tells of an error, in its own words.
One that dies after ``[DONE]`` was whole: the client has its answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvshuttle.router.exchange import FailureReason, LegError
from kvshuttle.router.openai import error_body
from kvshuttle.router.sse import EventTail, error_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.config import RouterConfig
    from kvshuttle.router.exchange import Exchange
    from kvshuttle.router.http_server import Responder
    from kvshuttle.router.http_text import Headers

_TOLD = "an error event in the stream"


class StreamRelay:
    """One stream from an exchange to a responder. ``on_done``: called when it is whole, before the client can know.

    ``put_right``: for ``EventTail``.
    """

    __slots__ = (
        "_config",
        "_deadline_at_s",
        "_exchange",
        "_last_at_s",
        "_loop",
        "_on_done",
        "_responder",
        "_tail",
        "_timer",
    )

    def __init__(
        self,
        exchange: Exchange,
        responder: Responder,
        config: RouterConfig,
        *,
        deadline_at_s: float,
        on_done: Callable[[], None],
        put_right: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._exchange = exchange
        self._responder = responder
        self._config = config
        self._deadline_at_s = deadline_at_s
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._tail = EventTail(put_right)
        self._last_at_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, headers: Headers, beginning: bytes) -> None:
        """Send the beginning and everything after it. Raises ``LegError`` after the client was told of a failure."""
        self._exchange.set_deadline(max(self._deadline_at_s - self._loop.time(), 0.0), "total")
        events = self._tail.feed(beginning)
        self._note_done()
        self._responder.start(200, headers, events)
        self._responder.watch_flow(self._exchange.pause, self._exchange.resume)
        self._arm(self._config.idle_timeout_s)
        try:
            self._refuse_error()
            await self._exchange.forward(self._on_data)
            rest = self._tail.rest()
            self._refuse_error(rest)
        except LegError as error:
            if self._tail.is_done:
                self._responder.finish()
                return
            if self._tail.error is not None:
                self._responder.abort()
                raise
            status = 504 if error.reason is FailureReason.TIMEOUT else 502
            self._break_off("The engine failed while it was answering.", status=status, kind="EngineFailedError")
            raise
        except asyncio.CancelledError:
            if self._responder.is_cut_off:
                self._break_off(
                    "The router stopped while it was answering.", status=503, kind="ServiceUnavailableError"
                )
            raise
        finally:
            self._responder.watch_flow(None, None)
            if self._timer is not None:
                self._timer.cancel()
        self._on_done()
        if rest:
            self._responder.write(rest)
        self._responder.finish()

    def _break_off(self, message: str, *, status: int, kind: str) -> None:
        body = error_body(message, status=status, kind=kind)
        separator = b"\n\n" if self._tail.is_torn else b""
        self._responder.write(separator + error_event(body))
        self._responder.abort()

    def _on_data(self, data: bytes) -> None:
        self._last_at_s = self._loop.time()
        events = self._tail.feed(data)
        self._note_done()
        if events:
            self._responder.write(events)
        if (error := self._tail.error) is not None:
            self._exchange.fail(FailureReason.STATUS, _TOLD, status=error.status)

    def _refuse_error(self, told: bytes = b"") -> None:
        """Raise ``LegError`` when the engine has told of one; ``told``: the rest of that, not sent yet."""
        error = self._tail.error
        if error is not None:
            if told:
                self._responder.write(told + b"\n\n")
            raise LegError(FailureReason.STATUS, _TOLD, status=error.status)

    def _note_done(self) -> None:
        if self._tail.is_done:
            # Clients stop reading here, and may have sent the next turn before the engine ends its body.
            self._on_done()

    def _arm(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._check_idle)

    def _check_idle(self) -> None:
        # One timer looks back at the last read: arming one per read would cost more than the read.
        idle_s = self._loop.time() - self._last_at_s
        if self._responder.is_paused:
            # The client is slow, not the engine; the server limits that.
            self._last_at_s = self._loop.time()
            self._arm(self._config.idle_timeout_s)
        elif idle_s >= self._config.idle_timeout_s:
            self._exchange.fail(FailureReason.TIMEOUT, "idle: no data in time")
        else:
            self._arm(self._config.idle_timeout_s - idle_s)
