"""By what a request's conversation is known: who asks for which model, under which name, and how the prompt begins.

A client resends its whole conversation with each turn, so the prompt of a turn is a beginning of the prompt of the
next one. A *trail* names beginnings of a prompt by a chained hash; a turn is remembered under the last name of its
trail, and a later one finds it among its own::

    turn n      [system, user]                          remembered under h2 = H(H(scope, system), user)
    turn n + 1  [system, user, answer, user]            h4, h3, h2 …  found: the turn continues at h2

Nothing of an answer is needed for that. Every chain starts from its scope, so nothing that one caller, model or name
leaves can be found by another. A wrong guess costs little: engines compare tokens before they use anything.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENCODER = msgspec.json.Encoder(order="deterministic")
_DIGEST_BYTES = 16
_NAME_BYTES = 12
_MAX_MESSAGES = 10_000
"""More than any conversation has. Hashing that many holds up other requests for some ten milliseconds."""
_SMALLEST_STEP_BYTES = 64
_STEPS_PER_DOUBLING = 128


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a conversation is looked for. ``caller``: of ``caller_of``. ``name``: "" when the client gave none."""

    caller: bytes
    model: str
    name: str = ""

    @property
    def seed(self) -> bytes:
        """What all chains of this scope start from."""
        parts = (self.caller, self.model.encode(errors="surrogatepass"), self.name.encode())
        return _digest(b"".join(b"%d:%b" % (len(part), part) for part in parts))


@dataclass(frozen=True, slots=True)
class Tip:
    """Where the prompt of a turn ended, in messages or in bytes of text, and the name of all of it."""

    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChatTrail:
    """Messages: a name for each beginning of them. ``lens_bytes``: of each message. ``answers``: which are answers."""

    marks: tuple[bytes, ...]
    lens_bytes: tuple[int, ...]
    answers: tuple[bool, ...]

    @property
    def tip(self) -> Tip:
        """Of this prompt."""
        return Tip(len(self.marks), self.marks[-1])

    def extends(self, tip: Tip) -> bool:
        """Whether the prompt begins with all of an earlier one, or is equal to it."""
        return tip.length <= len(self.marks) and self.marks[tip.length - 1] == tip.digest

    def num_new_bytes(self, tip: Tip) -> int:
        """Bytes behind an earlier turn that this prompt ``extends``, and behind the answer to that."""
        start = tip.length + int(self.answers[tip.length : tip.length + 1] == (True,))
        return sum(self.lens_bytes[start:])


@dataclass(frozen=True, slots=True)
class TextTrail:
    """A text, or token ids as bytes: a name for some of its beginnings, since it could be cut anywhere.

    An earlier prompt that shares a mark need not be a beginning of this one; ``extends`` looks.
    """

    marks: tuple[bytes, ...]
    seed: bytes
    data: bytes

    @property
    def tip(self) -> Tip:
        """Of this prompt."""
        return Tip(len(self.data), _digest(self.seed, self.data))

    def extends(self, tip: Tip) -> bool:
        """Whether the prompt begins with all of an earlier one, or is equal to it."""
        return tip.length <= len(self.data) and _digest(self.seed, self.data[: tip.length]) == tip.digest

    def num_new_bytes(self, tip: Tip) -> int:
        """Bytes behind an earlier turn that this prompt ``extends``; nobody can tell where its answer ended."""
        return len(self.data) - tip.length


Trail = ChatTrail | TextTrail


def caller_of(credentials: Sequence[bytes]) -> bytes:
    """Names a caller by what it shows to be let in, and does not contain it. Callers that show nothing are one."""
    return _digest(b"".join(b"%d:%b" % (len(value), value) for value in credentials))


def name_of(given: str) -> str:
    """The name of a conversation that its client calls ``given``, fit for logs and URLs."""
    return f"conv-{blake2b(given.encode(errors='surrogatepass'), digest_size=_NAME_BYTES).hexdigest()}"


def chat_trail(scope: Scope, messages: object) -> ChatTrail | None:
    """The trail of a chat's messages; None when they make none."""
    if not isinstance(messages, list) or not 0 < len(messages) <= _MAX_MESSAGES:
        return None
    marks, lens_bytes, answers = [], [], []
    mark = _digest(b"chat", scope.seed)
    for message in messages:
        try:
            text = _ENCODER.encode(message)
        except RecursionError:
            return None  # nested too deeply
        mark = _digest(mark, text)
        marks.append(mark)
        lens_bytes.append(len(text))
        answers.append(isinstance(message, dict) and message.get("role") == "assistant")
    return ChatTrail(tuple(marks), tuple(lens_bytes), tuple(answers))


def text_trail(scope: Scope, prompt: object) -> TextTrail | None:
    """The trail of one completion prompt, text or token ids; None when it makes none, or is too short to matter."""
    if isinstance(prompt, str):
        kind, data = b"text", prompt.encode(errors="surrogatepass")
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        try:
            kind, data = b"ids", array("q", prompt).tobytes()
        except OverflowError:
            return None
    else:
        return None
    mark = seed = _digest(kind, scope.seed)
    marks = []
    start, step_bytes, doubling_bytes = 0, _SMALLEST_STEP_BYTES, 2 * _SMALLEST_STEP_BYTES * _STEPS_PER_DOUBLING
    while start + step_bytes <= len(data):
        mark = blake2b(mark + data[start : start + step_bytes], digest_size=_DIGEST_BYTES).digest()
        marks.append(mark)
        start += step_bytes
        if start >= doubling_bytes:
            # Steps grow with the text, so that a long one has hundreds of marks and not thousands.
            step_bytes, doubling_bytes = 2 * step_bytes, 2 * doubling_bytes
    return TextTrail(tuple(marks), seed, data) if marks else None


def _digest(*parts: bytes) -> bytes:
    state = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()
