"""What end-to-end tests take for the same answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.live import Answer
from support.scores import NOISE, Step, assert_same


@dataclass(frozen=True)
class Said:
    steps: tuple[Step, ...]

    @property
    def gist(self) -> tuple[str]:
        return ("".join(step.token for step in self.steps),)


FIRST = Step(" a", {" a": -1.0, " b": -3.0})
CLOSE = Step(" c", {" c": -2.0, " d": -2.0 - NOISE / 2})
LAST = Step(" e", {" e": -1.5, " f": -2.5})
REFERENCE = Said((FIRST, CLOSE, LAST))


def moved(step: Step, by: float) -> Step:
    return Step(step.token, {token: score + by for token, score in step.scores.items()})


@pytest.mark.parametrize(
    "answer",
    [
        Said((FIRST, CLOSE, LAST)),
        Said((FIRST, moved(CLOSE, NOISE / 2), LAST)),
        # Either of two that are as good as equal; what follows is another text.
        Said((FIRST, Step(" d", {" d": -2.0, " c": -2.0 - NOISE / 2}), Step(" z", {" z": -9.0}))),
    ],
)
def test_equal_answers_are_equal(answer: Said) -> None:
    assert_same(answer, REFERENCE)


@pytest.mark.parametrize(
    "answer",
    [
        Said(()),
        Said((FIRST, CLOSE)),
        Said((FIRST, CLOSE, LAST, LAST)),
        Said((Step(" b", {" b": -1.0, " a": -3.0}), CLOSE, LAST)),
        Said((FIRST, Step(" z", {" z": -2.0}), LAST)),
        # Not as good as equal for the one that said it.
        Said((FIRST, Step(" d", {" d": -0.1, " c": -4.0}), LAST)),
        Said((FIRST, Step(" d", {" d": -2.0, " c": -4.0}), LAST)),
        # The same tokens, found for other reasons: wrong KV.
        Said((moved(FIRST, 2 * NOISE), CLOSE, LAST)),
        Said((FIRST, CLOSE, moved(LAST, -2 * NOISE))),
    ],
)
def test_other_answers_are_not(answer: Said) -> None:
    with pytest.raises(AssertionError):
        assert_same(answer, REFERENCE)


def test_both_endpoints_and_streams_tell_the_same_steps() -> None:
    content = [
        {"token": " a", "logprob": -1.0, "top_logprobs": [{"token": " b", "logprob": -3.0}]},
        {"token": " e", "logprob": -1.5, "top_logprobs": [{"token": " e", "logprob": -1.5}]},
    ]
    table = {"tokens": [" a", " e"], "token_logprobs": [-1.0, -1.5], "top_logprobs": [{" b": -3.0}, {" e": -1.5}]}
    expected = [Step(" a", {" a": -1.0, " b": -3.0}), Step(" e", {" e": -1.5})]
    chat = {"choices": [{"index": 0, "logprobs": {"content": content}}]}
    completion = {"choices": [{"index": 0, "logprobs": table}, {"index": 1, "logprobs": table}]}
    stream = [{"choices": [{"index": 0, "logprobs": {"content": [each]}}]} for each in content]
    for body in (chat, completion, [*stream, {"choices": []}, {"choices": [{"index": 0, "logprobs": None}]}]):
        assert Answer(200, body, b"").steps == expected
