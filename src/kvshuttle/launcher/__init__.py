"""Starts prefill engines, decode engines and the router on this machine, and looks after them.

``plan`` decides (pure), ``processes`` and ``fleet`` do, ``up`` and ``demo`` are what a person runs. ``model``
fetches the bundled model, ``doctor`` says what this machine can do. Nothing here imports vLLM, torch or NIXL.
"""
