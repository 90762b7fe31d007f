"""How an emulated engine is told what to do: a part of vLLM's ``--additional-config``."""

from __future__ import annotations

from typing import Any

CONFIG_KEY = "kvshuttle_emulate"
"""Our part of ``--additional-config``."""


def additional_config(
    *, trace_dir: str | None = None, nixl_progress_thread: bool | None = None, nixl_progress_pause_us: int | None = None
) -> dict[str, Any]:
    """The value of ``--additional-config``.

    ``trace_dir``: where each worker writes ``worker-PID.jsonl``. ``nixl_progress_thread``: False switches it off in
    vLLM's own connectors, which have no option for it; None leaves them alone.
    ``nixl_progress_pause_us``: has it pause between two looks instead of spinning.
    """
    values = {
        "trace_dir": trace_dir,
        "nixl_progress_thread": nixl_progress_thread,
        "nixl_progress_pause_us": nixl_progress_pause_us,
    }
    return {CONFIG_KEY: {key: value for key, value in values.items() if value is not None}}
