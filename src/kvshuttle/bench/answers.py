"""What emulated engines must answer: every token follows from the prompt, so a whole answer can be checked. Pure."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.emulate.model_dir import FIRST_WORD, NUM_SPECIAL, NUM_WORDS, words
from kvshuttle.emulate.pattern import next_token, prefix_sums, prompt_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PIECE = re.compile(r" ?[a-z]+|[:\n]")
"""What the emulated model's tokenizer looks up, of texts that hold nothing else."""


def expected_text(key: str, num_prompt_tokens: int, num_tokens: int) -> str:
    """The answer of ``num_tokens`` words to the prompt that traces call ``key``."""
    prefix_sum = int(key, 16)
    answer = []
    for index in range(num_tokens):
        token = next_token(prefix_sum, first=FIRST_WORD, num_tokens=NUM_WORDS)
        answer.append(_words()[token - FIRST_WORD])
        ids = np.array([token], dtype=np.int32)
        prefix_sum = int(prefix_sums(ids, start=num_prompt_tokens + index, before=prefix_sum)[-1])
    return " ".join(answer)


def expected_answer(ids: Sequence[int], num_tokens: int) -> str:
    """The answer of ``num_tokens`` words to a prompt of these tokens."""
    key = prompt_key(int(prefix_sums(np.array(ids, dtype=np.int32))[-1]))
    return expected_text(key, len(ids), num_tokens)


def text_ids(text: str) -> list[int]:
    """Tokens of a text of lower-case letters, spaces, colons and ends of lines, as an emulated engine makes them."""
    ids: list[int] = []
    for piece in _PIECE.findall(text):
        word_id = _word_ids().get(piece)
        ids += [word_id] if word_id is not None else [NUM_SPECIAL + byte for byte in piece.encode()]
    return ids


def chat_ids(messages: Iterable[Mapping[str, str]]) -> list[int]:
    """Tokens of a chat's prompt, as the emulated model's template makes them."""
    lines = "".join(f"{message['role']}: {message['content'].strip()}\n" for message in messages)
    return text_ids(f"{lines}assistant:")


def normal_text(text: str) -> str:
    """An answer as ``expected_text`` writes it."""
    return " ".join(text.split())


@functools.cache
def _words() -> list[str]:
    return words()


@functools.cache
def _word_ids() -> dict[str, int]:
    return {f" {word}": FIRST_WORD + index for index, word in enumerate(_words())}
