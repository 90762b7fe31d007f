"""Makes the locked environment in .venv: `python3 scripts/setup.py [--dev]`. Needs Python 3.11 or later, nothing else.

Runs in under a second when there is nothing to do. Interrupted, it goes on where it was. Stages are stamped one by
one in .venv; a stage that was cut off in the middle is installed over, since pip may have left half a package.
"""

# This file must stay readable for old Pythons down to the version check: no new syntax, no annotations to evaluate.
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the reader may have an older one
    sys.exit(
        "kvshuttle needs Python 3.11 or later, and this is Python %d.%d (%s).\n"  # noqa: UP031
        "Name another one:  make PYTHON=python3.11 serve" % (sys.version_info[0], sys.version_info[1], sys.executable)
    )

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvshuttle-setup.json"
LOG = VENV / "kvshuttle-setup.log"
LOCKS = ROOT / "requirements"
RECIPE = 1
NEEDED_BYTES = 4 * 1024**3
HEARTBEAT_S = 10.0
TORCH_INDEX = "KVSHUTTLE_TORCH_INDEX_URL"


class SetupError(Exception):
    """Shown to the person as it is."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the locked environment in .venv.")
    parser.add_argument("--dev", action="store_true", help="also install what checks and tests need")
    args = parser.parse_args()
    started_at_s = time.monotonic()
    try:
        with (ROOT / ".setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            num_done = run_stages(stages_for(is_dev=args.dev))
    except SetupError as error:
        sys.stderr.write(f"\nsetup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nsetup: interrupted; the same command goes on from here\n")
        return 130
    if num_done:
        say(f"environment ready in {time.monotonic() - started_at_s:.0f} s: {VENV}")
    return 0


def stages_for(*, is_dev):
    """(name, what it depends on, what does it), in order."""
    stages = [
        ("torch", lock_text("torch.lock") + os.environ.get(TORCH_INDEX, ""), install_torch),
        ("vLLM, NIXL and what they need", lock_text("cpu.lock"), lambda force: install_lock("cpu.lock", force)),
        ("kvshuttle", (ROOT / "pyproject.toml").read_text() + str(ROOT), install_project),
    ]
    if is_dev:
        stages.insert(2, ("test tools", lock_text("dev.lock"), lambda force: install_lock("dev.lock", force)))
    return stages


def run_stages(stages) -> int:
    """Bring every stage up to date; returns how many had to be."""
    make_venv()
    stamp = read_stamp()
    num_done = 0
    for number, (name, depends_on, install) in enumerate(stages, start=1):
        digest = hashlib.sha256(f"{RECIPE} {depends_on}".encode()).hexdigest()
        if stamp.get(name) == digest:
            continue
        was_cut_off = stamp.get("in progress") == name
        stamp.pop(name, None)
        write_stamp({**stamp, "in progress": name})
        say(f"[{number}/{len(stages)}] installing {name}" + (" (again: it was interrupted)" if was_cut_off else ""))
        install(was_cut_off)
        stamp = {**stamp, name: digest}
        stamp.pop("in progress", None)
        write_stamp(stamp)
        num_done += 1
    return num_done


def make_venv() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # Without a stamp its making may have been interrupted before pip was there.
    probe = "import sys; print('%d.%d' % sys.version_info[:2])" + ("" if STAMP.exists() else "; import pip")
    found = output_of([str(PYTHON), "-c", probe])
    if found == version:
        return
    if found:
        say(f".venv is of Python {found}, and this is {version}: making it anew")
    if platform.system() != "Linux":
        raise SetupError(
            f"vLLM's CPU engines need Linux, and this is {platform.system()}. Use a Linux machine, VM or container."
        )
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < NEEDED_BYTES:
        raise SetupError(
            f"{free_bytes / 1e9:.1f} GB are free in {ROOT}; the environment needs {NEEDED_BYTES / 1e9:.0f} GB."
        )
    say(f"making {VENV} with Python {platform.python_version()}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            f"`python -m venv` failed:\n{(made.stdout + made.stderr).strip()}\n"
            f"On Debian and Ubuntu the module comes apart: apt-get install python{version}-venv"
        )


def install_torch(force) -> None:
    """The CPU build if it can be had; else the package index's own build with the libraries it loads."""
    index = os.environ.get(TORCH_INDEX)
    if index:
        install_lock("torch.lock", force, "--index-url", index)
        return
    # The plain name finds the CPU build where a mirror or a local folder offers it, and on other machines
    # than x86-64, where it is the package index's own build.
    install_lock("torch.lock", force)
    version = output_of([str(PYTHON), "-c", "from importlib.metadata import version; print(version('torch'))"])
    if version.endswith("+cpu") or platform.machine() != "x86_64":
        return
    say(
        "      this is torch's CUDA build, which also runs on the CPU but loads 3 GB of libraries; fetching them.\n"
        f"      To save that, stop here and set {TORCH_INDEX} to PyTorch's CPU wheel index."
    )
    install_lock("torch-cuda-libs.lock", force)


