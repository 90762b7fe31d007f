"""The batch of a step, as vLLM's model runner and its attention metadata tell it."""

from __future__ import annotations

from typing import Any

from kvshuttle.emulate.steps import BatchRow


def rows_of(batch: Any, metadata: Any) -> list[BatchRow]:
    """Where each request's blocks lie, and which of its tokens are new.

    ``batch``: the runner's input batch. ``metadata``: that of any attention layer.
    """
    num_reqs = batch.num_reqs
    ends = metadata.seq_lens[:num_reqs].tolist()
    starts_in_batch = metadata.query_start_loc[: num_reqs + 1].tolist()
    block_tables = metadata.block_table[:num_reqs].numpy()
    rows = []
    for index, end in enumerate(ends):
        num_new = starts_in_batch[index + 1] - starts_in_batch[index]
        rows.append(
            BatchRow(
                request_id=batch.req_ids[index],
                start=end - num_new,
                end=end,
                num_prompt_tokens=int(batch.num_prompt_tokens[index]),
                token_ids=batch.token_ids_cpu[index, :end],
                prompt_token_ids=batch.token_ids_cpu[index, : int(batch.num_prompt_tokens[index])],
                block_ids=block_tables[index],
                last_index=starts_in_batch[index + 1] - 1,
            )
        )
    return rows
