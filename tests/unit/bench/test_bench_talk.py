"""A conversation as its client drives it, with a client that answers by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvshuttle.bench.talk import Answer, Messages, Talk, digest_of, user_text
from kvshuttle.bench.texts import emulated_words
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.errors import TransportError

PLAN = TurnsPlan(turns=3, first_tokens=20, turn_tokens=10, output_tokens=4)


@dataclass
class Scripted:
    """Answers with the number of messages that it was asked with, until turn ``fails_at``."""

    fails_at: int = 99
    text: str = "answer to"
    asked: list[Messages] = field(default_factory=list)

    def ask(self, messages: Messages, *, max_tokens: int) -> Answer:
        self.asked.append([dict(message) for message in messages])
        if len(self.asked) == self.fails_at:
            raise TransportError("gone")
        return Answer(f"{self.text} {len(messages)}", 10 * len(messages), max_tokens, 0.1, 0.5, "req", "conv-1")


def talk(client: Scripted, number: int = 0, *, stop_after: int = 99) -> Talk:
    """A conversation that is asked to stop once ``client`` has answered so often."""
    return Talk(PLAN, number, emulated_words, client, "cell", 0.0, lambda: len(client.asked) >= stop_after)  # type: ignore[arg-type]


def test_each_turn_sends_the_whole_history_with_its_answers() -> None:
    client = Scripted()
    records = talk(client).run(lambda _: None)
    roles = [[message["role"] for message in messages] for messages in client.asked]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]]
    assert client.asked[2][1]["content"] == "answer to 1"
    assert client.asked[2][:3] == client.asked[1]
    assert [record.turn for record in records] == [1, 2, 3]
    assert [record.prompt_tokens for record in records] == [10, 30, 50]
    assert records[0].prompt_digest == digest_of(client.asked[0])


def test_every_cell_hears_the_same_and_every_conversation_something_else() -> None:
    one, again, other = Scripted(), Scripted(), Scripted()
    for client, number in ((one, 0), (again, 0), (other, 1)):
        talk(client, number).run(lambda _: None)
    assert one.asked == again.asked
    assert one.asked[0] != other.asked[0]
    assert len(user_text(PLAN, 0, 1, emulated_words).split()) == 20
    assert len(user_text(PLAN, 0, 2, emulated_words).split()) == 10


def test_a_conversation_ends_with_the_turn_that_fails() -> None:
    told = []
    records = talk(Scripted(fails_at=2)).run(told.append)
    assert [record.error for record in records] == ["", "gone"]
    assert told == records


def test_a_conversation_that_is_asked_to_stop_has_no_further_turn() -> None:
    client = Scripted()
    assert len(talk(client, stop_after=1).run(lambda _: None)) == 1


def test_wrong_kv_and_the_names_of_conversations_are_noted() -> None:
    conversation = talk(Scripted(text="baba <wrong-kv>"))
    assert all(record.is_wrong for record in conversation.run(lambda _: None))
    assert conversation.names == {"conv-1"}
