"""Starts, watches and stops single processes, and sees to it that none outlives the launcher.

Each process leads a session of its own, so one signal reaches it and everything it started (vLLM's engine core and
workers). The guard covers the launcher's own death: a small process that reads a pipe whose other end only
the launcher holds, and ends every registered group when the pipe closes, even after ``kill -9``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.logs import advice_for, tail_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvshuttle.launcher.plan import ProcessPlan

_POLL_S = 0.05
_TAIL_LINES = 30
_GUARD_GRACE_S = 5.0


class Guard:
    """Ends registered process groups when this process ends, however it ends. Start it before them, close it after."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvshuttle", "guard"],
            stdin=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The guard process itself."""
        return self._process.pid

    def add(self, group: int) -> None:
        """End ``group`` when the launcher dies."""
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        """``group`` has ended; its number may be given to strangers from now on."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and with it whatever is still registered."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        # A guard that was killed is a lost safety net, not a reason to stop serving.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def run_guard(lines: BinaryIO) -> None:
    """The guard's own process: read registrations until the launcher is gone, then end what is left."""
    # Whoever signals the launcher's friends means the launcher; the guard ends when it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        signal_group(group, signal.SIGTERM)
    deadline_at_s = time.monotonic() + _GUARD_GRACE_S
    while any(is_group_alive(group) for group in groups) and time.monotonic() < deadline_at_s:
        time.sleep(_POLL_S)
    for group in groups:
        signal_group(group, signal.SIGKILL)


class Child:
    """One started process and everything it starts. Not thread-safe."""

    def __init__(self, plan: ProcessPlan, *, env: Mapping[str, str], log_path: Path, guard: Guard) -> None:
        self.plan = plan
        self.log_path = log_path
        self.started_at_s = time.monotonic()
        self._guard = guard
        self._exit_code: int | None = None
        with log_path.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} starting {plan.name}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    plan.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**env, **plan.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchFailed(f"{plan.name} could not be started: {error}") from error
        guard.add(self.pid)

    @property
    def pid(self) -> int:
        """The process itself; also the number of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once the process has ended, negative for a signal; then nothing of its group is left either."""
        if self._exit_code is not None:
            return self._exit_code
        # Looked at without reaping: while the dead leader keeps its number, the group's number cannot be a stranger's.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        signal_group(self.pid, signal.SIGKILL)
        self._exit_code = self._process.wait()
        self._guard.remove(self.pid)
        return self._exit_code

    def terminate(self) -> None:
        """Ask the process to end; it ends its own children in order."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once, as ``kill -9`` does."""
        if self.poll() is None:
            signal_group(self.pid, signal.SIGKILL)
            self.wait(timeout_s=None)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end; False when it did not come in time."""
        deadline_at_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None:
            if deadline_at_s is not None and time.monotonic() >= deadline_at_s:
                return False
            time.sleep(_POLL_S)
        return True

    def death_notice(self) -> str:
        """For a person: which process ended how, the end of its log, and what to do if that is known."""
        tail = tail_of(self.log_path, num_lines=_TAIL_LINES)
        advice = advice_for(tail)
        notice = f"{self.plan.name} {describe_exit(self.poll())}. The end of {self.log_path}:\n{tail}"
        return f"{notice}\n=> {advice}" if advice else notice


def stop_all(children: Sequence[Child], *, timeout_s: float) -> None:
    """Ask all to end, last started first; end those by force that have not within ``timeout_s``."""
    for child in reversed(children):
        child.terminate()
    deadline_at_s = time.monotonic() + timeout_s
    for child in reversed(children):
        if not child.wait(timeout_s=max(0.0, deadline_at_s - time.monotonic())):
            child.kill()


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "is running"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (out of memory, or someone's kill -9)" if name == "SIGKILL" else "")


def signal_group(group: int, number: int) -> None:
    """Signal a process group; one that is gone is none of our business."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def is_group_alive(group: int) -> bool:
    """Whether any process of the group exists."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
