"""kvshuttle: moves KV cache between vLLM prefill and decode engines, both ways."""

__version__ = "0.1.0"
