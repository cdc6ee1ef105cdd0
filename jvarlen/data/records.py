"""Records of several fields, and chats, as texts of which parts are learned.

Records and the templates that come with tokenizers are untrusted: a bad one is a ValueError with the reason. Templates
run in Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import re
import reprlib
import string
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import regular_file
from jvarlen.data.line_files import read_json

__all__ = ["ChatTemplate", "MarkedText", "RecordFormat", "named_tokens"]

_MESSAGE = "{role}: {content}\n"
_MESSAGE_NAMES = ("role", "content")
_ASSISTANT = "assistant"  # the role that answers prompts
_GENERATION_MARK = "generation_mark"  # a variable of templates
_KEY_VERSION = 2  # of what is learned of a text
_TODAY = date(2024, 7, 26)  # of templates that write it: a sample must have the same tokens whenever it is read


class MarkedText(NamedTuple):
    """A text, and which of its characters are learned."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None  # ascending ranges (start, end); None for all
    has_special_tokens: bool = False  # whether a tokenizer must not add any

    def is_learned(self, start: int, end: int) -> bool:
        """Whether the token of these characters is learned: it begins in a learned part, or has a letter of one.

        A token that begins before an answer and has only white space of it belongs to what comes before.
        """
        return self.learned is None or any(
            first <= start < last or (start < first < end and not self.text[first : min(end, last)].isspace())
            for first, last in self.learned
        )


