"""Looks at running engines from outside: who they are, what they hold, what they have counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.router_calls import fetch_json
from kvshuttle.clock import now_s
from kvshuttle.config.checks import is_int
from kvshuttle.errors import TransportError
from kvshuttle.handoff.messages import PROTOCOL_VERSION, Hello, HelloAck, Message, Refused
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import total_of
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.launcher.plan import ProcessPlan

_HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Pool:
    """An engine's KV memory. ``block_len_bytes``: of one block, all layers and ranks together."""

    num_blocks: int
    block_size_tokens: int
    block_len_bytes: int


def card_of(side_address: str) -> EngineCard:
    """Who listens there, asked over the side channel as a router does. Raises ``TransportError``."""
    endpoint: Endpoint[Message] = Endpoint(
        codec=MessageCodec(), secret=None, sender="bench", handler=lambda _: Refused("a benchmark"), now_s=now_s
    )
    thread = SideChannelThread(endpoint)
    thread.start()
    try:
        hello = Hello(protocol_version=PROTOCOL_VERSION, sender="bench")
        reply = asyncio.run(thread.request_async(side_address, hello, timeout_s=_HELLO_TIMEOUT_S))
    finally:
        thread.stop(timeout_s=_HELLO_TIMEOUT_S)
    if not isinstance(reply, HelloAck):
        raise TransportError(f"{side_address}: answered {reply!r} to a hello")
    return reply.card


def pool_of(card: EngineCard) -> Pool:
    """The KV memory that an engine has registered."""
    regions = [region for worker in card.workers for region in worker.regions]
    return Pool(
        num_blocks=min(region.num_blocks for region in regions),
        block_size_tokens=card.fingerprint.block_size_tokens,
        block_len_bytes=sum(region.block_len_bytes for region in regions),
    )


def model_of(url: str) -> str:
    """The first model that an engine serves. Raises ``PeerUnreachable``."""
    return str(_model_of(url).get("id", ""))


def max_model_len_of(url: str) -> int:
    """The longest prompt with its answer that the same model takes; 0 where it does not say."""
    length = _model_of(url).get("max_model_len")
    return int(length or 0) if is_int(length) else 0


def _model_of(url: str) -> dict[str, Any]:
    models = fetch_json(url, "/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else {}
    return first if isinstance(first, dict) else {}


def total_over(engines: Sequence[ProcessPlan], series: str) -> float:
    """The sum of a series over all engines. Raises ``PeerUnreachable``."""
    return sum(total_of(fetch_metrics(engine.url), series) for engine in engines)


def save_metrics(out_dir: Path, name: str, engines: Sequence[ProcessPlan]) -> None:
    """What the engines' connectors counted themselves, for a look behind the figures of ``name``."""
    directory = out_dir / "metrics"
    directory.mkdir(exist_ok=True)
    for engine in engines:
        lines = [
            line
            for line in fetch_metrics(engine.url).splitlines()
            if line.startswith(("kvshuttle:", "vllm:nixl", "vllm:corrupted", "vllm:num_preemptions"))
        ]
        (directory / f"{name}-{engine.name}.txt").write_text("\n".join(lines) + "\n")
