"""Every way in which an engine may fail a leg before the client sees anything of it."""

from support.fake_engine import (
    Behaviour,
    hang,
    hang_after_headers,
    reset_after_headers,
    reset_before_headers,
    status,
    stream,
)

ERROR_500 = b'data: {"error":{"message":"load failed","type":"InternalServerError","param":null,"code":500}}\n\n'

FAULTS: dict[str, Behaviour] = {
    "500": status(500),
    "503": status(503),
    "reset_before_headers": reset_before_headers,
    "reset_after_headers": reset_after_headers,
    "no_http": lambda call: call.send(b"rubbish\r\n\r\n"),
    "odd_status": status(302),
}
"""At once, of any leg."""
EARLY_DECODE_FAULTS: dict[str, Behaviour] = {
    **FAULTS,
    "error_event_first": stream([ERROR_500, b"data: [DONE]\n\n"]),
    "comment_then_error": stream([b": ping\n\n", ERROR_500]),
    "empty_stream": stream([]),
    "comments_only": stream([b": ping\n\n"]),
    "reset_in_first_event": stream([b"data: {"], then="reset"),
}
"""At once, of a streamed decode leg."""
PREFILL_FAULTS: dict[str, Behaviour] = {**FAULTS, "hang": hang}
DECODE_FAULTS: dict[str, Behaviour] = {**EARLY_DECODE_FAULTS, "hang_after_headers": hang_after_headers, "hang": hang}
