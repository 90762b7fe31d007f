"""One client request on its way through the engines: what its legs share, whichever way they go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from kvshuttle.errors import RequestError, TransportError
from kvshuttle.ids import mint
from kvshuttle.router.exchange import FailureReason
from kvshuttle.router.http_text import CONVERSATION_HEADER, for_client
from kvshuttle.router.openai import scrub_answer
from kvshuttle.router.telemetry import Outcome, Plain, Stage

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable

    from kvshuttle.config import RouterConfig
    from kvshuttle.router.exchange import LegError
    from kvshuttle.router.http_server import Responder
    from kvshuttle.router.openai import InferenceRequest
    from kvshuttle.router.prober import Prober
    from kvshuttle.router.registry import Engine, Registry
    from kvshuttle.router.telemetry import Leg, Receipt, Telemetry
    from kvshuttle.router.turns import Turn


@dataclass(frozen=True, slots=True)
class Routing:
    """What all requests of one router share. ``late_legs``: prefill legs of pushes, some longer than their requests."""

    config: RouterConfig
    registry: Registry
    prober: Prober
    telemetry: Telemetry
    rng: random.Random
    now_s: Callable[[], float]
    late_legs: set[asyncio.Task[object]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True)
class Dispatch:
    """A prefill leg that was sent. ``is_running``: it may still end after a release of its handle arrives.

    ``num_cached_tokens``: how much of the prompt it did not compute, as it says in its answer; None until then.
    """

    engine: Engine
    transfer_id: str
    is_running: bool = True
    num_cached_tokens: int | None = None


class LegFailed(TransportError):
    """A leg did not bring an answer, and the client has seen nothing of the request."""

    def __init__(self, leg: Leg, engine: Engine, error: LegError) -> None:
        super().__init__(str(error))
        self.leg = leg
        self.engine = engine
        self.error = error


class Trip:
    """State of one request. ``avoid``: engines that failed it. ``is_over``: its receipt is closed."""

    def __init__(
        self,
        routing: Routing,
        request: InferenceRequest,
        turn: Turn,
        *,
        headers: bytes,
        responder: Responder,
        receipt: Receipt,
    ) -> None:
        self.turn = turn
        self.routing = routing
        self.config = routing.config
        self.request = request
        self.headers = headers
        self.responder = responder
        self.receipt = receipt
        self.deadline_at_s = routing.now_s() + routing.config.total_timeout_s
        self.avoid: set[str] = set()
        self.is_over = False
        self.prefilled_at_s = 0.0
        self._dispatch: Dispatch | None = None

    def dispatch(self, engine: Engine) -> Dispatch:
        """A prefill leg is about to be sent, under a transfer id that was never used."""
        self.prefilled_at_s = 0.0
        self._dispatch = Dispatch(engine, mint("xfer"))
        return self._dispatch

    def prefilled(self, duration_s: float) -> None:
        """The prefill leg was answered ``duration_s`` after it was sent; perhaps later than the client."""
        self.prefilled_at_s = self.routing.now_s()
        if self.is_over:
            self.routing.telemetry.took(self.receipt.mode, Stage.PREFILL, duration_s)
        else:
            self.receipt.stages_s[Stage.PREFILL] = duration_s

    def release(self) -> None:
        """Give back what the last prefill leg may hold, if it was sent and nobody will fetch it. Idempotent."""
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is not None:
            self.routing.telemetry.count(Plain.RELEASES)
            self.routing.prober.release(dispatch.engine, dispatch.transfer_id, is_again=dispatch.is_running)

    def keep(self) -> None:
        """There is nothing to give back: the prefill engine has refused."""
        self._dispatch = None

    def answer(self, answer: Answer) -> None:
        """Send an engine's whole answer, without anything internal. Nobody fetches for one that is an error."""
        if answer.status < 400:
            self.turn.answered()
        else:
            self.turn.close(is_cut_off=False)
            self.receipt.outcome = Outcome.CLIENT_ERROR if answer.status < 500 else Outcome.UNAVAILABLE
            self.release()
        self.responder.send(answer.status, self.client_headers(answer.headers), scrub_answer(answer.body))

    def client_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """An engine's headers as the client gets them."""
        own = [(b"x-request-id", self.receipt.request_id.encode())]
        if self.turn.name:
            own.append((CONVERSATION_HEADER, self.turn.name.encode()))
        return [*for_client(headers), *own]

    def note_failure(
        self, leg: Leg, engine: Engine, reason: FailureReason, *, where: str = "", is_engines: bool = True
    ) -> None:
        """Count a failed leg and, where the engine is to blame, look at it."""
        self.receipt.failures.append(f"{where or leg}:{engine.name}:{reason}")
        self.routing.telemetry.failed(leg, reason)
        if is_engines and reason is not FailureReason.CAPACITY:
            self.routing.registry.report_failure(engine, reason)

    def give_up(self, status: int, message: str) -> NoReturn:
        """Raise ``RequestError``: no engine could serve the request."""
        self.receipt.outcome = Outcome.UNAVAILABLE
        raise RequestError(message, status=status)

    def within_total(self, timeout_s: float) -> float:
        """``timeout_s`` or what is left of the request's time. Raises ``RequestError`` when nothing is."""
        remaining_s = self.deadline_at_s - self.routing.now_s()
        if remaining_s <= 0:
            self.release()
            self.give_up(504, "The request took longer than the router's total time limit.")
        return min(timeout_s, remaining_s)
