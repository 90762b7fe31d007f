"""Hypothesis profiles: ``quick`` by default; ``HYPOTHESIS_PROFILE=long`` runs thousands of examples.

``hunt`` says as soon as it can whether a deliberately broken machine is caught, without shrinking the story.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "quick", max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "long",
    max_examples=5000,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    print_blob=True,
)
settings.register_profile("hunt", settings.get_profile("long"), phases=[Phase.generate], max_examples=20000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
