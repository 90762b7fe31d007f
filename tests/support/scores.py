"""Whether two answers are the same, by their tokens and by how likely each of them was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NOISE = 1e-3
"""Of log probabilities in float32. The shape of the batch that computes them moves them by 5e-7 mostly, 1.2e-4 at most
(4,600 tokens of the tiny model, eight requests at once against one at a time); wrong KV moves them by far more."""
ASK_SCORES_CHAT: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
ASK_SCORES_COMPLETION: dict[str, Any] = {"logprobs": 2}


@dataclass(frozen=True)
class Step:
    """One token of an answer, with the log probabilities of those that were most likely there, its own among them."""

    token: str
    scores: dict[str, float]

    @property
    def score(self) -> float:
        """The token's own log probability."""
        return self.scores[self.token]

    def is_as_good(self, token: str) -> bool:
        """Whether noise could have decided for ``token`` instead."""
        return abs(self.score - self.scores.get(token, -math.inf)) < NOISE


class Scored(Protocol):
    """An answer whose request asked for log probabilities."""

    @property
    def gist(self) -> tuple[Any, ...]:
        """Its text, and all else that must be the same."""

    @property
    def steps(self) -> Sequence[Step]:
        """Its tokens."""


def assert_same(answer: Scored, reference: Scored) -> None:
    """The tokens are the same, each as likely as in the reference.

    Where two tokens are as good as equal, for both, either is right, and what follows is another text.
    """
    assert answer.steps
    assert reference.steps
    for number, (step, expected) in enumerate(zip(answer.steps, reference.steps, strict=False)):
        assert abs(step.score - expected.scores.get(step.token, -math.inf)) < NOISE, (number, step, expected)
        if step.token != expected.token:
            assert expected.is_as_good(step.token), (number, step, expected)
            assert step.is_as_good(expected.token), (number, step, expected)
            return
    assert answer.gist == reference.gist


def steps_of(events: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """The tokens of choice 0 in a response's body, or in a stream's events, of either endpoint."""
    for event in events:
        for choice in event.get("choices", []):
            if choice["index"] == 0 and choice.get("logprobs"):
                yield from (
                    _of_chat(choice["logprobs"])
                    if "content" in choice["logprobs"]
                    else _of_completion(choice["logprobs"])
                )


def _of_chat(logprobs: dict[str, Any]) -> Iterator[Step]:
    for each in logprobs["content"] or []:
        scores = {other["token"]: other["logprob"] for other in each["top_logprobs"]}
        yield Step(each["token"], {**scores, each["token"]: each["logprob"]})


def _of_completion(logprobs: dict[str, Any]) -> Iterator[Step]:
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    for token, score, scores in zip(*columns, strict=True):
        yield Step(token, {**scores, token: score})
