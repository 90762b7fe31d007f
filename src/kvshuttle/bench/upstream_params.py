"""`kv_transfer_params` as vLLM's own NIXL connectors read them, for whoever drives their two legs. Pure."""

from __future__ import annotations

from typing import Any


def upstream_prefill_params() -> dict[str, Any]:
    """The prefill leg's, for pull and push: compute the prompt and hold it for a decode engine."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"do_remote_decode": True, "do_remote_prefill": False, **remote}


def upstream_push_params(request_id: str, engine_id: str, side_address: str) -> dict[str, Any]:
    """The decode leg's, for push, where nobody waits for the prefill leg's answer, which would say the same for pull.

    ``request_id``: the ``x-request-id`` that both legs carry, by which the engines match them. ``side_address``:
    ``host:port`` of the prefill engine's side channel.
    """
    host, _, port = side_address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": int(port),
        # How vLLM's completion API names the one prompt of a request.
        "remote_request_id": f"cmpl-{request_id}-0",
        "remote_block_ids": None,
        "tp_size": 1,
        "pp_size": 1,
    }
