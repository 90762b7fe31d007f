import threading
import time

import pytest

from kvshuttle.config import QUIET_WAITS_VARIABLE
from kvshuttle.connector import quiet_waits

zmq = pytest.importorskip("zmq")


class Condition:
    """What vLLM's class looks like from here."""

    def __init__(self):
        self.busy_loop_s = 1
        self.waits = []
        self.last_read = time.monotonic()

    def record_read(self):
        self.last_read = time.monotonic()

    def wait(self, timeout_ms=None):
        self.waits.append(timeout_ms)


@pytest.fixture
def condition():
    class Fresh(Condition):
        pass

    return Fresh


@pytest.fixture
def vllm_condition():
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    class Fresh(SpinCondition):
        """So that vLLM's own class stays as it is for other tests."""

    return Fresh


def test_a_reader_spins_until_its_first_read_and_sleeps_from_then_on(condition):
    quiet_waits.quieten(condition)
    reader = condition()
    reader.last_read = 0.0
    assert reader.busy_loop_s == 1
    reader.record_read()
    assert reader.busy_loop_s == 0
    assert reader.last_read > 0.0


@pytest.mark.parametrize(("asked_ms", "slept_ms"), [(None, 1), (5000, 1), (0, 0)])
def test_after_a_message_no_wait_trusts_a_notification_for_longer_than_a_moment(condition, asked_ms, slept_ms):
    quiet_waits.quieten(condition)
    reader = condition()
    reader.last_read = time.monotonic() + 100
    reader.wait(timeout_ms=asked_ms)
    assert reader.waits == [slept_ms]


@pytest.mark.parametrize(("asked_ms", "slept_ms"), [(None, 200), (5000, 200), (7, 7), (0, 0)])
def test_an_idle_wait_looks_again_now_and_then(condition, asked_ms, slept_ms):
    quiet_waits.quieten(condition)
    reader = condition()
    reader.last_read = time.monotonic() - 100
    reader.wait(timeout_ms=asked_ms)
    assert reader.waits == [slept_ms]


def test_quietening_twice_is_the_same_as_once(condition):
    quiet_waits.quieten(condition)
    before = condition.wait
    quiet_waits.quieten(condition)
    assert condition.wait is before


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_vllm_is_left_alone_unless_the_switch_is_on(monkeypatch, value):
    monkeypatch.delenv(QUIET_WAITS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(QUIET_WAITS_VARIABLE, value)
    monkeypatch.setattr(quiet_waits, "quieten", lambda _: pytest.fail("changed vLLM"))
    quiet_waits.register()


def test_the_switch_changes_the_class_that_vllm_waits_with(monkeypatch):
    from vllm.distributed.device_communicators import shm_broadcast

    changed = []
    monkeypatch.setenv(QUIET_WAITS_VARIABLE, "1")
    monkeypatch.setattr(quiet_waits, "quieten", changed.append)
    quiet_waits.register()
    assert changed == [shm_broadcast.SpinCondition]


def test_a_vllm_without_such_a_class_is_told_of_in_one_line(monkeypatch, caplog):
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setenv(QUIET_WAITS_VARIABLE, "1")
    monkeypatch.delattr(shm_broadcast, "SpinCondition")
    quiet_waits.register()
    assert [record.getMessage() for record in caplog.records] == [
        "kvshuttle: KVSHUTTLE_QUIET_WAITS=1 has no effect on this vLLM: it has no SpinCondition"
    ]


def test_vllms_reader_wakes_by_a_notification_and_uses_no_cpu_before(vllm_condition, tmp_path):
    quiet_waits.quieten(vllm_condition)
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/notify"
        writer = vllm_condition(is_reader=False, context=context, notify_address=address)
        reader = vllm_condition(is_reader=True, context=context, notify_address=address)
        reader.record_read()
        woken = threading.Event()
        cpu_s = []

        def read():
            started_s = time.thread_time()
            while not woken.is_set():
                reader.wait()
            cpu_s.append(time.thread_time() - started_s)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.5)
        woken.set()
        writer.notify()
        thread.join(20)
        assert not thread.is_alive()
        assert cpu_s[0] < 0.25
        for each in (writer.local_notify_socket, reader.local_notify_socket):
            each.close(0)
        for each in (reader.read_cancel_socket, reader.write_cancel_socket):
            each.close(0)


def test_vllm_loads_the_plugin_by_its_entry_point():
    from importlib.metadata import entry_points

    (entry,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kvshuttle_quiet_waits"]
    assert entry.load() is quiet_waits.register
