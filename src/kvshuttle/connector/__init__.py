"""The vLLM connector: the only folder (with ``emulate/``) that knows vLLM and torch.

vLLM imports ``connector.connector`` in three processes: the API server (metrics only), the engine core
(scheduler half) and each worker (worker half). Importing it must stay cheap and free of NIXL.
"""
