"""vLLM is imported once, before any test file does it with warnings as errors."""

from support import quiet_vllm  # noqa: F401
