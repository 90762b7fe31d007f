"""A prefill engine and a decode engine in this process, joined by a memory fabric and their real side channels."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvshuttle.handoff.params import DecodeLeg, Mode, Peer, PrefillLeg, PrefillResult, parse_result, to_params
from kvshuttle.transport.memory import MemoryFabric, MemoryTransport
from support.checked_model import answer
from support.vllm_engine import Engine, EngineOptions, run_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

PROMPT = [100 + index for index in range(70)]
"""Four full blocks and a partial one."""

PATIENT: Mapping[str, Any] = {
    "acquire_timeout_s": 10.0,
    "lease_s": 15.0,
    "read_timeout_s": 10.0,
    "submit_margin_s": 0.1,
}
"""No deadline passes by accident on a busy machine; tests of deadlines shorten the one they are about."""


class EnginePair:
    """``source`` holds, ``sink`` reads. Keyword arguments are fields of ``EngineOptions``, for either."""

    def __init__(
        self, directory: Path, *, source: Mapping[str, Any] | None = None, sink: Mapping[str, Any] | None = None
    ) -> None:
        self._directory = directory
        self.fabric = MemoryFabric()
        self._num_lives = 0
        self._engines: list[Engine] = []
        self.source = self.start("source", **(source or {}))
        self.sink = self.start("sink", **(sink or {}))
        self.card = self.source.card
        self._num_requests = 0

    def start(self, name: str, **fields: Any) -> Engine:
        """One more engine on the fabric; its agents are named ``<name><rank>.<life>``."""
        self._num_lives += 1
        life = self._num_lives
        options = EngineOptions(name, lambda rank: MemoryTransport(self.fabric, f"{name}{rank}.{life}"))
        options = replace(options, **{"extra": PATIENT, **fields})
        engine = Engine(options, self._directory)
        self._engines.append(engine)
        return engine

    def agent(self, engine: Engine, rank: int = 0) -> str:
        """The name of a rank's transport."""
        transport = engine.workers[rank]._worker._comm._transport
        return transport.name

    def kill(self, engine: Engine) -> None:
        """As kill -9: its transports and its sockets are gone, and it says nothing."""
        for rank in range(len(engine.workers)):
            self.fabric.crash(self.agent(engine, rank))
        engine.shutdown()
        self._engines.remove(engine)

    def restart_source(self) -> None:
        """Another life at the same address."""
        port = int(self.source.half.address.rpartition(":")[2])
        options = self.source.options
        self.kill(self.source)
        self.source = self.start(
            options.engine_id, num_ranks=options.num_ranks, extra={**options.extra, "side_channel_port": port}
        )
        self.card = self.source.card

    @contextlib.contextmanager
    def stopped(self, engine: Engine) -> Iterator[None]:
        """As SIGSTOP and SIGCONT: none of its threads goes on, what it has sent is not lost, and nobody is told."""
        goes_on, stood = threading.Event(), threading.Barrier(len(engine.workers) + 1)

        def stand(_: object) -> None:
            stood.wait()
            goes_on.wait()

        for worker in engine.workers:
            worker._worker._comm._submit(stand)
        stood.wait()
        try:
            # The side channel's thread waits for this lock before it answers anything that matters.
            with engine.half._lock:
                yield
        finally:
            goes_on.set()

    def shutdown(self) -> None:
        for engine in self._engines:
            engine.shutdown()

    # -- what the router does ---------------------------------------------------------------------

    def prefill(self, transfer_id: str, token_ids: Sequence[int] = PROMPT) -> PrefillResult | None:
        """The prefill leg, to its end."""
        request_id = self.begin_prefill(transfer_id, token_ids, Mode.PULL)
        run_until(lambda: self.source.has_finished(request_id), [self.source], "the prefill leg")
        self.source.step()  # tells the workers of the end, as vLLM's loop does before it blocks
        return parse_result(self.source.answers[request_id].kv_transfer_params)

    def begin_prefill(self, transfer_id: str, token_ids: Sequence[int] = PROMPT, mode: Mode = Mode.PUSH) -> str:
        """The prefill leg arrives; returns its request id."""
        request_id = self._request_id("prefill")
        self.source.add(request_id, token_ids, to_params(PrefillLeg(transfer_id, mode)))
        return request_id

    def leg(self, transfer_id: str, mode: Mode = Mode.PULL, **peer: str) -> dict[str, Any]:
        """Params of the decode leg. ``peer``: fields of the source to be wrong about."""
        source = Peer(self.source.half.address, self.card.engine_id, self.card.incarnation)
        return to_params(DecodeLeg(transfer_id, Peer(**{**_fields(source), **peer}), mode))

    def decode(
        self,
        transfer_id: str,
        token_ids: Sequence[int] = PROMPT,
        *,
        mode: Mode = Mode.PULL,
        max_tokens: int = 3,
        **fields: Any,
    ) -> str:
        """The decode leg arrives; returns its request id."""
        request_id = self._request_id("decode")
        self.sink.add(request_id, token_ids, self.leg(transfer_id, mode), max_tokens=max_tokens, **fields)
        return request_id

    def push(self, transfer_id: str, token_ids: Sequence[int] = PROMPT, **fields: Any) -> str:
        """Both legs of a push arrive at the same time; returns the decode leg's request id."""
        request_id = self.decode(transfer_id, token_ids, mode=Mode.PUSH, **fields)
        self.begin_prefill(transfer_id, token_ids)
        return request_id

    def finish(self, *request_ids: str) -> None:
        """Both engines run until the decode legs are answered, and the answers are the model's."""
        run_until(lambda: self.sink.has_finished(*request_ids), [self.sink, self.source], f"answers to {request_ids}")
        for request_id in request_ids:
            self.check_answer(request_id)

    def finish_alone(self, *request_ids: str) -> None:
        """The same, with the source standing still or dead."""
        run_until(lambda: self.sink.has_finished(*request_ids), [self.sink], f"answers to {request_ids}")
        for request_id in request_ids:
            self.check_answer(request_id)

    def check_answer(self, request_id: str) -> None:
        """Raise unless a request was answered as the model answers."""
        given = self.sink.answers[request_id]
        prompt = self.sink.prompts[request_id]
        assert given.finish_reason == "length"
        assert given.tokens == answer(prompt, len(given.tokens))

    # -- what must hold at the end ----------------------------------------------------------------

    def assert_drained(self) -> None:
        """Nothing is held, lent, read, waited for or kept back; every block is free, and both engines idle."""
        engines = [engine for engine in (self.source, self.sink) if engine in self._engines]
        run_until(lambda: all(is_drained(engine) for engine in engines), engines, f"{engines} to be drained")
        for engine in engines:
            status = engine.status()
            assert (status.num_held_blocks, status.num_holdings, status.num_leases) == (0, 0, 0)
            assert (status.num_running, status.num_waiting) == (0, 0)

    def _request_id(self, kind: str) -> str:
        self._num_requests += 1
        return f"{kind}-{self._num_requests}"


