"""What a value must be to be a setting."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

MOST_TOKENS = 1_000_000_000
MOST_BLOCKS = 1_000_000_000
_MOST = {
    "s": 1_000_000_000,  # 31 years
    "ttl": 1_000_000_000,
    "ms": 1_000_000,
    "minutes": 100_000,
    "gib": 100_000,
    "bytes": 1_000_000_000_000,
    "tokens": MOST_TOKENS,
    "contexts": MOST_TOKENS,
    "len": MOST_TOKENS,
    "chunk_tokens": 1_000_000,  # vLLM makes room for as many
    "blocks": MOST_BLOCKS,
    "seed": 2**32 - 1,  # what random generators of others take
    "seeds": 2**32 - 1,
    "prefill": 1_000,
    "decode": 1_000,
    "concurrency": 1_000,
    "background": 1_000,
    "overload": 100,
    "calm": 100,
}
"""By a setting's name or the last part of it. Beyond what anybody uses, and near enough that nothing overflows."""
_LIMIT_WORDS = {"max", "from", "threshold"}
"""In the names of settings that are limits themselves, where a large number says that there is none."""
_MOST_OF_LIMITS = 2**63 - 1
_MOST_COUNTED = 10_000
_MOST_MEASURED = 1_000_000
_LEAST_MEASURED = 1e-6
_LONGEST_SHOWN = 40
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def is_duration(value: object) -> bool:
    """Seconds above 0, finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def is_int(value: object) -> bool:
    """A whole number; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_numbers(config: DataclassInstance, shown_as: Callable[[str], str] = str) -> None:
    """Look at every number of a configuration, also those in lists; what is no number is left to others.

    ``shown_as``: what whoever gives a setting calls it. Raises ``ConfigError`` naming the setting and its bound.
    """
    for knob in fields(config):
        value = getattr(config, knob.name)
        for each in value if isinstance(value, tuple | list) else (value,):
            check_number(knob.name, each, shown_as(knob.name), is_measured="float" in str(knob.type))


def check_number(name: str, value: object, shown_as: str = "", *, is_measured: bool = False) -> None:
    """Raises ``ConfigError`` for a number that is infinite, or out of all proportion for a setting of this name.

    ``is_measured``: it need not be whole.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or name.endswith("port"):
        return  # ports have bounds of their own, with both ends
    field = shown_as or name
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field}: a finite number, got {value:g}")
    most = _most(name, is_measured=is_measured)
    if value > most:
        raise ConfigError(f"{field}: up to {most:,}, got {shortened(value)}")
    if isinstance(value, float) and 0 < value < _LEAST_MEASURED:
        raise ConfigError(f"{field}: {_LEAST_MEASURED:f} or more, got {value:g}")


def check_dtype(field: str, value: str) -> None:
    """Raises ``ConfigError`` for what vLLM's ``--dtype`` does not take: engines would die of it a minute later."""
    if value not in _DTYPES:
        raise ConfigError(f"{field}: one of {', '.join(_DTYPES)}, got {shortened(repr(value))}")


def shortened(value: object) -> str:
    """A value as messages show it."""
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def _most(name: str, *, is_measured: bool) -> int:
    words = name.split("_")
    if _LIMIT_WORDS.intersection(words) and words[-1] not in ("s", "len"):
        return _MOST_OF_LIMITS
    for part in (name, words[-1]):
        if part in _MOST:
            return _MOST[part]
    return _MOST_MEASURED if is_measured else _MOST_COUNTED
