"""What a benchmark of conversations writes down: turns, looks at the engines' memory, finished cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.record_file import read_finished, resume_finished

if TYPE_CHECKING:
    from pathlib import Path


class _OfCell(msgspec.Struct, frozen=True):
    """In which cell it was measured."""

    cell: str
    """``TurnsCell.name``."""

    @property
    def cell_key(self) -> str:
        """Names the cell."""
        return self.cell

    @property
    def ends_cell(self) -> bool:
        """Whether it says that the cell is whole."""
        return isinstance(self, TurnsCellDone)


class TurnRecord(_OfCell, frozen=True, tag="turn", kw_only=True):
    """One turn of one conversation. Seconds are the client's unless they are said to be the router's."""

    conversation: int
    turn: int
    """From 1 on."""
    sent_at_s: float
    """After the cell's start."""
    prompt_digest: str
    """Of all messages that were sent."""
    error: str = ""
    """Why it does not count; "" when it does. No turn follows it."""
    request_id: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    ttft_s: float = 0.0
    """From sending to the first text; -1 where the answer was not streamed."""
    total_s: float = 0.0
    answer_digest: str = ""
    is_wrong: bool = False
    """An emulated engine says that its KV was wrong."""
    prefill_s: float = -1.0
    """The router's: from sending the prefill leg to its answer; -1 for no leg, or none that was answered in time."""
    stages_s: dict[str, float] = {}
    """The router's, all of them."""
    cached_tokens: int = 0
    """Tokens of the prompt that P did not compute for this request: it had them, or got them from D."""
    mode: str = ""
    history: str = ""
    """What the router says became of it."""
    failures: list[str] = []
    """Legs that failed, as the router says it."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None for an answer without any, or one that was not streamed."""
        is_told = self.answer_tokens > 1 and self.ttft_s >= 0
        return (self.total_s - self.ttft_s) / (self.answer_tokens - 1) if is_told else None

    @property
    def computed_tokens(self) -> int | None:
        """Tokens of the prompt that P computed; None where it has not answered."""
        return self.prompt_tokens - self.cached_tokens if self.prefill_s >= 0 else None


class MemoryRecord(_OfCell, frozen=True, tag="memory"):
    """A look at both engines' memory, as of their last steps."""

    at_s: float
    """After the cell's start."""
    retained_blocks: int
    """Kept on D for later turns."""
    held_blocks: int
    """Kept on P for readers."""
    prefill_usage: float
    """Part of P's pool that is in use."""
    decode_usage: float
    """Part of D's pool that is in use, with what it keeps."""


class TurnsCellDone(_OfCell, frozen=True, tag="done", kw_only=True):
    """All turns of a cell are written. Token counts are of its whole time, by the engines' own counters."""

    duration_s: float
    prefill_blocks: int
    """P's pool."""
    decode_blocks: int
    """D's pool."""
    block_size_tokens: int
    block_len_bytes: int
    local_hit_tokens: int
    """Of prompts on P: what it had itself."""
    history_tokens: int
    """Of prompts on P: what it got from D."""
    preemptions: int
    """On both."""
    load_average: float
    """The machine's, over the minute before the end."""


Record = TurnRecord | MemoryRecord | TurnsCellDone

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def read_turn_records(path: Path) -> list[Record]:
    """All records of finished cells in a run's file, or in the same one compressed."""
    return read_finished(path, _DECODER)


def resume_turn_records(path: Path) -> list[Record]:
    """The same for a run that goes on: ``resume_finished``."""
    return resume_finished(path, _DECODER)
