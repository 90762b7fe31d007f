"""Measures hand-offs on real engines, ours beside vLLM's own connectors, and writes what anyone can run again."""
