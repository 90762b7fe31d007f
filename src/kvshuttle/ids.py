"""Names for the things that cross process borders.

Every id is text, so that it can be logged, put into JSON and compared. The types exist for the
type checker: a transfer id handed over where an engine id is wanted is an error before it runs.
"""

from __future__ import annotations

import secrets
from typing import NewType

EngineId = NewType("EngineId", str)
"""One engine process group as the router and its peers name it (vLLM's ``engine_id``)."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine: a restart at the same address is a new incarnation."""

RequestId = NewType("RequestId", str)
"""vLLM's engine-internal request id. It never leaves the engine."""

TransferId = NewType("TransferId", str)
"""One dispatch of one request, minted by the router; a retry gets a fresh one."""

Handle = NewType("Handle", str)
"""What a holder keeps KV under. For a hand-off it equals the transfer id."""

LeaseId = NewType("LeaseId", str)
"""One reader's right to read what a handle names, until it is released or expires."""


def mint(prefix: str) -> str:
    """A fresh random id, e.g. ``xfer-9f…``: 96 random bits, so collisions do not happen."""
    return f"{prefix}-{secrets.token_hex(12)}"
