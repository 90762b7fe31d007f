"""Real engines that keep what they answered, in pairs behind routers of their own, and a client as people have it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import openai

from kvshuttle.config import LauncherConfig
from kvshuttle.handoff.messages import Release, Renew, Renewed, Status, StatusReport
from kvshuttle.handoff.params import DecodeLeg, History, Keep, LocalLeg, Mode, Peer, PrefillLeg, to_params
from kvshuttle.ids import mint
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.plan import EngineSettings, FleetPlan, Role, plan_engines, plan_router, served_name
from support.live import MODEL_NAME, Live, difference, fresh_rng, live_engines, plan_plain, post
from support.lora import make_adapter
from support.scores import ASK_SCORES_CHAT, Step, steps_of
from support.side import ask_side

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from support.live import Answer

Message = dict[str, str]

MAX_MODEL_LEN = 8192
TTL_S = 9.0
"""How long ``prefill-1``, which stands in as a decode engine, keeps what it answered."""
NUM_SMALL_BLOCKS = 41
"""The pool of ``decode-1``, with the one that vLLM keeps for itself: 40 for requests, nine tenths of them for turns."""
COMPLETIONS = "/v1/completions"
ADAPTERS = ("ada", "bob")


@dataclass(frozen=True)
class Pair:
    """Engines behind one router: ``prefill`` computes, any of ``decodes`` answers."""

    prefill: str
    decodes: tuple[str, ...]
    router_args: tuple[str, ...] = ()


PAIRS = {
    "cold": Pair("prefill-0", ("decode-0",)),
    "warm": Pair("prefill-1", ("decode-0",)),
    "brief": Pair("prefill-0", ("prefill-1",), ("--history-ttl-s", str(TTL_S), "--history-margin-s", "0.1")),
    "small": Pair("prefill-0", ("decode-1",)),
    "either": Pair("prefill-0", ("decode-0", "decode-1")),
}
"""cold: P has no prefix cache; warm: it has; brief: kept for ``TTL_S``; small: D has few blocks; either: two D."""


@dataclass
class HistoryCluster:
    """All engines, and a router for each pair that is asked for."""

    live: Live
    config: LauncherConfig
    log_dir: Path
    _stack: contextlib.ExitStack
    _routers: dict[str, Fleet] = field(default_factory=dict)

    def behind(self, name: str) -> Live:
        """The pair as its router's clients see it."""
        pair = PAIRS[name]
        router = self.router(name)
        return replace(self.live, endpoint=router.endpoint, prefill_names=(pair.prefill,), decode_names=pair.decodes)

    def router(self, name: str) -> Fleet:
        """A fleet of nothing but the pair's router."""
        if name not in self._routers:
            fleet = Fleet(self._router_plan(name), env=os.environ, log_dir=self.log_dir / name, report=print)
            self._routers[name] = self._stack.enter_context(fleet)
            fleet.start(timeout_s=60)
        return self._routers[name]

    def _router_plan(self, name: str) -> FleetPlan:
        pair, fleet = PAIRS[name], self.live.fleet
        decodes = [replace(fleet.plan_of(each), role=Role.DECODE) for each in pair.decodes]
        config = replace(self.config, router_args=pair.router_args)
        port = next(free_ports(self.live.rng))
        return FleetPlan(
            fleet.plan.model_name,
            (),
            plan_router((fleet.plan_of(pair.prefill), *decodes), config, port, sys.executable),
        )


@contextlib.contextmanager
def history_cluster(model: Path, adapters_dir: Path, log_dir: Path) -> Iterator[HistoryCluster]:
    """Two prefill engines, two decode engines and a plain one, all with the same model in float32."""
    args = ("--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--enable-lora", "--max-lora-rank", "8")
    args += ("--max-loras", "2", "--lora-modules")
    args += tuple(f"{name}={make_adapter(model, adapters_dir / name, seed=seed)}" for seed, name in enumerate(ADAPTERS))
    config = LauncherConfig(
        port=0,
        dtype="float32",
        kv_cache_gib=1,
        max_model_len=MAX_MODEL_LEN,
        served_model_name=MODEL_NAME,
        engine_args=args,
    )
    rng = fresh_rng()
    ports = free_ports(rng)
    settings = [
        EngineSettings("prefill-0", Role.PREFILL, (*args, "--no-enable-prefix-caching")),
        EngineSettings("prefill-1", Role.PREFILL, args, {"decoder_kv_blocks_ttl": TTL_S}),
        EngineSettings("decode-0", Role.DECODE, args),
        EngineSettings(
            "decode-1",
            Role.DECODE,
            (*args, "--num-gpu-blocks-override", str(NUM_SMALL_BLOCKS), "--max-model-len", "4096"),
        ),
    ]
    engines = plan_engines(settings, config, model, this_machine(), ports, sys.executable)
    plan = FleetPlan(served_name(config), engines)
    plain = plan_plain(config, model, ports, args)
    with live_engines(plan, plain, log_dir, rng) as live, contextlib.ExitStack() as stack:
        yield HistoryCluster(live, config, log_dir, stack)


