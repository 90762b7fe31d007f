from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import get_args

from kvshuttle.handoff import TRANSITIONS, Action, Fact, Message, State, Trigger

SCRIPT = Path(__file__).parents[2] / "scripts" / "protocol_docs.py"


def protocol_docs() -> object:
    spec = importlib.util.spec_from_file_location("protocol_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_protocol_page_is_what_the_tables_say() -> None:
    docs = protocol_docs()
    assert docs.PATH.read_text() == docs.document(), "run scripts/protocol_docs.py"


def test_the_protocol_page_names_every_message_fact_action_and_state() -> None:
    text = protocol_docs().document()
    tags = [message.__struct_config__.tag for message in get_args(Message)]
    names = [each.__name__ for each in (*get_args(Fact), *get_args(Action))]
    assert [name for name in (*tags, *names, *State, *Trigger) if f"| `{name}` |" not in text] == []


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    reachable = {State.NEW}
    while more := {target for (state, _), target in TRANSITIONS.items() if state in reachable} - reachable:
        reachable |= more
    assert reachable == set(State)
    finishing = {State.ENDED}
    while more := {state for (state, _), target in TRANSITIONS.items() if target in finishing} - finishing:
        finishing |= more
    assert finishing == set(State)


def test_every_trigger_is_used() -> None:
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)
