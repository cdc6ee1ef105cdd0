"""Records of several fields, and chats, as texts of which parts are learned.

Records are untrusted: a bad one is a ValueError with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import reprlib
import string
from collections.abc import Sequence
from typing import Any

from jvarlen._common.checks import UserError, list_first
from jvarlen.data.chat_templates import ChatTemplate
from jvarlen.data.marked_text import MarkedText
from jvarlen.planning.lengths import DataSource

__all__ = ["RecordFormat", "RecordTexts"]

_JOINT = "\n"
_MESSAGE = "{role}: {content}\n"
_MESSAGE_NAMES = ("role", "content")


class RecordFormat:
    r"""How a record becomes a text, and what of it is learned.

    Several fields are joined by newlines, or fill a template. A single field may also hold a chat: a list of messages
    with `role` and `content`. Each message fills the template, `"{role}: {content}\n"` by default, unless there is a
    chat template.

    With `loss_on`, only the text of these fields, or of messages of these roles, is learned. So is what follows the
    last field in the template, which is how a model learns to end.

    Args:
      fields: names of the fields.
      template: text with the names of the fields in braces; the names of `fields` then follow from it unless they are
        given. For chats, the template of a message, with `{role}` and `{content}`.
      loss_on: the fields or roles that are learned; none for all.

    Attributes:
      fields: names of the fields that a record must have.
      key: tells one format from another.
      takes_chat_template: whether chats are written by the chat template of a tokenizer, if it has one.

    Raises:
      ValueError: a template that cannot be filled, or whose names are not the fields; `loss_on` that names none of
        several fields.

    Example:
      >>> asked = RecordFormat(template="Q: {question}\nA: {answer}\n", loss_on=["answer"])
      >>> marked = asked.render({"question": "1 + 1?", "answer": "2"})
      >>> marked.text, [marked.text[start:end] for start, end in marked.learned]
      ('Q: 1 + 1?\nA: 2\n', ['2\n'])
      >>> RecordFormat(["messages"], loss_on=["b"]).render({"messages": [{"role": "b", "content": "hi"}]})
      MarkedText(text='b: hi\n', learned=((3, 6),), has_special_tokens=False)
    """

    def __init__(
        self,
        fields: Sequence[str] = ("text",),
        template: str | None = None,
        loss_on: Sequence[str] = (),
    ):
        parts = None if template is None else _parse_template(template)
        names = () if parts is None else tuple(dict.fromkeys(name for _, name in parts if name is not None))
        fields = tuple(fields)
        is_of_messages = len(fields) == 1 and set(names) == set(_MESSAGE_NAMES) and fields != ("text",)
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
        self._parts = parts if parts is not None and not is_of_messages else _joined(fields)
        self._chat: ChatTemplate | None = None
        self.takes_chat_template = template is None
        self.key = json.dumps([fields, template, sorted(loss_on)])

    @property
    def is_plain(self) -> bool:
        """Whether the text is that of a single field, unless it holds a chat."""
        return len(self.fields) == 1 and self._parts == [("", self.fields[0])] and not self._loss_on

    def with_chat_template(self, chat: ChatTemplate | None) -> RecordFormat:
        """The same, with chats written by a template; None changes nothing."""
        if chat is None:
            return self
        other = copy.copy(self)
        other._chat, other.key = chat, json.dumps([self.key, chat.key])
        return other

    def render(self, record: dict[str, Any]) -> MarkedText:
        """The text of a record.

        Args:
          record: values by field name.

        Returns:
          The text, with what is learned of it.

        Raises:
          ValueError: the record lacks a field, or it is no text; messages that are none, or that the chat template
            rejects.
        """
        missing = [field for field in self.fields if field not in record]
        if missing:
            names = list_first(map(repr, missing))
            raise UserError(f"no such field {names}, but {list_first(map(reprlib.repr, record)) or 'none'}")
        first = record[self.fields[0]]
        if len(self.fields) == 1 and isinstance(first, list):
            return self._render_chat(first)
        texts = {field: _text_of(field, record[field]) for field in self.fields}
        return _marked(_filled(self._parts, texts, self._loss_on), self._loss_on)

    def _render_chat(self, messages: list[Any]) -> MarkedText:
        _check_messages(messages)
        if self._chat is not None:
            return self._chat.render(messages, self._loss_on)
        pieces = []
        for message in messages:
            learned = frozenset(["content"] if message["role"] in self._loss_on else [])
            pieces += _filled(self._message, message, learned)
        return _marked(pieces, self._loss_on)


@dataclasses.dataclass(frozen=True)
class RecordTexts:
    """The texts of records: a data source of `MarkedText`.

    Attributes:
      records: random access to dicts.
      format: how they become texts.
    """

    records: DataSource
    format: RecordFormat

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> MarkedText:
        marked = self.format.render(self.records[index])
        if not marked.text:
            raise UserError("empty")
        return marked


_Parts = list[tuple[str, str | None]]  # a literal, and the name of the field after it


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


def _joined(fields: Sequence[str]) -> _Parts:
    return [(_JOINT if place else "", field) for place, field in enumerate(fields)]


def _filled(parts: _Parts, texts: dict[str, Any], learned: frozenset[str]) -> list[tuple[str, bool]]:
    """Pieces of text, and whether each is learned; what follows the last field goes with it."""
    pieces, is_learned = [], False
    last = max(place for place, (_, name) in enumerate(parts) if name is not None)
    for place, (literal, name) in enumerate(parts):
        pieces.append((literal, is_learned and place > last))
        if name is not None:
            is_learned = name in learned
            pieces.append((texts[name], is_learned))
    return pieces


def _marked(pieces: list[tuple[str, bool]], loss_on: frozenset[str]) -> MarkedText:
    text = "".join(piece for piece, _ in pieces)
    if not loss_on:
        return MarkedText(text)
    ends = itertools.accumulate(len(piece) for piece, _ in pieces)
    ranges: list[tuple[int, int]] = []
    for (piece, is_learned), end in zip(pieces, ends, strict=True):
        if is_learned and piece:
            start = end - len(piece)
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
    return MarkedText(text, tuple(ranges))


def _text_of(field: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"no string in {field!r}, but {reprlib.repr(value)}")
    return value


def _check_messages(messages: list[Any]) -> None:
    if not messages:
        raise UserError("no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in _MESSAGE_NAMES):
            raise UserError(f"message {i + 1} has no role and content that are strings: {reprlib.repr(message)}")
