"""Facts for ``doctor``: packages, NIXL's backends, network devices. Looks, and judges nothing.

Packages that load native code are asked in processes of their own: a broken one then cannot take the doctor down.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.config import secret_from
from kvshuttle.errors import ConfigError
from kvshuttle.launcher.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROBE_TIMEOUT_S = 600.0
"""The first import of a fresh installation compiles thousands of files, on a busy machine for minutes."""
_NUM_ERROR_LINES = 5

_PROBE_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.cuda.is_available()}))
"""
_PROBE_VLLM = """
import json, vllm
from vllm.platforms import current_platform
import vllm.entrypoints.openai.api_server
print(json.dumps({"version": vllm.__version__, "platform": type(current_platform).__name__}))
"""
_PROBE_NIXL = """
import json
from kvshuttle.errors import KvshuttleError
from kvshuttle.transport.nixl import NixlTransport, plugin_names
names = plugin_names()
backends = {}
for backend in ("UCX", "LIBFABRIC"):
    try:
        NixlTransport(name="doctor", backends=(backend,)).close()
        backends[backend] = ""
    except KvshuttleError as error:
        backends[backend] = str(error)
print(json.dumps({"plugins": names, "backends": backends}))
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a package said of itself, or why it could not."""

    facts: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One entry of ``/sys/class/infiniband``. ``driver``: e.g. mlx5_core or efa. ``active_ports``: those up."""

    name: str
    driver: str
    num_ports: int
    active_ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the doctor judges."""

    python: tuple[int, int]
    system: str
    architecture: str
    num_cores: int
    num_gpus: int
    shm_bytes: int
    memlock_bytes: int
    """-1 for no limit."""
    torch: Probe
    vllm: Probe
    nixl: Probe
    devices: tuple[NetworkDevice, ...]
    has_device_files: bool
    """Whether ``/dev/infiniband`` is there; containers often see the devices but not the files."""
    has_gpu_rdma: bool
    fabric_providers: tuple[str, ...] | None
    """libfabric's providers as ``fi_info`` lists them; None without the tool."""
    ucx_env: Mapping[str, str]
    secret_error: str = ""
    """Why the side channel's secret cannot be used; "" when it can or is not set."""


def survey(env: Mapping[str, str]) -> Facts:
    """Look at this machine. Takes some seconds: packages are imported."""
    machine = this_machine()
    with ThreadPoolExecutor() as pool:
        torch, vllm, nixl = pool.map(lambda script: _probe(script, env), (_PROBE_TORCH, _PROBE_VLLM, _PROBE_NIXL))
    return Facts(
        python=(sys.version_info[0], sys.version_info[1]),
        system=platform.system(),
        architecture=platform.machine(),
        num_cores=len(machine.cores),
        num_gpus=len(machine.gpus),
        shm_bytes=_shm_bytes(),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        torch=torch,
        vllm=vllm,
        nixl=nixl,
        devices=network_devices(Path("/sys/class/infiniband")),
        has_device_files=Path("/dev/infiniband").is_dir(),
        has_gpu_rdma=Path("/sys/module/nvidia_peermem").is_dir() or Path("/dev/gdrdrv").exists(),
        fabric_providers=_fabric_providers(env),
        ucx_env={key: value for key, value in env.items() if key.startswith("UCX_")},
        secret_error=_secret_error(env),
    )


def network_devices(root: Path) -> tuple[NetworkDevice, ...]:
    """RDMA-capable devices under ``root``, which is ``/sys/class/infiniband`` outside of tests."""
    if not root.is_dir():
        return ()
    found = []
    for device in sorted(root.iterdir()):
        driver = device / "device" / "driver"
        ports = sorted((device / "ports").iterdir()) if (device / "ports").is_dir() else []
        active = tuple(
            f"port {port.name}: {_read(port / 'link_layer')} {_read(port / 'rate')}".strip()
            for port in ports
            if "ACTIVE" in _read(port / "state")
        )
        found.append(NetworkDevice(device.name, driver.resolve().name if driver.exists() else "", len(ports), active))
    return tuple(found)


def providers_in(text: str) -> tuple[str, ...]:
    """Providers that ``fi_info -l`` lists: the lines that are not indented."""
    names = [line.rstrip().rstrip(":") for line in text.splitlines() if line and not line[0].isspace()]
    return tuple(names)


def _probe(script: str, env: Mapping[str, str]) -> Probe:
    argv = [sys.executable, "-c", script]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            env=dict(env),
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer within {_PROBE_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        try:
            # Libraries print banners; our line is the last.
            return Probe(json.loads(done.stdout.strip().splitlines()[-1]))
        except (json.JSONDecodeError, IndexError):
            return Probe({}, f"an answer that is no JSON: {done.stdout[-200:]!r}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Probe({}, "\n".join(lines[-_NUM_ERROR_LINES:]) or f"exit code {done.returncode}")


def _secret_error(env: Mapping[str, str]) -> str:
    try:
        secret_from(env)
    except ConfigError as error:
        return str(error)
    return ""


def _fabric_providers(env: Mapping[str, str]) -> tuple[str, ...] | None:
    tool = shutil.which("fi_info", path=f"{env.get('PATH', '')}:/opt/amazon/efa/bin")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "-l"], capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return providers_in(done.stdout)


def _shm_bytes() -> int:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - its size is asked for, nothing is written
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