def install_lock(name, force, *options) -> None:
    num_packages = sum(1 for line in lock_text(name).splitlines() if line and not line.startswith("#"))
    again = ["--force-reinstall"] if force else []
    # Compiling all of it would take a minute or two; Python compiles what it imports.
    pip(["install", "--no-deps", "--no-compile", *again, *options, "-r", str(LOCKS / name)], num_packages)


def install_project(force) -> None:
    del force
    pip(["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], 1)


def pip(arguments, num_packages) -> None:
    """Run pip with its output in the log, and show how far it is."""
    argv = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    lines = []
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(argv)}\n")
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        reader = threading.Thread(target=collect, args=(process.stdout, lines, log), daemon=True)
        reader.start()
        try:
            show_until_done(reader, lines, num_packages)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            reader.join()
    if code != 0:
        raise SetupError(failure_notice(lines))


def show_until_done(reader, lines, num_packages) -> None:
    started_at_s = time.monotonic()
    is_terminal = sys.stdout.isatty()
    while reader.is_alive():
        reader.join(timeout=1.0 if is_terminal else HEARTBEAT_S)
        if reader.is_alive():
            text = f"      {progress_of(lines, num_packages)}, {time.monotonic() - started_at_s:.0f} s"
            sys.stdout.write(f"\r\x1b[K{text[:100]}" if is_terminal else f"{text}\n")
            sys.stdout.flush()
    if is_terminal:
        sys.stdout.write("\r\x1b[K")


def collect(stream, lines, log) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip())
            log.write(line)


def progress_of(lines, num_packages) -> str:
    if any(line.startswith("Installing collected packages") for line in lines):
        return f"unpacking {num_packages} packages"
    num_collected = sum(1 for line in lines if line.startswith(("Collecting ", "Requirement already satisfied")))
    latest = next((line.split()[1] for line in reversed(lines) if line.startswith("Collecting ")), "")
    return f"fetching {num_collected} of {num_packages}: {latest}" if latest else "asking the package index"


def failure_notice(lines) -> str:
    text = "\n".join(line for line in lines[-30:] if line)
    known = [
        ("No space left on device", "The disk is full. Free 4 GB and run the same command again."),
        ("No matching distribution found for torch", f"Set {TORCH_INDEX} to PyTorch's CPU wheel index and run again."),
        (
            "No matching distribution found",
            "No build of that package for this Python or machine: the lock is for Linux on x86-64 and Python 3.11"
            " or 3.12 (make PYTHON=python3.11 …).",
        ),
        (
            "Connection",
            "The package index cannot be reached. Check the network (PIP_INDEX_URL, HTTPS_PROXY) and run again.",
        ),
        ("Read timed out", "The network is slow. The same command goes on from here."),
        ("DO NOT MATCH THE HASHES", "A download is damaged. Run the same command again."),
    ]
    advice = next(
        (advice for sign, advice in known if sign in text), "The same command goes on from here once that is fixed."
    )
    return f"pip failed; the end of {LOG}:\n{text}\n=> {advice}"


def lock_text(name) -> str:
    return (LOCKS / name).read_text()


def read_stamp():
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(stamp) -> None:
    part = STAMP.with_suffix(".part")
    part.write_text(json.dumps(stamp, indent=2))
    part.replace(STAMP)


def output_of(argv) -> str:
    """What a command prints; "" when it fails or does not exist."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def say(text) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
