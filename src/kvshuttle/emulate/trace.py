"""The trace of an emulated engine: one JSON line for each forward pass, on the host's monotonic clock.

Engines of one host share that clock, so the time between the last forward pass of one and the first of another can be
told. Request ids differ between engines; ``PassedRequest.key`` does not, it is made of the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class PassedRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request in a forward pass: positions ``[start, end)`` of it were computed."""

    key: str
    start: int
    end: int
    num_prompt_tokens: int
    wrong_at: int = -1
    """First position whose KV was found wrong; -1 for none."""

    @property
    def ends_prompt(self) -> bool:
        """This pass computed the prompt's last token."""
        return self.start < self.num_prompt_tokens <= self.end


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass: instants in seconds, and how long it takes by the profile, beside the neighbours it had."""

    start_s: float
    end_s: float
    planned_s: float
    busy_s: float
    """CPU work of the emulation itself inside the pass: stamps written and checked."""
    requests: tuple[PassedRequest, ...]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Pass)


def append_pass(path: Path, forward: Pass) -> None:
    """Append one pass to ``path``. A killed engine's trace ends with its last whole pass."""
    with path.open("ab") as file:
        file.write(_ENCODER.encode(forward) + b"\n")


def read_trace(path: Path, *, offset: int = 0) -> tuple[list[Pass], int]:
    """The passes that stand in ``path`` from byte ``offset`` on, and the offset behind the last whole line."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [_DECODER.decode(line) for line in data[:end].splitlines()], offset + end


def prompt_ends(passes: Sequence[Pass]) -> dict[str, float]:
    """By prompt: when the forward pass ended that computed its last token (the first such pass)."""
    ends: dict[str, float] = {}
    for forward, request in _flat(passes):
        if request.ends_prompt:
            ends.setdefault(request.key, forward.end_s)
    return ends


def first_passes(passes: Sequence[Pass]) -> dict[str, Pass]:
    """By prompt: the first forward pass with it."""
    first: dict[str, Pass] = {}
    for forward, request in _flat(passes):
        first.setdefault(request.key, forward)
    return first


def _flat(passes: Sequence[Pass]) -> Iterator[tuple[Pass, PassedRequest]]:
    for forward in passes:
        for request in forward.requests:
            yield forward, request