def is_drained(engine: Engine) -> bool:
    """Whether the engine owes nothing to anybody, asked without making it run."""
    half = engine.half
    is_whole = engine.status().num_free_blocks == engine.options.num_blocks - 1  # lets what has ended go, too
    with half._lock:
        tables = (half._reader._readings, half._reader._unsettled, half._reader._loads, half._legs, half._live_requests)
        is_empty = not any(tables) and not half._holder._quarantine and not half._holder._quarantine_soon
        is_empty &= half._pusher.is_drained
    worker_tables = [table for worker in engine.workers for table in vars_of_loads(worker)]
    comms = [worker._worker._comm for worker in engine.workers]
    is_empty &= not any(worker_tables) and not any(comm._reads._reads for comm in comms)
    # A worker hears with the next step that a source is over, so an idle one may remember some.
    is_empty &= not any(comm._writes._writes or comm._writes._writer._outboxes for comm in comms)
    is_empty &= all(comm._arrivals.is_drained for comm in comms)
    return is_whole and is_empty and engine.is_idle()


def vars_of_loads(worker: Any) -> tuple[Any, ...]:
    """The tables of a worker's ``Loads``."""
    loads = worker._worker._loads
    return loads._pending, loads._to_fail, loads._given_up


def _fields(peer: Peer) -> dict[str, str]:
    return {name: getattr(peer, name) for name in peer.__struct_fields__}
