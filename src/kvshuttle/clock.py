"""The monotonic clock of drivers. The pure floors may not import it: they take ``now_s``."""

from __future__ import annotations

import time


def now_s() -> float:
    """Seconds on this process's monotonic clock. Never send the value to another process."""
    return time.monotonic()
