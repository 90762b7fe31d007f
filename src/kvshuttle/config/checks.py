"""What a value must be to be a setting."""

from __future__ import annotations

import sys


def is_duration(value: object) -> bool:
    """Seconds above 0, finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def is_int(value: object) -> bool:
    """A whole number; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)
