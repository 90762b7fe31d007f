"""What emulated engines must answer: every token follows from the prompt, so a whole answer can be checked. Pure."""

from __future__ import annotations

import functools

import numpy as np

from kvshuttle.emulate.model_dir import FIRST_WORD, NUM_WORDS, words
from kvshuttle.emulate.pattern import next_token, prefix_sums


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


def normal_text(text: str) -> str:
    """An answer as ``expected_text`` writes it."""
    return " ".join(text.split())


@functools.cache
def _words() -> list[str]:
    return words()
