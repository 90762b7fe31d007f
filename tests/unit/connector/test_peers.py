import msgspec
import pytest

from kvshuttle.connector.peers import Peers
from kvshuttle.connector.step_metadata import StepMetadata
from kvshuttle.handoff.cards import EngineCard, WorkerCard
from kvshuttle.handoff.messages import PROTOCOL_VERSION, DenyReason
from support.handoff_values import FINGERPRINT


def card(incarnation="inc-1", **changes):
    worker = WorkerCard(0, "peer:2", b"agent", "DRAM", 0, ())
    whole = EngineCard("prefill-0", incarnation, "kv_both", PROTOCOL_VERSION, "0.32.0", FINGERPRINT, (worker,))
    return msgspec.structs.replace(whole, **changes)


class Case:
    def __init__(self):
        self.peers = Peers(card("own"))
        self.step = StepMetadata()

    def meet(self, address, incarnation, *, now_s=0.0, in_use=()):
        self.peers.meet(address, card(incarnation), self.step, in_use=in_use, now_s=now_s)

    def take(self):
        step, self.step = self.step, StepMetadata()
        return sorted(step.peers), sorted(step.gone)


@pytest.fixture
def case():
    return Case()


def test_a_peer_is_told_to_the_workers_once(case):
    assert not case.peers.is_known("a:1", "inc-1", now_s=0.0)
    case.meet("a:1", "inc-1")
    assert case.take() == (["inc-1"], [])
    case.meet("a:1", "inc-1")
    assert case.take() == ([], [])
    assert case.peers.is_known("a:1", "inc-1", now_s=0.0)
    assert not case.peers.is_known("a:1", "inc-2", now_s=0.0)


def test_a_new_life_at_an_address_ends_the_old_one(case):
    case.meet("a:1", "inc-1")
    case.take()
    case.meet("a:1", "inc-2", in_use={"inc-1"})
    assert case.take() == (["inc-2"], ["inc-1"])
    assert len(case.peers) == 1


def test_an_old_life_that_ends_before_the_workers_heard_of_it_is_not_told(case):
    case.meet("a:1", "inc-1")
    case.meet("a:1", "inc-2")
    assert case.take() == (["inc-2"], ["inc-1"])


def test_peers_that_nobody_reads_from_are_forgotten_when_a_new_one_comes(case):
    for number in range(5):
        case.meet(f"a:{number}", f"inc-{number}")
    assert case.peers.is_known("a:1", "inc-1", now_s=500.0)
    case.take()
    case.meet("b:1", "inc-b", now_s=700.0, in_use={"inc-2"})
    assert case.take() == (["inc-b"], ["inc-0", "inc-3", "inc-4"])
    assert len(case.peers) == 3


def test_a_life_known_at_two_addresses_is_gone_when_the_last_is(case):
    case.meet("a:1", "inc-1")
    case.meet("b:1", "inc-1")
    case.take()
    case.meet("a:1", "inc-2")
    assert case.take() == (["inc-2"], [])
    case.peers.forget("inc-1", case.step)
    assert case.take() == ([], ["inc-1"])
    assert not case.peers.is_known("b:1", "inc-1", now_s=0.0)


def test_a_peer_that_fits_is_not_refused(case):
    assert case.peers.refusal(card(), "inc-1") is None


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"incarnation": "inc-2"}, DenyReason.OTHER_INCARNATION, "inc-2"),
        ({"protocol_version": 99}, DenyReason.INCOMPATIBLE, "protocol_version: 1 != 99"),
        ({"workers": ()}, DenyReason.INCOMPATIBLE, "workers"),
        ({"workers": (WorkerCard(1, "", b"", "DRAM", 0, ()),)}, DenyReason.INCOMPATIBLE, "workers"),
        ({"workers": (WorkerCard(0, "", b"", "VRAM", 0, ()),)}, DenyReason.INCOMPATIBLE, "VRAM"),
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, model="m")}, DenyReason.INCOMPATIBLE, "'tiny' != 'm'"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_reason(case, changes, reason, detail):
    refusal = case.peers.refusal(card(**changes), "inc-1")
    assert refusal.reason is reason
    assert detail in refusal.detail
