"""Clients of a run of churn that hold conversations: streamed and whole answers, and some that leave in the middle."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.answers import chat_ids, expected_answer, normal_text
from kvshuttle.bench.churn_load import judged
from kvshuttle.bench.churn_plan import MODES
from kvshuttle.bench.churn_records import AskRecord, Client, How
from kvshuttle.bench.systems import MODEL_NAME
from kvshuttle.bench.talk import API_KEY
from kvshuttle.bench.texts import emulated_words
from kvshuttle.clock import now_s
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.bench.churn_records import Journal

Messages = list[dict[str, str]]
_PATIENCE_S = 120.0
_PAUSE_AFTER_FAILURE_S = 1.0
_WHOLE_PART = 0.4
_AGAIN_PART = 0.7
"""How often a client asks again after a turn failed or was left, and does not begin anew."""
_DETAIL_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Manner:
    """How one turn is asked. ``leaves_after``: pieces of a stream after which the client leaves; 0 for never."""

    request_id: str
    mode: str
    is_streamed: bool
    leaves_after: int = 0
    turn: int = 1


class Asker:
    """The unmodified OpenAI client, and a judge of its answers. Raises ``ConfigError`` without the package."""

    def __init__(self, url: str, began_at_s: float) -> None:
        try:
            import httpx
            import openai
        except ImportError as error:
            raise ConfigError("bench churn: it takes the package openai, which comes with vLLM") from error
        self._openai = openai
        # What is no JSON where JSON must be is a ValueError, as it comes.
        self._failures = (openai.OpenAIError, httpx.HTTPError, ValueError)
        self._timeouts = (openai.APITimeoutError, httpx.TimeoutException)
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=_PATIENCE_S)
        self._began_at_s = began_at_s

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def ask(self, messages: Messages, num_tokens: int, manner: Manner, *, client: Client) -> tuple[AskRecord, str]:
        """One turn: what became of it, and the text that came. Nothing that an engine or the router does is raised."""
        sent_s = now_s() - self._began_at_s
        pieces: list[str] = []
        status, detail, usage, how = 200, "", None, None
        try:
            answer = self._create(messages, num_tokens, manner)
            how, usage = self._read(answer, manner, pieces)
        except self._failures as error:
            how, status, detail = self._failure(error, pieces)
        text = normal_text("".join(pieces))
        ids = chat_ids(messages)
        found = judged(text, expected_answer(ids, num_tokens), is_whole=how is How.RIGHT)
        if found is How.WRONG:
            how, detail = How.WRONG, f"{detail} {text[:60]}".strip()
        elif how is How.RIGHT and usage != (len(ids), num_tokens):
            how, detail = How.WRONG, f"usage says {usage} tokens, it was {(len(ids), num_tokens)}"
        record = AskRecord(
            client=client,
            request_id=manner.request_id,
            sent_s=sent_s,
            ended_s=now_s() - self._began_at_s,
            how=how,
            mode=manner.mode,
            is_streamed=manner.is_streamed,
            turn=manner.turn,
            status=status,
            num_tokens=len(text.split()),
            detail=detail[:_DETAIL_CHARACTERS],
        )
        return record, text

    def _create(self, messages: Messages, num_tokens: int, manner: Manner) -> Any:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if manner.is_streamed else {}
        return self._client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=num_tokens,
            temperature=0,
            stream=manner.is_streamed,
            extra_headers={"x-kvshuttle-mode": manner.mode, "x-request-id": manner.request_id},
            **options,
        )

    def _read(self, answer: Any, manner: Manner, pieces: list[str]) -> tuple[How, tuple[int, int] | None]:
        """Take the answer in. ``RIGHT`` when it came to what its client takes for its end, whatever is in it."""
        if not manner.is_streamed:
            pieces.append(answer.choices[0].message.content or "")
            return How.RIGHT, (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        usage = None
        for chunk in answer:
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                pieces.append(piece)
            if manner.leaves_after and len(pieces) >= manner.leaves_after:
                answer.close()
                return How.LEFT, None
        return How.RIGHT, None if usage is None else (usage.prompt_tokens, usage.completion_tokens)

    def _failure(self, error: Exception, pieces: Sequence[str]) -> tuple[How, int, str]:
        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError):
            return How.WRONG, 0, detail
        if isinstance(error, self._openai.APIStatusError):
            return How.ERROR, error.status_code, detail
        if isinstance(error, self._timeouts):
            return How.SILENT, 0, detail
        if isinstance(error, self._openai.APIConnectionError) and not pieces:
            return How.REFUSED, 0, detail
        return How.CUT, 0, detail


@dataclass(slots=True)
class Talker:
    """One client that holds one conversation after the other."""

    plan: ChurnPlan
    number: int
    asker: Asker
    journal: Journal
    is_stopping: Callable[[], bool]
    pause: Callable[[float], object]
    num_asked: int = 0

    def run(self) -> None:
        """Until it is told to stop, and the present turn is over."""
        rng = random.Random(f"talk {self.plan.seed} {self.number}")
        while not self.is_stopping():
            self._converse(rng)

    def _converse(self, rng: random.Random) -> None:
        messages: Messages = []
        mode = rng.choice(MODES)
        for turn in range(1, rng.randint(1, self.plan.turns) + 1):
            messages.append({"role": "user", "content": emulated_words(rng, self.plan.turn_tokens)})
            text = self._turn(messages, mode, turn, rng)
            if text is None:
                return
            messages.append({"role": "assistant", "content": text})

    def _turn(self, messages: Messages, mode: str, turn: int, rng: random.Random) -> str | None:
        """Ask until there is an answer; None when the client gives up."""
        while not self.is_stopping():
            is_streamed = rng.random() >= _WHOLE_PART
            is_leaving = is_streamed and rng.random() < self.plan.leaving
            leaves_after = rng.randint(1, max(1, self.plan.output_tokens - 1)) if is_leaving else 0
            self.num_asked += 1
            manner = Manner(f"talk{self.number}-{self.num_asked}", mode, is_streamed, leaves_after, turn)
            record, text = self.asker.ask(messages, self.plan.output_tokens, manner, client=Client.TALK)
            self.journal.write(record)
            if record.how is How.RIGHT:
                return text
            if record.how is not How.LEFT:
                self.pause(_PAUSE_AFTER_FAILURE_S)
            if rng.random() >= _AGAIN_PART:
                return None
        return None
