"""Records of several fields, and chats, as texts of which parts are learned.

Records and the templates that come with tokenizers are untrusted: a bad one is a ValueError with the reason. Templates
run in Jinja's sandbox.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import reprlib
import string
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import regular_file
from jvarlen.data.line_files import read_json

__all__ = ["ChatTemplate", "MarkedText", "RecordFormat", "named_tokens"]

_MESSAGE = "{role}: {content}\n"
_MESSAGE_NAMES = ("role", "content")
_TODAY = date(2024, 7, 26)  # of templates that write it: a sample must have the same tokens whenever it is read


class MarkedText(NamedTuple):
    """A text, and which of its characters are learned."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None  # ascending ranges (start, end); None for all
    has_special_tokens: bool = False  # whether a tokenizer must not add any

    def is_learned(self, start: int, end: int) -> bool:
        """Whether any of these characters is learned."""
        return self.learned is None or any(first < end and start < last for first, last in self.learned)


class RecordFormat:
    """How a record becomes a text, and what of it is learned: see `open_data`."""

    def __init__(self, fields: Sequence[str] = ("text",), template: str | None = None, loss_on: Sequence[str] = ()):
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
        joined: _Parts = [("\n" if i else "", field) for i, field in enumerate(fields)]
        self._parts = joined if parts is None or is_of_messages else parts
        self._chat: ChatTemplate | None = None
        self.takes_chat_template = template is None
        self.key = json.dumps([fields, template, sorted(loss_on)])

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

    def render(self, record: dict[str, Any]) -> MarkedText:
        """The text of a record; raises ValueError if it lacks a field, is empty, or holds what is no text or chat."""
        missing = [field for field in self.fields if field not in record]
        if missing:
            names = list_first(map(repr, missing))
            raise UserError(f"no such field {names}, but {list_first(map(reprlib.repr, record)) or 'none'}")
        first = record[self.fields[0]]
        if len(self.fields) == 1 and isinstance(first, list):
            marked = self._render_chat(first)
        else:
            texts = {field: _text_of(field, record[field]) for field in self.fields}
            marked = _marked(_filled(self._parts, texts, self._loss_on), self._loss_on)
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
            begun += "assistant" if name else ""
        return MarkedText(self._render_chat(messages).text + begun)

    def _render_chat(self, messages: list[Any]) -> MarkedText:
        if not messages:
            raise UserError("no messages")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in _MESSAGE_NAMES):
                raise UserError(f"message {i + 1} has no role and content that are strings: {reprlib.repr(message)}")
        if self._chat is not None:
            return self._chat.render(messages, self._loss_on)
        pieces = []
        for message in messages:
            learned = frozenset(["content"] if message["role"] in self._loss_on else [])
            pieces += _filled(self._message, message, learned)
        return _marked(pieces, self._loss_on)


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
    ranges = [
        (end - len(piece), end) for (piece, is_learned), end in zip(pieces, ends, strict=True) if is_learned and piece
    ]
    return MarkedText(text, tuple(ranges))


def _text_of(field: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"no string in {field!r}, but {reprlib.repr(value)}")
    return value


def named_tokens(tokenizer: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and others, by the files beside a tokenizer file, as in transformers."""
    config = read_json(tokenizer.with_name("tokenizer_config.json"))
    older = read_json(tokenizer.with_name("special_tokens_map.json"))
    named = older | config if "added_tokens_decoder" in config else config | older
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


class ChatTemplate:
    """The Jinja template of chats that comes with a tokenizer, and the texts of the tokenizer's special tokens."""

    def __init__(
        self,
        source: str,
        special_tokens: Iterable[str] = (),
        variables: dict[str, str] | None = None,
        name: str = "the chat template",
    ):
        self._source, self._special_tokens, self._variables = source, sorted(special_tokens), variables or {}
        self._name = name
        self.key = json.dumps([source, self._special_tokens, self._variables], sort_keys=True)
        try:
            _compiled(source)
        except Exception as error:  # also of Python's compiler, to which the template goes
            place = f", line {error.lineno}," if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UserError(f"{name}{place} is no Jinja template: {_reason(error)}") from None

    @classmethod
    def beside(cls, tokenizer: Path, special_tokens: Iterable[str]) -> ChatTemplate | None:
        """The template in `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer file, if there is one."""
        config, own = tokenizer.with_name("tokenizer_config.json"), tokenizer.with_name("chat_template.jinja")
        settings = read_json(config)
        source, name = settings.get("chat_template"), config
        if isinstance(source, list):  # several by name
            named = (each for each in source if isinstance(each, dict) and each.get("name") == "default")
            source = next(named, {}).get("template", source)
        if own.exists():
            source, name = regular_file(own).read_bytes(), own
            try:
                source = source.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(f"{own} is not UTF-8 at byte {error.start}") from None
        if source is None:
            return None
        if not isinstance(source, str):
            raise UserError(f"{config} has no text as chat_template, nor one of the name 'default'")
        return cls(source, special_tokens, named_tokens(tokenizer), str(name))

    def render(self, messages: list[dict[str, Any]], loss_on: frozenset[str]) -> MarkedText:
        """The text of a chat; of messages of the roles `loss_on`, the content and the token after it are learned."""
        text = self._fill(messages)
        if not loss_on:
            return MarkedText(text, None, True)
        # Where contents begin is found with others that occur nowhere else.
        marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
        marked = self._fill([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        learned, written, rest = [], "", marked
        for i, (message, mark) in enumerate(zip(messages, marks, strict=True)):
            before, found, rest = rest.partition(mark)
            if not found:
                raise UserError(f"{self._name} leaves out message {i + 1}, of role {message['role']!r}")
            written += before
            content = message["content"]
            if not text.startswith(written + content):
                content = content.strip()  # as many templates do
            if not text.startswith(written + content):
                raise UserError(f"{self._name} changes the content of message {i + 1}: loss_on cannot find it")
            start = len(written)
            written += content
            if message["role"] in loss_on:
                learned.append((start, self._end_of(text, len(written))))
        return MarkedText(text, tuple(learned), True)

    def render_prompt(self, messages: list[dict[str, Any]]) -> MarkedText:
        """The text of a chat up to where the assistant answers."""
        return MarkedText(self._fill(messages, add_generation_prompt=True), None, True)

    def _fill(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        given = {"tools": None, "documents": None, **self._variables, "add_generation_prompt": add_generation_prompt}
        try:
            return _compiled(self._source).render(messages=messages, **given)
        except Exception as error:  # the template may do anything
            raise UserError(f"{self._name} rejects it: {_reason(error)}") from None

    def _end_of(self, text: str, end: int) -> int:
        """The end of the special token that follows, or `end`."""
        start = end + len(text[end:]) - len(text[end:].lstrip())
        fitting = [token for token in self._special_tokens if token and text.startswith(token, start)]
        return start + max(map(len, fitting)) if fitting else end


class _Generation(jinja2.ext.Extension):
    """The tags around what a model writes; here they change nothing."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _reason(error: Exception) -> str:
    """What an error of a template says."""
    is_told = isinstance(error, jinja2.TemplateError | UserError)
    return str(error) if is_told else f"{type(error).__name__}: {error}"


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    """The template, with what those of Hugging Face may use."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _TODAY.strftime}
    return environment.from_string(source)
