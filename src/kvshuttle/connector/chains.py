"""Token chains of vLLM's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.blocks import TokenChain, token_chain
from kvshuttle.connector import vllm_compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request


def prompt_chain(request: Request, block_size_tokens: int) -> TokenChain | None:
    """Names the prompt; None for one that is not made of tokens."""
    return _chain(request, request.prompt_token_ids, block_size_tokens)


def settled_chain(request: Request, block_size_tokens: int, prompt: TokenChain | None = None) -> TokenChain | None:
    """Names those full blocks of prompt and answer, of a request that is over, that certainly have their KV.

    ``prompt``: its prompt's chain, where it is known already; a long one takes milliseconds of the engine's thread.
    """
    num_tokens = vllm_compat.num_settled_tokens(request) // block_size_tokens * block_size_tokens
    return _chain(request, request.all_token_ids[:num_tokens], block_size_tokens, prompt)


def _chain(
    request: Request, token_ids: Sequence[int] | None, block_size_tokens: int, known: TokenChain | None = None
) -> TokenChain | None:
    if not token_ids or getattr(request, "prompt_embeds", None) is not None:
        return None
    return token_chain(token_ids, block_size_tokens, vllm_compat.content_identity(request), known=known)
