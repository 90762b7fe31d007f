"""Fixtures that need more than one test file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.engine_pair import EnginePair


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., EnginePair]]:
    """Makes pairs of in-process engines (see ``EnginePair``) and stops them afterwards."""
    from support.engine_pair import EnginePair

    pairs: list[EnginePair] = []

    def make(**fields: Any) -> EnginePair:
        pairs.append(EnginePair(tmp_path, **fields))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.shutdown()
