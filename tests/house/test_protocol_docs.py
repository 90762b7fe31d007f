from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from kvshuttle import handoff as h
from kvshuttle.handoff.messages import Stage

if TYPE_CHECKING:
    from types import ModuleType

MACHINES: dict[str, tuple[Any, Any, dict[Any, Any]]] = {
    "Fetch": (h.State, h.Trigger, h.TRANSITIONS),
    "Intake": (h.IntakeState, h.IntakeTrigger, h.INTAKE_TRANSITIONS),
    "Claim": (h.ClaimState, h.ClaimTrigger, h.CLAIM_TRANSITIONS),
    "Inbox": (h.InboxState, h.InboxTrigger, h.INBOX_TRANSITIONS),
    "Registration": (h.RegistrationState, h.RegistrationTrigger, h.REGISTRATION_TRANSITIONS),
    "Outbox": (h.OutboxState, h.OutboxTrigger, h.OUTBOX_TRANSITIONS),
}
each_machine = pytest.mark.parametrize("machine", MACHINES)

SCRIPT = Path(__file__).parents[2] / "scripts" / "protocol_docs.py"


def protocol_docs() -> ModuleType:
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
    tagged = [*get_args(h.Message), *get_args(h.Notification), h.Open, h.Close]
    tags = [message.__struct_config__.tag for message in tagged]
    unions = (h.Fact, h.Action, h.IntakeFact, h.IntakeAction)
    names = [each.__name__ for union in unions for each in get_args(union)]
    members = [member for states, triggers, _ in MACHINES.values() for enum in (states, triggers) for member in enum]
    named = (*tags, *names, *members, *h.DenyReason, *h.DeclineReason, *h.Outcome, *h.PushOutcome, *Stage, *h.Mode)
    assert [name for name in named if f"| `{name}` |" not in text] == []


@each_machine
def test_every_state_can_be_reached_and_left_for_the_end(machine: str) -> None:
    states, _, transitions = MACHINES[machine]
    first, *_, last = states
    reachable = {first}
    while more := {target for (state, _), target in transitions.items() if state in reachable} - reachable:
        reachable |= more
    assert reachable == set(states)
    finishing = {last}
    while more := {state for (state, _), target in transitions.items() if target in finishing} - finishing:
        finishing |= more
    assert finishing == set(states)
    assert {target for (state, _), target in transitions.items() if state is last} <= {last}


@each_machine
def test_every_trigger_is_used(machine: str) -> None:
    _, triggers, transitions = MACHINES[machine]
    assert {trigger for _, trigger in transitions} == set(triggers)


@pytest.mark.parametrize("way", ["PULL", "PUSH"])
def test_the_pictures_follow_the_tables_from_the_first_state_to_the_end(way: str) -> None:
    diagrams = protocol_docs().protocol_diagrams
    parts = [part for step in getattr(diagrams, way) for part in diagrams._flat(step)]
    moves = [move for part in parts for move in part.moves]
    for name in {move.machine for move in moves}:
        first, *_ = MACHINES[name][0]
        of_machine = [move for move in moves if move.machine == name]
        assert of_machine[0].state is first
        # An inbox is forgotten, not ended, when its worker has reported.
        assert of_machine[-1].target in (h.InboxState.COMPLETE, list(MACHINES[name][0])[-1])
    assert {move.machine for move in moves} == ({"Fetch"} if way == "PULL" else set(MACHINES) - {"Fetch"})


def test_a_picture_that_contradicts_a_table_is_not_drawn() -> None:
    diagrams = protocol_docs().protocol_diagrams
    step = next(step for step in diagrams.PULL if step.moves)
    wrong = dataclasses.replace(step.moves[0], trigger=h.Trigger.READ_ENDED)
    with pytest.raises(ValueError, match="Fetch has no row for NEW, read_ended"):
        diagrams.diagram([dataclasses.replace(step, moves=(wrong,))])
    with pytest.raises(ValueError, match="Fetch stands at ACQUIRING, not at NEW"):
        diagrams.diagram([step, step])
