"""Writes a profile as the TOML that ``load_profile`` reads."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from kvshuttle.emulate.profile import Profile

_LINE_WIDTH = 118


def profile_toml(profile: Profile) -> str:
    """The file's text. Raises ``ConfigError`` where the provenance cannot stand in a text of several lines."""
    if '"""' in profile.provenance or "\\" in profile.provenance:
        raise ConfigError(f"provenance: no backslash and no three quotes, got {profile.provenance!r}")
    geometry, prefill, decode = profile.geometry, profile.prefill, profile.decode
    rows = "".join(f"    {json.dumps(list(row))},\n" for row in decode.steps_ms)
    paragraphs = "\n".join(textwrap.fill(line, _LINE_WIDTH) for line in profile.provenance.strip().splitlines())
    return (
        f'name = {json.dumps(profile.name)}\nprovenance = """\n{paragraphs}\n"""\n\n'
        f"[geometry]\nnum_layers = {geometry.num_layers}\nnum_kv_heads = {geometry.num_kv_heads}\n"
        f"head_dim = {geometry.head_dim}\ndtype = {json.dumps(geometry.dtype)}\n\n"
        f"[prefill]\nfixed_ms = {prefill.fixed_ms}\nper_token_ms = {prefill.per_token_ms}\n"
        f"per_token_squared_ms = {prefill.per_token_squared_ms}\n\n"
        f"[decode]\nbatches = {json.dumps(list(decode.batches))}\ncontexts = {json.dumps(list(decode.contexts))}\n"
        f"steps_ms = [\n{rows}]\n{_contention_table(profile)}"
    )


def _contention_table(profile: Profile) -> str:
    shared = profile.contention
    return f"\n[contention]\nprefill = {shared.prefill}\ndecode = {shared.decode}\n" if shared else ""
