"""The OpenAI-compatible gateway: one client request becomes a prefill leg and a decode leg."""
