"""A conversation as its client has it: the unmodified OpenAI client, which sends the whole history each time."""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvshuttle.bench.turns_records import TurnRecord
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import WRONG_KV_TEXT
from kvshuttle.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvshuttle.bench.texts import Writer
    from kvshuttle.bench.turns_plan import TurnsPlan

API_KEY = "bench"
"""What the client shows; conversations belong to whoever shows the same."""
CONVERSATION_HEADER = "x-conversation-id"
"""By which a client may name its conversation, for routers that do not recognise it."""
_TIMEOUT_S = 600.0

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """``request_id`` and ``conversation``: what the router calls them. ``ttft_s``: -1 for an answer not streamed."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    total_s: float
    request_id: str
    conversation: str


class Client:
    """Asks one server. ``salt``: engines find nothing in their caches that was left under another one.

    ``is_streaming``: how answers are asked for. ``conversation``: what a header calls the conversation, "" for none.
    Raises ``ConfigError`` when the package ``openai`` is not here.
    """

    def __init__(self, url: str, model: str, *, salt: str, is_streaming: bool = True, conversation: str = "") -> None:
        try:
            import openai
        except ImportError as error:
            raise ConfigError("bench turns: it takes the package openai, which comes with vLLM") from error
        self._openai = openai
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=_TIMEOUT_S)
        self._is_streaming = is_streaming
        self._headers = {CONVERSATION_HEADER: conversation} if conversation else {}
        self._model = model
        self._salt = salt

    def ask(self, messages: Messages, *, max_tokens: int) -> Answer:
        """One turn at temperature 0. Raises ``TransportError`` when no whole answer comes."""
        common = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_headers": self._headers,
            "extra_body": {"cache_salt": self._salt},
        }
        try:
            return self._ask_streamed(common) if self._is_streaming else self._ask_whole(common)
        except self._openai.OpenAIError as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def _ask_streamed(self, common: dict[str, Any]) -> Answer:
        started_at_s = now_s()
        first_at_s = None
        pieces: list[str] = []
        usage: Any = None
        stream = self._client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first_at_s = first_at_s or now_s()
                pieces.append(piece)
        if usage is None:
            raise TransportError("the answer broke off")
        ended_at_s = now_s()
        ttft_s = (first_at_s or ended_at_s) - started_at_s
        return _answer("".join(pieces), usage, (ttft_s, ended_at_s - started_at_s), stream.response.headers)

    def _ask_whole(self, common: dict[str, Any]) -> Answer:
        started_at_s = now_s()
        raw = self._client.chat.completions.with_raw_response.create(**common, stream=False)
        completion = raw.parse()
        total_s = now_s() - started_at_s
        if not completion.choices or completion.usage is None:
            raise TransportError("the answer has no text, or no usage")
        return _answer(completion.choices[0].message.content or "", completion.usage, (-1.0, total_s), raw.headers)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def _answer(text: str, usage: Any, times_s: tuple[float, float], headers: Mapping[str, str]) -> Answer:
    return Answer(
        text=text,
        prompt_tokens=usage.prompt_tokens,
        answer_tokens=usage.completion_tokens,
        ttft_s=times_s[0],
        total_s=times_s[1],
        request_id=headers.get("x-request-id", ""),
        conversation=headers.get("x-kvshuttle-conversation", ""),
    )


@dataclass(slots=True)
class Talk:
    """One conversation, driven closed loop. ``names``: what the router has called it so far.

    ``began_at_s``: from when on turns are dated. ``is_stopping``: asked before each turn.
    """

    plan: TurnsPlan
    number: int
    write: Writer
    client: Client
    cell: str
    began_at_s: float
    is_stopping: Callable[[], bool]
    names: set[str] = field(default_factory=set)
    messages: Messages = field(default_factory=list)

    def run(self, on_turn: Callable[[TurnRecord], None]) -> list[TurnRecord]:
        """All turns, or those up to the first one that fails."""
        records: list[TurnRecord] = []
        for turn in range(1, self.plan.turns + 1):
            if self.is_stopping():
                break
            if records:
                time.sleep(self.plan.think_s)
            records.append(self._turn(turn))
            on_turn(records[-1])
            if records[-1].error:
                break
        return records

    def _turn(self, turn: int) -> TurnRecord:
        self.messages.append({"role": "user", "content": user_text(self.plan, self.number, turn, self.write)})
        record = TurnRecord(
            cell=self.cell,
            conversation=self.number,
            turn=turn,
            sent_at_s=now_s() - self.began_at_s,
            prompt_digest=digest_of(self.messages),
        )
        try:
            answer = self.client.ask(self.messages, max_tokens=self.plan.output_tokens)
        except TransportError as error:
            return msgspec.structs.replace(record, error=str(error))
        self.messages.append({"role": "assistant", "content": answer.text})
        self.names.add(answer.conversation)
        return msgspec.structs.replace(
            record,
            request_id=answer.request_id,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.answer_tokens,
            ttft_s=answer.ttft_s,
            total_s=answer.total_s,
            answer_digest=digest_of(answer.text),
            is_wrong=WRONG_KV_TEXT in answer.text,
        )


def user_text(plan: TurnsPlan, conversation: int, turn: int, write: Writer) -> str:
    """What is said in one turn: the same in every cell."""
    rng = random.Random(f"{plan.seed} {conversation} {turn}")
    return write(rng, plan.first_tokens if turn == 1 else plan.turn_tokens)


def digest_of(value: str | Sequence[dict[str, str]]) -> str:
    """Names a text, or messages, in records."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
