"""How far a run has come, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvshuttle.clock import now_s


@dataclass(slots=True)
class Countdown:
    """``num_cells``: those to measure. Time runs from its making, so starts of engines count."""

    num_cells: int
    num_done: int = 0
    _started_at_s: float = field(default_factory=now_s)

    def __repr__(self) -> str:
        return f"<Countdown {self.num_done} of {self.num_cells}>"

    def cell_done(self) -> str:
        """One more is measured: how long the others will take, for a person."""
        self.num_done += 1
        left_s = (now_s() - self._started_at_s) / self.num_done * (self.num_cells - self.num_done)
        return f"about {left_s / 60:.0f} min left"
