"""Environment variables that one part sets and another one reads."""

QUIET_WAITS_VARIABLE = "KVSHUTTLE_QUIET_WAITS"
"""``1``: vLLM's processes sleep while they wait for each other. Anything else leaves vLLM as it is."""
