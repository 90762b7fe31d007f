"""What every test gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    """The connector redirects the package's logger to vLLM's handlers, which must not outlive its test."""
    logger = logging.getLogger("kvshuttle")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers = handlers
    logger.setLevel(level)  # not by assignment: loggers cache what is enabled
    logger.propagate = propagate
