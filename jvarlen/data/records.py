"""Records of several fields, and chats, as texts with learned parts; a bad record is a ValueError with the reason."""

from __future__ import annotations

import copy
import json
import math
import reprlib
import string
from collections.abc import Sequence

from jvarlen._common.checks import UserError, list_first
from jvarlen.data.chat_template import ASSISTANT, KEY_VERSION, MESSAGE_NAMES, ChatTemplate
from jvarlen.data.samples import MarkedText, Record, join_marked

__all__ = ["RecordFormat"]

_MESSAGE = "{role}: {content}\n"


class RecordFormat:
    """How a record becomes a text, and what of it is learned: see `open_data`."""

    def __init__(self, fields: Sequence[str] = ("text",), template: str | None = None, loss_on: Sequence[str] = ()):
        if isinstance(loss_on, str):
            raise UserError(f"loss_on must be a sequence of names, not the text {loss_on!r}")
        parts = None if template is None else _parse_template(template)
        names = () if parts is None else tuple(dict.fromkeys(name for _, name in parts if name is not None))
        fields = tuple(fields)
        is_of_messages = len(fields) == 1 and set(names) == set(MESSAGE_NAMES) and fields != ("text",)
        if parts is not None and not is_of_messages and set(fields) != set(names):
            if fields != ("text",):
                raise UserError(
                    f"the template has {list_first(map(repr, names))}, the fields are {list_first(map(repr, fields))}: "
                    "they must be the same, or for chats 'role' and 'content'"
                )
            fields = names
        if unknown := [name for name in loss_on if len(fields) > 1 and name not in fields]:
            listed, known = list_first(map(repr, unknown)), list_first(map(repr, fields))
            raise UserError(f"loss_on must name fields, which are {known}, not {listed}")
        if len(set(fields)) < len(fields):
            raise UserError(f"a field is named twice: {list_first(map(repr, fields))}")
        self.fields = fields
        self._loss_on = frozenset(loss_on)
        self._message = parts if parts is not None and is_of_messages else _parse_template(_MESSAGE)
        joined: _Parts = [("\n" if i else "", field) for i, field in enumerate(fields)]
        self._parts = joined if parts is None or is_of_messages else parts
        self._chat: ChatTemplate | None = None
        self.takes_chat_template = template is None
        self.key = json.dumps([fields, template, [KEY_VERSION, *sorted(loss_on)] if loss_on else []])

    @property
    def is_plain(self) -> bool:
        """Whether the text is that of a single field, unless it holds a chat."""
        return len(self.fields) == 1 and self._parts == [("", self.fields[0])] and not self._loss_on

    @property
    def takes_chats(self) -> bool:
        """Whether a record may be a chat."""
        return len(self.fields) == 1 and (self.takes_chat_template or self._parts == [("", self.fields[0])])

    def with_chat_template(self, chat: ChatTemplate | None) -> RecordFormat:
        """The same, with chats written by a template; None changes nothing."""
        if chat is None:
            return self
        other = copy.copy(self)
        other._chat, other.key = chat, json.dumps([self.key, chat.key])
        return other

    def roles(self, record: Record) -> set[str]:
        """The roles of the messages of a chat, () without messages."""
        messages = record.get(self.fields[0])
        found = [each.get("role") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
        return {role for role in found if isinstance(role, str)}

    def render(self, record: Record) -> MarkedText:
        """The text of a record; raises ValueError if it lacks a field, is empty, or holds neither text nor a chat."""
        missing = [field for field in self.fields if field not in record]
        if missing:
            names = list_first(map(repr, missing))
            raise UserError(f"no such field {names}, but {list_first(map(reprlib.repr, record)) or 'none'}")
        first = record[self.fields[0]]
        if len(self.fields) == 1 and isinstance(first, list):
            marked = self._render_chat(first)
        else:
            texts = {field: _text_of(field, record[field]) for field in self.fields}
            marked = join_marked(_fill(self._parts, texts, self._loss_on), learns_all=not self._loss_on)
        if not marked.text:
            raise UserError("empty")
        return marked

    def render_prompt(self, text: str) -> MarkedText:
        """What a user says, written as a chat up to where the assistant answers."""
        messages = [{"role": "user", "content": text}]
        if self._chat is not None:
            return self._chat.render_prompt(messages)
        begun = ""
        for literal, name in self._message:
            begun += literal
            if name == "content":
                break
            begun += ASSISTANT if name else ""
        return MarkedText(self._render_chat(messages).text + begun)

    def _render_chat(self, messages: list[Record]) -> MarkedText:
        if not messages:
            raise UserError("no messages")
        for i, message in enumerate(messages):
            texts = dict(message) if isinstance(message, dict) else {}
            if self._chat is not None and texts.get("tool_calls") and texts.get("content") is None:
                texts["content"] = ""  # messages with tool calls may lack it
            if not all(isinstance(texts.get(name), str) for name in MESSAGE_NAMES):
                raise UserError(f"message {i + 1} has no role and content that are strings: {reprlib.repr(message)}")
        if self._chat is not None:
            return self._chat.render(messages, self._loss_on)
        pieces = []
        for message in messages:
            learned = frozenset(["content"] if message["role"] in self._loss_on else [])
            pieces += _fill(self._message, message, learned)
        return join_marked(pieces, learns_all=not self._loss_on)


_Parts = Sequence[tuple[str, str | None]]  # a literal, and the name of the field after it


def _parse_template(template: str) -> _Parts:
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"the template {template!r} cannot be filled: {error}") from None
    wrong = [name for _, name, spec, conversion in parsed if name is not None and (not name or spec or conversion)]
    if wrong:
        raise UserError(f"the template {template!r} must have names of fields in its braces, and nothing else")
    parts = [(literal, name) for literal, name, _, _ in parsed]
    if not any(name is not None for _, name in parts):
        raise UserError(f"the template {template!r} has no field, such as {{answer}}")
    return parts


def _fill(parts: _Parts, texts: Record, learned: frozenset[str]) -> list[tuple[str, bool]]:
    """Pieces of text, and whether each is learned; what follows the last field goes with it."""
    pieces, is_learned = [], False
    last = max(place for place, (_, name) in enumerate(parts) if name is not None)
    for place, (literal, name) in enumerate(parts):
        pieces.append((literal, is_learned and place > last))
        if name is not None:
            is_learned = name in learned
            pieces.append((texts[name], is_learned))
    return pieces


def _text_of(field: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"no string in {field!r}, but {reprlib.repr(value)}")
    return value
