"""Checks of the span arrays that every transport takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.errors import LocalProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_spans(spans: NDArray[np.int64]) -> None:
    """Raise ``LocalProtocolError`` unless ``spans`` is int64 (n >= 1, 2) of positive addresses and lengths."""
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2 or not len(spans):
        raise LocalProtocolError(f"spans are int64 of shape (n >= 1, 2), not {spans.dtype} of shape {spans.shape}")
    if spans.min() <= 0:
        raise LocalProtocolError("a span has a positive address and a positive length")


def check_pairs(local: NDArray[np.int64], remote: NDArray[np.int64]) -> int:
    """Total bytes of a transfer. Raises ``LocalProtocolError`` unless local[i] and remote[i] pair up by length."""
    check_spans(local)
    check_spans(remote)
    if local.shape != remote.shape or not np.array_equal(local[:, 1], remote[:, 1]):
        raise LocalProtocolError(f"{len(local)} local and {len(remote)} remote spans do not pair up by length")
    return int(local[:, 1].sum())
