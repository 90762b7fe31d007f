"""What every test gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _untouched_loggers() -> Iterator[None]:
    """The connector lends vLLM's handlers to the package's logger, and importing vLLM may set those up in any test."""
    _reset("kvshuttle", "vllm")
    yield
    _reset("kvshuttle", "vllm")


def _reset(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
