"""What people say in benchmarks: drawn with a seed, and about as long as asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.emulate.model_dir import words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Writer = Callable[[random.Random, int], str]
    """Takes randomness and a number of tokens."""

_TOKENS_PER_WORD = 1.2
"""Of words like these, in tokenizers for English."""

_WHEN = (
    "On Monday morning", "Early in the spring", "Before the second bell", "Late that evening", "After the long meeting",
    "During the night watch", "Toward the end of the week", "In the middle of the harvest", "At half past nine",
    "Shortly after the storm", "On the first day of the fair", "Once the letters were sorted",
)  # fmt: skip
_WHO = (
    "the harbour master", "a young surveyor", "the widow from the mill", "our head gardener", "the night clerk",
    "an old engineer", "the captain of the ferry", "a teacher from the valley", "the new librarian", "the baker",
    "a doctor on her way home", "the keeper of the records", "two brothers from the coast", "the town council",
)  # fmt: skip
_DID = (
    "counted", "described", "sold", "repaired", "measured", "painted", "compared", "carried away", "asked about",
    "wrote down", "divided", "inspected", "returned", "could not find",
)  # fmt: skip
_WHAT = (
    "crates of oranges", "copper rivets", "maps of the northern district", "bundles of wool", "broken clocks",
    "pages of the blue ledger", "windows of the chapel", "sacks of flour", "letters without a stamp", "oak planks",
    "lamps along the quay", "jars of honey", "seats in the theatre", "stones of the old bridge",
)  # fmt: skip
_WHERE = (
    "beside the canal", "in the upper storeroom", "near the east gate", "under the railway arch", "on the lower deck",
    "behind the town hall", "at the edge of the forest", "in the courtyard", "across the river", "by the lighthouse",
)  # fmt: skip
_WHY = (
    "because the sum of the third column was wrong", "although nobody had asked for it",
    "so that the barges could leave before noon", "while the others argued about the price",
    "since the last report had been lost", "and said nothing about the weather",
    "until the wind turned to the south", "which surprised everyone but the children",
)  # fmt: skip
_QUESTION = "Now tell me in a few sentences what matters most in all of this, and why."


def prose(rng: random.Random, num_tokens: int) -> str:
    """English sentences, and a question at the end."""
    num_words = num_tokens / _TOKENS_PER_WORD - len(_QUESTION.split())
    sentences: list[str] = []
    while num_words > 0:
        sentence = _sentence(rng)
        sentences.append(sentence)
        num_words -= len(sentence.split())
    return " ".join([*sentences, _QUESTION])


def emulated_words(rng: random.Random, num_tokens: int) -> str:
    """Words of the emulated model, which have one token each."""
    return " ".join(rng.choices(words(), k=num_tokens))


def _sentence(rng: random.Random) -> str:
    when, who, did, what, where, why = (rng.choice(each) for each in (_WHEN, _WHO, _DID, _WHAT, _WHERE, _WHY))
    return f"{when} {who} {did} {rng.randrange(2, 999)} {what} {where}, {why}."
