"""What every test gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    """Each test starts with an untouched logger: the connector redirects the package's to vLLM's handlers."""
    logger = logging.getLogger("kvshuttle")
    _reset(logger)
    yield
    _reset(logger)


def _reset(logger: logging.Logger) -> None:
    logger.handlers = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