class RecordFormat:
    """How a record becomes a text, and what of it is learned: see `open_data`."""

    def __init__(self, fields: Sequence[str] = ("text",), template: str | None = None, loss_on: Sequence[str] = ()):
        if isinstance(loss_on, str):
            raise UserError(f"loss_on must be a sequence of names, not the text {loss_on!r}")
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
        self.key = json.dumps([fields, template, [_KEY_VERSION, *sorted(loss_on)] if loss_on else []])

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

    def roles(self, record: dict[str, Any]) -> set[str]:
        """The roles of the messages of a chat, none where there is none."""
        messages = record.get(self.fields[0])
        found = [each.get("role") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
        return {role for role in found if isinstance(role, str)}

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
            begun += _ASSISTANT if name else ""
        return MarkedText(self._render_chat(messages).text + begun)

    def _render_chat(self, messages: list[Any]) -> MarkedText:
        if not messages:
            raise UserError("no messages")
        for i, message in enumerate(messages):
            texts = dict(message) if isinstance(message, dict) else {}
            if self._chat is not None and texts.get("tool_calls") and texts.get("content") is None:
                texts["content"] = ""  # which calls need not have
            if not all(isinstance(texts.get(name), str) for name in _MESSAGE_NAMES):
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
    if "added_tokens_decoder" not in config:
        config |= read_json(tokenizer.with_name("special_tokens_map.json"))  # of older versions
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
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
        self._source, self._variables, self._name = source, variables or {}, name
        tokens = {*special_tokens, self._variables.get("eos_token", "")} - {""}
        self._end_tokens = sorted(tokens)  # each may end a turn
        self.key = json.dumps([_KEY_VERSION, source, self._end_tokens, self._variables], sort_keys=True)
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
        """The text of a chat, of which the turns of the roles `loss_on` are learned.

        A turn of the assistant begins where the prompt of the turns before it ends; a turn of another role begins with
        its content. Both end with the special token after them. Where the template marks with `{% generation %}` what
        an assistant writes, that is learned.
        """
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        text = self._fill(messages)
        if not loss_on:
            return MarkedText(text, None, True)
        written = json.dumps([messages, text, self._source, self._variables], ensure_ascii=False, default=str)
        unused = (character for character in map(chr, range(0xE000, sys.maxunicode)) if character not in written)
        mark = next(unused)
        learned: list[tuple[int, int]] = []
        if _ASSISTANT in loss_on and _compiled(self._source).marks_generation:
            loss_on -= {_ASSISTANT}
            pieces = self._fill(messages, generation_mark=mark).split(mark)
            marked = _marked([(piece, i % 2 == 1) for i, piece in enumerate(pieces)], frozenset([_ASSISTANT]))
            if marked.text != text:
                raise UserError(f"{self._name} changes what it marks as generation: loss_on cannot find it")
            learned += marked.learned or ()
        found = [i for i, message in enumerate(messages) if message["role"] in loss_on]
        ends = self._places(text, messages, dict(zip(found, unused, strict=False)), at_end=True)
        learned += [self._turn(text, messages, i, mark, ends.get(i)) for i in found]
        return MarkedText(text, tuple(sorted(learned)), True)

    def render_prompt(self, messages: list[dict[str, Any]]) -> MarkedText:
        """The text of a chat up to where the assistant answers."""
        return MarkedText(self._fill(messages, add_generation_prompt=True), None, True)

    def _fill(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": False} | self._variables | variables
        try:
            return _compiled(self._source).template.render(messages=messages, **given)
        except Exception as error:  # the template may do anything
            raise UserError(f"{self._name} rejects it: {_reason(error)}") from None

    def _turn(
        self, text: str, messages: list[dict[str, Any]], i: int, mark: str, end_of_content: int | None
    ) -> tuple[int, int]:
        """Where the turn of message i is learned in the text of all."""
        is_assistant = messages[i]["role"] == _ASSISTANT
        start = self._end_of_first(text, messages, i, mark, is_prompt=True) if is_assistant else None
        if start is None:
            start = self._places(text, messages, {i: mark}, at_end=False).get(i)
        if end_of_content is None:
            end_of_content = self._places(text, messages, {i: mark}, at_end=True).get(i)
        end = None if end_of_content is None else self._end_of_token(text, end_of_content)
        if not is_assistant:
            end = end or end_of_content
        elif start is not None and (end is None or {*messages[i]} != {*_MESSAGE_NAMES}):  # there is more than content
            turn = len(text) if i + 1 == len(messages) else self._end_of_first(text, messages, i + 1, mark)
            if turn is not None:
                written = text[start:turn].rstrip()
                is_ended = any(map(written.endswith, self._end_tokens))
                end = start + len(written) if is_ended else self._end_of_token(text, turn) or turn
        if start is None or end is None or start > end - is_assistant:
            raise UserError(
                f"{self._name} leaves out message {i + 1}, of role {messages[i]['role']!r}, or loss_on cannot find it"
            )
        return start, end

    def _places(
        self, text: str, messages: list[dict[str, Any]], marks: dict[int, str], *, at_end: bool
    ) -> dict[int, int]:
        """Where contents begin or end in the text of all, by message; none that are left out or changed by a mark."""
        for is_stripped in (False, True):  # by the template
            marked = messages.copy()
            for i, mark in marks.items():
                content = messages[i].get("content", "")
                kept = content.rstrip() if at_end else content.lstrip()
                num_blanks = len(content) - len(kept) if is_stripped else 0
                edge = len(content) - num_blanks if at_end else num_blanks
                marked[i] = {**messages[i], "content": content[:edge] + mark + content[edge:]}
            with contextlib.suppress(UserError):
                pieces = re.split(f"([{''.join(marks.values())}])", self._fill(marked)) if marks else [text]
                if "".join(pieces[::2]) == text:
                    places = dict(zip(pieces[1::2], itertools.accumulate(map(len, pieces[::2])), strict=False))
                    return {i: places[mark] for i, mark in marks.items() if mark in places}
        return {}

    def _end_of_token(self, text: str, start: int) -> int | None:
        """Where the token that ends turns ends, if one follows from `start` on."""
        following = text[start:].lstrip()
        fitting = [len(token) for token in self._end_tokens if following.startswith(token)]
        return len(text) - len(following) + max(fitting) if fitting else None

    def _end_of_first(
        self, text: str, messages: list[dict[str, Any]], n: int, mark: str, *, is_prompt: bool = False
    ) -> int | None:
        """Where the first n messages, or the prompt after them, end in the text of all; None if it cannot be told."""
        closest = None
        try:
            part = self._fill(messages[:n], add_generation_prompt=is_prompt)
        except UserError:  # they are no chat alone
            prompt = "" if n else self._generation_prompt()
            return text.index(prompt) + len(prompt) if prompt and prompt in text else None
        if text.startswith(part):
            return len(part)
        # Where more turns follow, a template may leave out thoughts or a system prompt of the earlier ones. What it
        # writes after the text of the last message stays the same, except the end of a chat, and a prompt that goes on
        # with what no turn has: then both agree up to a token.
        for marked in _marked_copies(messages[n - 1], mark) if n else [None]:
            whole: tuple[str, str] | None = ("", text)
            alone: tuple[str, str] | None = ("", part)
            if marked is not None:
                earlier = [*messages[: n - 1], marked]
                whole = self._around(mark, text, [*earlier, *messages[n:]])
                alone = self._around(mark, part, earlier, add_generation_prompt=is_prompt)
            if whole is None or alone is None:
                continue
            pairs = enumerate(zip(whole[1], alone[1], strict=False))
            common = alone[1][: next((i for i, (one, other) in pairs if one != other), len(whole[1]))]
            if common == alone[1]:
                return len(whole[0]) + len(common)
            ends = [common.rfind(token) + len(token) for token in self._end_tokens if token in common]
            if closest is None and ends:
                closest = len(whole[0]) + max(ends)
        return closest

    def _around(self, mark: str, text: str, messages: list[dict[str, Any]], **variables: Any) -> tuple[str, str] | None:
        """The text before and after the mark in a message; None if the mark is left out, or changes the text."""
        try:
            before, found, after = self._fill(messages, **variables).rpartition(mark)
        except UserError:
            return None
        before = before.replace(mark, "")
        return (before, after) if found and before + after == text else None

    def _generation_prompt(self) -> str:
        """What comes between a message of a user and the answer; empty if it cannot be told."""
        user = [{"role": "user", "content": "x"}]
        try:
            written, prompt = self._fill(user), self._fill(user, add_generation_prompt=True)
        except UserError:
            return ""
        return prompt[len(written) :] if prompt.startswith(written) else ""


def _marked_copies(value: Any, mark: str) -> Iterator[Any]:
    """Copies of a message, each with a mark in another of its texts, after it or before white space at its end."""
    if isinstance(value, str):
        for end in (len(value), len(value.rstrip())):
            yield value[:end] + mark + value[end:]
    elif isinstance(value, dict):
        names = sorted(value.keys() - {"role"}, key=[*value, "content"][::-1].index)  # the content first, then the last
        for name in names:
            yield from ({**value, name: copy} for copy in _marked_copies(value[name], mark))
    elif isinstance(value, list):
        for i in reversed(range(len(value))):
            yield from ([*value[:i], copy, *value[i + 1 :]] for copy in _marked_copies(value[i], mark))


class _Generation(jinja2.ext.Extension):
    """The tags around what a model writes: where each begins and ends, `generation_mark` is written."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(_GENERATION_MARK, "load", lineno=line)], lineno=line) for _ in "be"
        )
        return [begin, *body, end]


def _reason(error: Exception) -> str:
    """What an error of a template says."""
    is_told = isinstance(error, jinja2.TemplateError | UserError)
    return str(error) if is_told else f"{type(error).__name__}: {error}"


class _Compiled(NamedTuple):
    template: jinja2.Template
    marks_generation: bool  # whether it has the tags of `_Generation`


@functools.cache
def _compiled(source: str) -> _Compiled:
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
    names = environment.parse(source).find_all(jinja2.nodes.Name)
    return _Compiled(environment.from_string(source), any(name.name == _GENERATION_MARK for name in names))
