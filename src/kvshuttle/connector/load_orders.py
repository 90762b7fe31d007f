"""What the scheduler half has the workers do for one load: read it, expect its push, or end it as failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.step_metadata import FailedLoad, PushExpectation, ReadOrder
from kvshuttle.handoff.fetch_protocol import FailLoad, StartRead
from kvshuttle.handoff.intake import Intake
from kvshuttle.handoff.intake_protocol import ExpectPush, FailPush

if TYPE_CHECKING:
    from kvshuttle.connector.readings import Load
    from kvshuttle.connector.step_metadata import StepMetadata


LoadAction = StartRead | FailLoad | ExpectPush | FailPush
"""What a machine wants done by the workers."""


def order(step: StepMetadata, load: Load, action: LoadAction, *, host_id: str) -> None:
    """Do what a load's machine wants. ``host_id``: names this process's monotonic clock."""
    match action:
        case StartRead():
            _order_read(step, load, action, host_id)
        case FailLoad():
            order_failure(step, load, str(action.outcome))
        case ExpectPush():
            step.pushes.append(PushExpectation(load.reading.request_id, action.registration_id, load.destination))
        case FailPush():
            order_push_failure(step, load, str(action.outcome))


def order_failure(step: StepMetadata, load: Load, reason: str) -> None:
    """Nobody reads or writes for this load: it ends as failed."""
    load.failure = load.failure or reason
    step.failed_loads.append(FailedLoad(load.reading.request_id, reason, load.destination))


def order_push_failure(step: StepMetadata, load: Load, reason: str) -> None:
    """Whether a push has failed is for the workers to say: it may have arrived meanwhile."""
    step.failed_loads.append(FailedLoad(load.reading.request_id, reason, load.destination, is_push=True))


def _order_read(step: StepMetadata, load: Load, action: StartRead, host_id: str) -> None:
    issued_at_s = now_s()
    load.read_ends_at_s = issued_at_s + action.budget_s
    step.reads.append(
        ReadOrder(
            request_id=load.reading.request_id,
            incarnation=load.reading.source.incarnation,
            plan=action.plan,
            budget_s=action.budget_s,
            submit_within_s=action.submit_within_s,
            issued_at_s=issued_at_s,
            host=host_id,
            is_instead_of_push=isinstance(load.reading.fetch, Intake),
        )
    )
