"""What emulated engines answer follows from tokens, and those from texts, without asking an engine."""

from __future__ import annotations

import json
import random

import pytest

from kvshuttle.bench.answers import chat_ids, expected_answer, normal_text, text_ids
from kvshuttle.bench.churn_load import Window, asks_of, judged, prompt_text, window_prompts
from kvshuttle.bench.churn_plan import ChurnPlan
from kvshuttle.bench.churn_records import NOT_OVER, How
from kvshuttle.bench.load import LoadResult
from kvshuttle.bench.texts import emulated_words
from kvshuttle.emulate.model_dir import tokenizer

MESSAGES = [
    {"role": "user", "content": emulated_words(random.Random(1), 30)},
    {"role": "assistant", "content": f" {emulated_words(random.Random(2), 8)}"},
    {"role": "user", "content": emulated_words(random.Random(3), 5)},
]
PLAN = ChurnPlan(prompt_tokens=20, output_tokens=4)
WINDOW = Window("w3", "push", 1.0, 6)


def test_texts_and_chats_come_to_the_tokens_that_the_model_s_own_tokenizer_makes() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer.from_str(json.dumps(tokenizer()))
    words = f" {emulated_words(random.Random(4), 50)}"
    rendered = "".join(f"{message['role']}: {message['content'].strip()}\n" for message in MESSAGES) + "assistant:"
    assert text_ids(words) == own.encode(words).ids
    assert len(text_ids(words)) == 50
    assert chat_ids(MESSAGES) == own.encode(rendered).ids


def test_the_prompts_of_a_window_are_its_own_and_texts_of_exactly_their_tokens() -> None:
    prompts = window_prompts(PLAN, WINDOW)
    assert prompts == window_prompts(PLAN, WINDOW)
    assert prompts != window_prompts(PLAN, Window("w4", "push", 1.0, 6))
    assert all(text_ids(prompt_text(ids)) == ids for ids in prompts)
    assert all(10 <= len(ids) <= 30 for ids in prompts)


def test_an_answer_is_right_cut_or_wrong() -> None:
    expected = expected_answer(text_ids(" baba bebe"), 4)
    first, *_ = expected.split()
    assert judged(expected, expected, is_whole=True) is How.RIGHT
    assert judged(first, expected, is_whole=False) is How.CUT
    assert judged("", expected, is_whole=False) is How.CUT
    assert judged(first, expected, is_whole=True) is How.WRONG
    assert judged(f"{expected} {first}", expected, is_whole=False) is How.WRONG
    assert judged("<wrong-kv>", expected, is_whole=False) is How.WRONG
    assert judged(first[:-1], expected, is_whole=False) is How.WRONG


def test_what_the_load_generator_wrote_down_is_judged_request_by_request() -> None:
    prompts = window_prompts(PLAN, WINDOW)
    answers = [expected_answer(ids, 4) for ids in prompts]
    broken_off = "Traceback\naiohttp.client_exceptions.ClientPayloadError: Response payload is not completed"
    refused = "Traceback\naiohttp.client_exceptions.ClientConnectorError: Cannot connect to host"
    texts = [f" {answers[0]}", answers[1].rsplit(" ", 1)[0], answers[0], "", "", ""]
    errors = ["", broken_off, "", "Service Unavailable", refused, "Never received a valid chunk to calculate TTFT."]
    result = LoadResult(9.0, 1, [105.0] * 6, [0.1] * 6, [2.0] * 6, [4, 3, 4, 0, 0, 0], [20] * 6, texts, errors)
    asks = asks_of(result, WINDOW, prompts, 4, began_at_s=100.0)
    assert [ask.how for ask in asks] == [How.RIGHT, How.CUT, How.WRONG, How.ERROR, How.REFUSED, How.CUT]
    assert [ask.request_id for ask in asks] == [f"w3-{index}" for index in range(6)]
    assert (asks[0].sent_s, asks[0].ended_s, asks[0].num_tokens) == (5.0, 7.0, 4)
    assert (asks[3].status, asks[3].ended_s) == (503, NOT_OVER)
    assert "Cannot connect" in asks[4].detail


def test_a_short_answer_that_its_client_took_for_whole_is_wrong_and_not_cut() -> None:
    (ids, *_) = window_prompts(PLAN, WINDOW)
    text = expected_answer(ids, 4).rsplit(" ", 1)[0]
    whole, cut = (LoadResult(9.0, 1, [5.0], [0.1], [2.0], [3], [20], [text], [error]) for error in ("", "gone"))
    assert [ask.how for ask in asks_of(whole, WINDOW, [ids], 4, began_at_s=0.0)] == [How.WRONG]
    assert [ask.how for ask in asks_of(cut, WINDOW, [ids], 4, began_at_s=0.0)] == [How.CUT]


def test_answers_are_compared_without_regard_to_spaces() -> None:
    assert normal_text("  a  b ") == "a b"
