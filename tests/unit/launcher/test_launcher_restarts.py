"""When a process that died is started again."""

from __future__ import annotations

from kvshuttle.launcher.restarts import MAX_DEATHS_IN_A_ROW, MAX_DELAY_S, STEADY_AFTER_S, RestartSchedule


def test_delays_double_up_to_the_longest_and_then_it_is_given_up() -> None:
    schedule = RestartSchedule()
    delays = [schedule.on_death("a", now_s=0.0) for _ in range(MAX_DEATHS_IN_A_ROW + 1)]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(delay for delay in delays if delay is not None) == MAX_DELAY_S
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_a_process_is_due_once_after_its_delay() -> None:
    schedule = RestartSchedule()
    schedule.on_death("a", now_s=100.0)
    assert schedule.take_due(now_s=100.9) == []
    assert schedule.take_due(now_s=101.0) == ["a"]
    assert schedule.take_due(now_s=200.0) == []


def test_a_process_that_served_steadily_starts_over_with_the_shortest_delay() -> None:
    schedule = RestartSchedule()
    for _ in range(MAX_DEATHS_IN_A_ROW):
        schedule.on_death("a", now_s=0.0)
    schedule.on_healthy("a", now_s=10.0)
    assert schedule.on_death("a", now_s=10.0 + STEADY_AFTER_S) == 1.0


def test_a_process_that_dies_soon_after_it_was_healthy_does_not_start_over() -> None:
    schedule = RestartSchedule()
    schedule.on_death("a", now_s=0.0)
    schedule.on_healthy("a", now_s=5.0)
    assert schedule.on_death("a", now_s=6.0) == 2.0


def test_processes_do_not_share_their_delays() -> None:
    schedule = RestartSchedule()
    schedule.on_death("a", now_s=0.0)
    schedule.on_death("a", now_s=0.0)
    assert schedule.on_death("b", now_s=0.0) == 1.0
    assert sorted(schedule.take_due(now_s=5.0)) == ["a", "b"]
