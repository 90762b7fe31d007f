"""Whether what a benchmark asks for fits its engines: known before they start, or they would die of it or wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvRoom:
    """KV memory of one engine. ``named_by``: the setting that says how large it is."""

    named_by: str
    kv_gib: int
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.kv_gib * _GIB // self.bytes_per_token

    def check(self, num_tokens: int, taken_by: str, advice: str) -> None:
        """Raises ``ConfigError`` where ``taken_by``, which takes ``num_tokens`` at a time, does not fit."""
        if num_tokens > self.num_tokens:
            raise ConfigError(
                f"{self.named_by}: holds {self.num_tokens} tokens of {self.bytes_per_token} bytes, but {taken_by}"
                f" {num_tokens}; give it more, or {advice}"
            )


def check_length(most_tokens: int, num_tokens: int, *, named_by: Sequence[str], model: str) -> None:
    """Raises ``ConfigError`` for requests longer than ``model`` takes. ``most_tokens``: 0 where that is not known."""
    if 0 < most_tokens < num_tokens:
        raise ConfigError(
            f"{', '.join(named_by)}: requests may come to {num_tokens} tokens, and {model} takes {most_tokens};"
            " give smaller ones"
        )


def check_chunk(chunk_tokens: int, num_slots: int, *, named_by: str) -> None:
    """Raises ``ConfigError`` for steps with fewer tokens than an engine runs requests at a time: vLLM refuses them."""
    if chunk_tokens < num_slots:
        raise ConfigError(
            f"{named_by}: {num_slots} or more, a token for each request that an engine runs at a time, got"
            f" {chunk_tokens}"
        )
