"""When to start a process again that died while serving. Pure: time is an argument."""

from __future__ import annotations

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
MAX_DEATHS_IN_A_ROW = 8
STEADY_AFTER_S = 60.0
"""A process that was healthy for so long has proven itself: its next death counts as the first."""


class RestartSchedule:
    """Doubling delays for each process, and an end to it: what dies again and again needs a person."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}
        self._healthy_at_s: dict[str, float] = {}
        self._due_at_s: dict[str, float] = {}

    def on_healthy(self, name: str, *, now_s: float) -> None:
        """A process came up."""
        self._healthy_at_s[name] = now_s

    def on_death(self, name: str, *, now_s: float) -> float | None:
        """A process ended: the delay in seconds until it is started again, None when it should not be."""
        healthy_at_s = self._healthy_at_s.pop(name, None)
        if healthy_at_s is not None and now_s - healthy_at_s >= STEADY_AFTER_S:
            self._deaths[name] = 0
        deaths = self._deaths.get(name, 0) + 1
        self._deaths[name] = deaths
        if deaths > MAX_DEATHS_IN_A_ROW:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (deaths - 1))
        self._due_at_s[name] = now_s + delay_s
        return delay_s

    def take_due(self, *, now_s: float) -> list[str]:
        """Processes to start now; each is named once."""
        due = [name for name, at_s in self._due_at_s.items() if at_s <= now_s]
        for name in due:
            del self._due_at_s[name]
        return due