# -- a client -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """One streamed answer, as the client library gives it."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None
    conversation: str
    steps: tuple[Step, ...]

    @property
    def gist(self) -> tuple[str, str, int, int]:
        """What must be equal between a disaggregated and a plain engine."""
        return self.text, self.finish_reason, self.num_prompt_tokens, self.num_completion_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_completion_tokens


class Client:
    """The OpenAI library, pointed at a server, and nothing else."""

    def __init__(
        self, url: str, *, api_key: str = "anybody", headers: Mapping[str, str] | None = None, model: str = MODEL_NAME
    ) -> None:
        self._model = model
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=120, default_headers=dict(headers or {})
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._openai.close()

    def say(self, messages: Sequence[Message], *, max_tokens: int = 16, **fields: Any) -> Reply:
        """The next turn, streamed."""
        raw = self._openai.chat.completions.with_raw_response.create(
            model=self._model,
            messages=list(messages),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **ASK_SCORES_CHAT,
            **fields,
        )
        parts, finish_reason, usage = [], "", None
        steps: list[Step] = []
        for chunk in raw.parse():
            usage = chunk.usage or usage
            steps += steps_of([chunk.model_dump()])
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                finish_reason = choice.finish_reason or finish_reason
        assert usage is not None
        details = usage.prompt_tokens_details
        return Reply(
            "".join(parts),
            finish_reason,
            usage.prompt_tokens,
            usage.completion_tokens,
            details.cached_tokens if details else None,
            raw.headers.get("x-kvshuttle-conversation", ""),
            tuple(steps),
        )


def user(text: str) -> Message:
    """What a person says."""
    return {"role": "user", "content": text}


def assistant(reply: Reply) -> Message:
    """What was answered, as the client sends it back."""
    return {"role": "assistant", "content": reply.text}


# -- accounts -----------------------------------------------------------------------------------------


@dataclass
class Work:
    """What engines did for the requests inside the context; filled at its end. By source, as ``Metrics.prompts``."""

    prefill: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def counted(live: Live, *, num_requests: int = 1) -> Iterator[Work]:
    """Count what a pair does for so many requests on its prefill engine; waits until that has ended them."""
    name = live.prefill_names[0]
    before, decode_before = live.metrics(name), _decode_prompts(live)
    work = Work()
    yield work
    deadline_at_s = time.monotonic() + 20
    while (after := live.metrics(name)).num_requests() < before.num_requests() + num_requests:
        assert time.monotonic() < deadline_at_s, f"{name} has not ended its legs"
        time.sleep(0.05)
    work.prefill = difference(after.prompts(), before.prompts())
    work.decode = difference(_decode_prompts(live), decode_before)


def _decode_prompts(live: Live) -> dict[str, float]:
    scrapes = [live.metrics(name).prompts() for name in live.decode_names]
    return {key: sum(scrape[key] for scrape in scrapes) for key in scrapes[0]}


def status_of(live: Live, name: str) -> StatusReport:
    """What an engine's side channel says, even while it computes."""
    report = ask_side(live.fleet.plan_of(name).side_address, Status())
    assert isinstance(report, StatusReport)
    return report


# -- past the router ----------------------------------------------------------------------------------


@dataclass
class ByHand:
    """Legs sent without a router, which would not send these."""

    live: Live
    prefill: Peer
    decode: Peer

    def keep(self, body: dict[str, Any]) -> str:
        """Have the decode engine answer alone and keep it; its handle."""
        handle = mint("turn")
        answer = post(self._decode_url, COMPLETIONS, body | _params(LocalLeg(keep=Keep(handle))))
        assert answer.status == 200, answer.raw
        return handle

    def ask(self, body: dict[str, Any], handle: str, **prefill_fields: Any) -> Answer:
        """Both legs, the first one with the history of ``handle``."""
        transfer_id = mint("xfer")
        leg = PrefillLeg(transfer_id, Mode.PULL, History(handle, self.decode))
        prefilled = post(self._prefill_url, COMPLETIONS, body | {"max_tokens": 1} | prefill_fields | _params(leg))
        assert prefilled.status == 200, prefilled.raw
        return post(self._decode_url, COMPLETIONS, body | _params(DecodeLeg(transfer_id, self.prefill)))

    def ask_each_alone(self, body: dict[str, Any]) -> list[Answer]:
        """The same, of each engine without any legs."""
        return [post(url, COMPLETIONS, body) for url in (self._prefill_url, self._decode_url)]

    def remaining_s(self, handles: Sequence[str]) -> tuple[float, ...]:
        """For how long each is kept yet; negative for what is gone. Renews none."""
        reply = ask_side(self.decode.address, Renew((), 0.001, tuple(handles)))
        assert isinstance(reply, Renewed)
        return reply.handles_remaining_s

    def release(self, handles: Sequence[str]) -> None:
        """Nobody wants these any more."""
        ask_side(self.decode.address, Release(handles=tuple(handles)))

    @property
    def _prefill_url(self) -> str:
        return self.live.engine_url(self.live.prefill_names[0])

    @property
    def _decode_url(self) -> str:
        return self.live.engine_url(self.live.decode_names[0])


def _params(leg: PrefillLeg | DecodeLeg | LocalLeg) -> dict[str, Any]:
    return {"kv_transfer_params": to_params(leg)}
