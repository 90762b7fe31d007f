"""The ends of log files, and what a well-known last line means."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_TAIL_LEN_BYTES = 64 * 1024

_ADVICE: tuple[tuple[str, str], ...] = (
    (r"[Aa]ddress already in use", "another process has the port; stop it, or choose another port"),
    (
        r"[Oo]ut of memory|OutOfMemory|Cannot allocate memory|No available memory for the cache blocks",
        "memory ran out; lower --kv-cache-gib, start fewer engines or use a smaller model",
    ),
    (
        r"KV cache is needed, which is larger than|larger than the maximum number of tokens",
        "one request of full length does not fit the KV cache; lower --max-model-len or raise --kv-cache-gib",
    ),
    (
        r"PackageNotFoundError: .*vllm",
        "vLLM's own console script is broken in this build; start engines through `kvshuttle up`",
    ),
    (
        r"torchvision::nms does not exist",
        "torchvision does not fit this torch; run `pip uninstall torchvision torchaudio torchcodec`",
    ),
    (
        r"No module named '?(?:torch|vllm)",
        "the engine's packages are missing; run `make serve`, or see the README's install section",
    ),
    (
        r"NIXL is not available|No module named '?nixl",
        "NIXL is missing; install the package nixl-cu12, and for vLLM's own connectors nixl, without its dependencies",
    ),
    (
        r"unrecognized arguments: (.*)",
        "vLLM does not know an argument; check --engine-arg, --prefill-arg and --decode-arg",
    ),
    (r"ConfigError: (.*)", "a setting of kvshuttle is wrong; the message names it"),
    (
        r"not a valid model identifier|does not appear to have a file named config\.json",
        "--model is not a model directory",
    ),
)


def tail_of(path: Path, *, num_lines: int) -> str:
    """The last ``num_lines`` lines of a text file, or a note that there is none. Reads at most 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_LEN_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    # Progress bars rewrite their line with carriage returns; only what was left standing is worth showing.
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-num_lines:])


def advice_for(text: str) -> str | None:
    """What to do about a failure whose log ends in ``text``; None when it is not a known one."""
    for pattern, advice in _ADVICE:
        if re.search(pattern, text):
            return advice
    return None
