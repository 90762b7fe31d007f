"""What every test gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _untouched_loggers() -> Iterator[None]:
    """Other code's logging set-up must not reach the next test.

    The connector lends vLLM's handlers to our logger, importing vLLM sets those up, and a ``dictConfig`` of a tool
    disables loggers that exist already.
    """
    _reset_loggers()
    yield
    _reset_loggers()


def _reset_loggers() -> None:
    logging.disable(logging.NOTSET)
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in {"kvshuttle", "vllm"}:
            logger = logging.getLogger(name)
            logger.handlers = []
            if logger.level != logging.NOTSET:
                # Setting a level clears the caches of all loggers there are: not for each of vLLM's hundreds.
                logger.setLevel(logging.NOTSET)
            logger.propagate = True
            logger.disabled = False
