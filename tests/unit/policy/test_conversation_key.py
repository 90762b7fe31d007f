import pytest

from kvshuttle.policy import Scope, caller_of, chat_trail, name_of, text_trail

SCOPE = Scope(caller_of([b"Bearer a"]), "m")
SYSTEM, HI, ANSWER, MORE = (
    {"role": role, "content": content}
    for role, content in (("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "more"))
)
TURN_1 = [SYSTEM, HI]
TURN_2 = [SYSTEM, HI, ANSWER, MORE]


def tip(messages, scope=SCOPE):
    return chat_trail(scope, messages).tip


def test_the_next_turn_extends_the_one_before_without_knowing_its_answer():
    assert chat_trail(SCOPE, TURN_2).extends(tip(TURN_1))
    assert tip(TURN_1).digest in chat_trail(SCOPE, TURN_2).marks


def test_a_prompt_extends_itself_as_when_it_is_regenerated():
    assert chat_trail(SCOPE, TURN_1).extends(tip(TURN_1))


@pytest.mark.parametrize(
    "other",
    [
        [SYSTEM],
        [{**SYSTEM, "content": "be brief"}, HI, ANSWER, MORE],
        [SYSTEM, {**HI, "content": "hi!"}, ANSWER, MORE],
        [SYSTEM, {**HI, "name": "x"}, ANSWER, MORE],
        [HI, SYSTEM, ANSWER, MORE],
        [SYSTEM, ANSWER, HI],
        [[SYSTEM, HI], ANSWER, MORE],
    ],
)
def test_a_prompt_that_begins_in_another_way_does_not_extend_a_turn(other):
    assert not chat_trail(SCOPE, other).extends(tip(TURN_1))


def test_an_edited_second_turn_still_shares_the_mark_of_the_first():
    edited = chat_trail(SCOPE, [*TURN_1, ANSWER, {**MORE, "content": "less"}])
    assert not edited.extends(tip(TURN_2))
    assert tip(TURN_1).digest in edited.marks


def test_the_order_of_keys_in_a_message_says_nothing():
    turned = [dict(reversed(message.items())) for message in TURN_1]
    assert tip(turned) == tip(TURN_1)


@pytest.mark.parametrize(
    "other",
    [
        Scope(caller_of([b"Bearer b"]), "m"),
        Scope(caller_of([]), "m"),
        Scope(SCOPE.caller, "n"),
        Scope(SCOPE.caller, ""),
        Scope(SCOPE.caller, "m", name_of("mine")),
    ],
)
def test_another_caller_model_or_name_shares_no_mark(other):
    assert not set(chat_trail(other, TURN_2).marks) & set(chat_trail(SCOPE, TURN_2).marks)
    text = "x" * 1000
    assert not set(text_trail(other, text).marks) & set(text_trail(SCOPE, text).marks)
    assert not text_trail(other, text).extends(text_trail(SCOPE, text).tip)


def test_parts_of_a_scope_do_not_run_into_each_other():
    seeds = {Scope(b"ab", "c").seed, Scope(b"a", "bc").seed, Scope(b"a", "b", "c").seed, Scope(b"", "abc").seed}
    assert len(seeds) == 4
    assert caller_of([b"ab", b"c"]) != caller_of([b"a", b"bc"])


def test_a_caller_is_named_without_its_credentials():
    assert b"secret" not in caller_of([b"Bearer secret"])
    assert "secret" not in name_of("secret")


def test_new_bytes_leave_out_the_answer_that_the_engine_has_itself():
    after_answer = chat_trail(SCOPE, TURN_2)
    assert after_answer.num_new_bytes(tip(TURN_1)) == after_answer.lens_bytes[3]
    two_users = chat_trail(SCOPE, [*TURN_1, MORE, MORE])
    assert two_users.num_new_bytes(tip(TURN_1)) == 2 * two_users.lens_bytes[3]
    assert chat_trail(SCOPE, TURN_1).num_new_bytes(tip(TURN_1)) == 0


@pytest.mark.parametrize("messages", [None, [], "hi", {"role": "user"}, [HI] * 10_001])
def test_what_is_no_list_of_messages_has_no_trail(messages):
    assert chat_trail(SCOPE, messages) is None


def test_messages_nested_too_deeply_have_no_trail():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    assert chat_trail(SCOPE, [{"role": "user", "content": nested}]) is None


@pytest.mark.parametrize("messages", [[1, "x", None], [{}], [{"role": "user", "content": [{"type": "image_url"}]}]])
def test_odd_messages_are_hashed_like_others(messages):
    assert len(chat_trail(SCOPE, messages).marks) == len(messages)


@pytest.mark.parametrize("length", [64, 65, 127, 1000, 16_383, 16_384, 100_001])
def test_a_growing_text_finds_the_mark_of_the_one_before_wherever_that_was_cut(length):
    whole = "".join(chr(97 + at * 7 % 26) for at in range(length + 500))
    before, after = text_trail(SCOPE, whole[:length]), text_trail(SCOPE, whole)
    assert before.marks[-1] in after.marks
    assert after.extends(before.tip)
    assert after.num_new_bytes(before.tip) == 500
    assert not before.extends(after.tip)


def test_a_text_that_differs_behind_the_last_mark_shares_it_and_is_no_extension():
    one, other = text_trail(SCOPE, "x" * 64 + "one"), text_trail(SCOPE, "x" * 64 + "two and more")
    assert one.marks[-1] in other.marks
    assert not other.extends(one.tip)


def test_token_ids_grow_as_text_does_and_are_not_taken_for_it():
    one, two = text_trail(SCOPE, list(range(50))), text_trail(SCOPE, list(range(90)))
    assert one.marks[-1] in two.marks
    assert two.extends(one.tip)
    same_bytes = text_trail(SCOPE, one.data.decode())
    assert same_bytes.data == one.data
    assert not set(same_bytes.marks) & set(one.marks)


@pytest.mark.parametrize("prompt", [None, "", "short", [], [1, "x"], [True] * 100, [1 << 70] * 100, ["x" * 100, "y"]])
def test_prompts_that_are_short_or_several_or_no_prompts_have_no_trail(prompt):
    assert text_trail(SCOPE, prompt) is None


def test_marks_stay_few_however_long_a_text_is():
    assert len(text_trail(SCOPE, "x" * 4_000_000).marks) < 1500
