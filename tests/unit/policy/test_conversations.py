import itertools

import pytest

from kvshuttle.policy import ConversationTable, DropReason, Found, Kept, Scope, chat_trail, name_of, text_trail

SCOPE = Scope(b"a", "m")
NAMED = Scope(b"a", "m", name_of("mine"))
HANDLES = itertools.count()


def say(*texts):
    """Messages, by turns of the user and the assistant."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def kept(engine="d0", incarnation="life-1"):
    return Kept(f"turn-{next(HANDLES)}", engine, incarnation, 10)


class Chat:
    """A table, and requests that go through it."""

    def __init__(self, max_turns=100, ttl_s=100.0):
        self.table = ConversationTable(max_turns=max_turns, ttl_s=ttl_s)
        self.names = itertools.count()

    def claim(self, *texts, scope=SCOPE, now_s=0.0):
        trail = chat_trail(scope, say(*texts)) if texts else None
        return self.table.claim(scope, trail, fresh_name=f"conv-{next(self.names)}", now_s=now_s)

    def turn(self, *texts, scope=SCOPE, now_s=0.0, engine="d0", incarnation="life-1"):
        """A request that is answered: its claim, what it left, what had to be released."""
        claim = self.claim(*texts, scope=scope, now_s=now_s)
        left = kept(engine, incarnation)
        return claim, left, self.table.settle(claim, left, now_s=now_s)


@pytest.fixture
def chat():
    return Chat()


def test_each_turn_continues_the_one_before_and_supersedes_it(chat):
    first, left_1, _ = chat.turn("a")
    second, left_2, releases = chat.turn("a", "A", "b")
    third = chat.claim("a", "A", "b", "B", "c")
    assert (first.found, second.found, third.found) == (Found.NEW, Found.CONTINUED, Found.CONTINUED)
    assert (second.superseded, third.superseded) == (left_1, left_2)
    assert (releases, len(chat.table)) == ([], 1)
    assert chat.table.drops == {DropReason.SUPERSEDED: 1}
    assert {first.name, second.name, third.name} == {"conv-0"}


def test_what_was_kept_at_another_engine_or_in_another_life_is_released_there(chat):
    _, left_1, _ = chat.turn("a")
    _, left_2, releases_2 = chat.turn("a", "A", "b", engine="d1")
    _, _, releases_3 = chat.turn("a", "A", "b", "B", "c", engine="d1", incarnation="life-2")
    assert (releases_2, releases_3) == ([left_1], [left_2])


def test_a_turn_that_is_regenerated_supersedes_the_rejected_one(chat):
    _, left_1, _ = chat.turn("a", "A", "b")
    again, left_2, _ = chat.turn("a", "A", "b")
    assert again.superseded == left_1
    assert chat.claim("a", "A", "b", "B2", "c").history.kept == left_2


def test_an_edited_message_reads_what_is_kept_of_the_later_turns_and_leaves_them_alone(chat):
    chat.turn("a")
    _, trunk, _ = chat.turn("a", "A", "b")
    edited, branch, _ = chat.turn("a", "A", "b2")
    assert (edited.found, edited.history.kept, edited.superseded) == (Found.BRANCHED, trunk, None)
    assert edited.name != "conv-0"
    assert chat.claim("a", "A", "b", "B", "c").superseded == trunk
    assert chat.claim("a", "A", "b2", "B2", "c").superseded == branch


def test_going_back_several_turns_is_recognised(chat):
    texts = ["a"]
    for number in range(5):
        chat.turn(*texts)
        texts += [f"A{number}", f"b{number}"]
    assert chat.claim("a", "A0", "else").found is Found.BRANCHED
    assert len(chat.table) == 1


def test_of_two_that_continue_a_turn_at_once_both_read_it_and_one_supersedes_it(chat):
    _, left, _ = chat.turn("a")
    one, two = chat.claim("a", "A", "b"), chat.claim("a", "A", "c")
    assert (one.history.kept, two.history.kept) == (left, left)
    assert (one.superseded, two.superseded) == (left, None)
    chat.table.settle(two, left_2 := kept(), now_s=0)
    chat.table.settle(one, left_1 := kept(), now_s=0)
    assert chat.claim("a", "A", "b", "B", "x").history.kept == left_1
    assert chat.claim("a", "A", "c", "C", "x").history.kept == left_2


def test_an_aborted_turn_loses_nothing_and_the_next_one_supersedes(chat):
    _, left, _ = chat.turn("a")
    aborted = chat.claim("a", "A", "b")
    chat.table.put_back(aborted)
    chat.table.put_back(aborted)
    assert chat.claim("a", "A", "b").superseded == left
    assert chat.table.drops == {}


def test_other_callers_models_and_names_find_nothing(chat):
    chat.turn("a")
    others = [Scope(b"b", "m"), Scope(b"a", "n"), NAMED, Scope(b"a", "m", name_of("other"))]
    for other in others:
        assert chat.claim("a", "A", "b", scope=other).found is Found.NEW


def test_the_same_name_of_two_callers_is_two_conversations(chat):
    other = Scope(b"b", "m", NAMED.name)
    _, mine, _ = chat.turn("a", scope=NAMED)
    _, theirs, _ = chat.turn("a", scope=other)
    assert chat.claim("x", scope=NAMED).history.kept == mine
    assert chat.claim("x", scope=other).history.kept == theirs
    assert [turn.kept for turn in chat.table.turns_of(b"b", NAMED.name, now_s=0)] == [theirs]


def test_a_name_alone_finds_the_latest_turn_and_supersedes_nothing(chat):
    chat.turn("a", scope=NAMED)
    _, latest, _ = chat.turn("other", scope=NAMED)
    guess = chat.claim("summary of it all", scope=NAMED)
    assert (guess.found, guess.history.kept, guess.superseded) == (Found.NAMED, latest, None)
    assert len(chat.table) == 2


def test_a_name_is_enough_where_the_prompt_has_no_trail(chat):
    _, left, _ = chat.turn(scope=NAMED)
    claim, _, releases = chat.turn(scope=NAMED)
    assert (claim.found, claim.history.kept, releases) == (Found.NAMED, left, [left])
    assert chat.table.drops == {DropReason.UNREACHABLE: 1}


def test_a_name_is_not_used_for_another_model(chat):
    chat.turn("a", scope=NAMED)
    assert chat.claim("b", scope=Scope(b"a", "n", NAMED.name)).found is Found.NEW
    chat.turn("a", scope=Scope(b"a", "n", NAMED.name))
    assert chat.claim("b", scope=NAMED).history.scope == NAMED


def test_a_turn_is_not_found_after_its_time(chat):
    chat.turn("a", now_s=0)
    assert chat.claim("a", "A", "b", now_s=99.9).history is not None
    late = chat.claim("a", "A", "b", now_s=100.0)
    assert (late.found, late.history, late.superseded) == (Found.EXPIRED, None, None)
    assert (len(chat.table), chat.table.drops) == (0, {DropReason.EXPIRED: 1})


def test_a_conversation_keeps_its_name_and_its_earlier_keys_when_a_turn_has_expired(chat):
    chat.turn("a", now_s=0)
    late, left, _ = chat.turn("a", "A", "b", now_s=200)
    assert late.name == "conv-0"
    assert chat.claim("a", "A2", "c", now_s=200).history.kept == left


def test_expired_turns_leave_without_being_looked_for(chat):
    for number in range(5):
        chat.turn(f"a{number}", now_s=number)
    chat.table.expire(102.5)
    assert len(chat.table) == 2


def test_a_full_table_lets_go_of_what_was_used_longest_ago_and_has_it_released():
    chat = Chat(max_turns=2)
    _, _, _ = chat.turn("a")
    _, second, _ = chat.turn("b")
    chat.table.put_back(chat.claim("a", "A", "x"))
    _, _, releases = chat.turn("c")
    assert releases == [second]
    assert (len(chat.table), chat.table.drops) == (2, {DropReason.TABLE_FULL: 1})


def test_a_conversation_that_is_forgotten_is_released_and_requests_under_way_leave_nothing(chat):
    _, one, _ = chat.turn("a", scope=NAMED)
    _, two, _ = chat.turn("b", scope=NAMED)
    running = chat.claim("a", "A", "c", scope=NAMED)
    assert chat.table.num_running(b"a", NAMED.name) == 1
    assert chat.table.forget(b"b", NAMED.name) == []
    assert chat.table.forget(b"a", NAMED.name) == [one, two]
    assert chat.table.settle(running, left := kept(), now_s=0) == [left]
    assert (len(chat.table), chat.table.turns_of(b"a", NAMED.name, now_s=0)) == (0, [])
    assert chat.table.num_running(b"a", NAMED.name) == 0


def test_a_parent_that_left_meanwhile_is_not_superseded_twice():
    chat = Chat(max_turns=1)
    chat.turn("a")
    claim = chat.claim("a", "A", "b")
    chat.turn("other")
    assert chat.table.settle(claim, kept(), now_s=0) != []
    assert chat.table.drops == {DropReason.TABLE_FULL: 2}


def test_what_found_a_parent_that_left_is_not_taken_from_who_has_it_now(chat):
    _, left, _ = chat.turn("a")
    claim = chat.claim("a", "A", "b")
    chat.table.renewed(left.handle, -1.0, now_s=0)
    _, other, _ = chat.turn("a")
    assert chat.table.settle(claim, kept(), now_s=0) == []
    assert chat.claim("a", "else").superseded == other


def test_a_turn_settled_late_knows_whether_another_has_taken_its_place(chat):
    chat.turn("a")
    cut_off = chat.claim("a", "A", "b")
    chat.table.put_back(cut_off)
    assert not chat.table.is_overtaken(cut_off)
    chat.turn("a", "A", "b")
    assert chat.table.is_overtaken(cut_off)


def test_what_an_engine_says_of_a_turn_counts(chat):
    _, left, _ = chat.turn("a", now_s=0)
    chat.table.renewed(left.handle, 200.0, now_s=50)
    assert chat.claim("a", now_s=249).history is not None
    chat.table.renewed(left.handle, -1.0, now_s=50)
    chat.table.renewed(left.handle, -1.0, now_s=50)
    assert chat.table.drops == {DropReason.GONE: 1}


def test_turns_in_use_are_listed_by_the_engine_that_keeps_them(chat):
    chat.turn("old", now_s=0)
    _, one, _ = chat.turn("a", now_s=10)
    _, two, _ = chat.turn("b", now_s=10, engine="d1")
    assert chat.table.in_use_since(5) == {("d0", "life-1"): [one.handle], ("d1", "life-1"): [two.handle]}


def test_a_turn_whose_engine_was_restarted_is_dropped_once(chat):
    chat.turn("a")
    claim = chat.claim("a", "A", "b")
    chat.table.drop(claim.history, DropReason.OTHER_INCARNATION)
    chat.table.drop(claim.history, DropReason.OTHER_INCARNATION)
    chat.table.settle(claim, kept(incarnation="life-2"), now_s=0)
    assert chat.table.drops == {DropReason.OTHER_INCARNATION: 1}
    assert chat.claim("a", "A2").found is Found.BRANCHED


def test_a_text_that_only_shares_a_mark_is_a_branch(chat):
    def turn(prompt):
        claim = chat.table.claim(SCOPE, text_trail(SCOPE, prompt), fresh_name="conv-x", now_s=0)
        chat.table.settle(claim, kept(), now_s=0)
        return claim.found

    assert turn("x" * 64 + "one") is Found.NEW
    assert turn("x" * 64 + "two") is Found.BRANCHED
    assert turn("x" * 64 + "two and its answer") is Found.CONTINUED


def test_new_bytes_are_known_only_where_a_turn_is_continued(chat):
    assert chat.claim("a").num_new_bytes is None
    chat.turn("a")
    chat.turn("a", "A", "b")
    assert chat.claim("a", "A", "c").num_new_bytes is None
    assert chat.claim("a", "A", "b", "B", "c").num_new_bytes == len(b'{"content":"c","role":"user"}')
