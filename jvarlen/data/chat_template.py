"""Chat templates in Jinja that come with tokenizers, and which parts of a chat are learned.

Templates and the messages of chats are untrusted: a bad one is a ValueError with the reason. Templates run in Jinja's
sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jvarlen._common.checks import UserError
from jvarlen._common.files import regular_file
from jvarlen._common.types import Json
from jvarlen.data.line_files import read_json
from jvarlen.data.samples import MarkedText, Record, join_marked

__all__ = ["ASSISTANT", "KEY_VERSION", "MESSAGE_NAMES", "ChatTemplate", "named_tokens"]

ASSISTANT = "assistant"  # the role that answers prompts
MESSAGE_NAMES = ("role", "content")
KEY_VERSION = 2  # of the choice of learned parts
_GENERATION_MARK = "generation_mark"  # a variable of templates
_TODAY = date(2024, 7, 26)  # for templates that write the date: a sample must have the same tokens whenever it is read


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
        self.key = json.dumps([KEY_VERSION, source, self._end_tokens, self._variables], sort_keys=True)
        try:
            _compile(source)
        except Exception as error:  # also of Python's compiler, to which the template goes
            place = f", line {error.lineno}," if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UserError(f"{name}{place} is not a Jinja template: {_reason(error)}") from None

    @classmethod
    def beside(cls, tokenizer: Path, special_tokens: Iterable[str]) -> ChatTemplate | None:
        """The template in `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer file, if there is one."""
        config, template_file = tokenizer.with_name("tokenizer_config.json"), tokenizer.with_name("chat_template.jinja")
        settings = read_json(config)
        source, name = settings.get("chat_template"), config
        if isinstance(source, list):  # several by name
            named = (each for each in source if isinstance(each, dict) and each.get("name") == "default")
            source = next(named, {}).get("template", source)
        if template_file.exists():
            source, name = regular_file(template_file).read_bytes(), template_file
            try:
                source = source.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(f"{template_file} is not UTF-8 at byte {error.start}") from None
        if source is None:
            return None
        if not isinstance(source, str):
            raise UserError(f"{config} has no text as chat_template, nor one of the name 'default'")
        return cls(source, special_tokens, named_tokens(tokenizer), str(name))

    def render(self, messages: list[Record], loss_on: frozenset[str]) -> MarkedText:
        """The text of a chat; the turns of the roles `loss_on` are learned.

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
        if ASSISTANT in loss_on and _compile(self._source).marks_generation:
            loss_on -= {ASSISTANT}
            pieces = self._fill(messages, generation_mark=mark).split(mark)
            marked = join_marked([(piece, i % 2 == 1) for i, piece in enumerate(pieces)])
            if marked.text != text:
                raise UserError(f"{self._name} changes the text that it marks as generation: loss_on cannot find it")
            learned += marked.learned or ()
        found = [i for i, message in enumerate(messages) if message["role"] in loss_on]
        ends = self._places(text, messages, dict(zip(found, unused, strict=False)), at_end=True)
        learned += [self._turn(text, messages, i, mark, ends.get(i)) for i in found]
        return MarkedText(text, tuple(sorted(learned)), True)

    def render_prompt(self, messages: list[Record]) -> MarkedText:
        """The text of a chat up to where the assistant answers."""
        return MarkedText(self._fill(messages, add_generation_prompt=True), None, True)

    def _fill(self, messages: list[Record], **variables: Json) -> str:
        given: Record = {"tools": None, "documents": None, "add_generation_prompt": False, **self._variables}
        try:
            return _compile(self._source).template.render(messages=messages, **(given | variables))
        except Exception as error:  # the template may do anything
            raise UserError(f"{self._name} rejects it: {_reason(error)}") from None

    def _turn(
        self, text: str, messages: list[Record], i: int, mark: str, end_of_content: int | None
    ) -> tuple[int, int]:
        """Where the turn of message i is learned in the text of all."""
        is_assistant = messages[i]["role"] == ASSISTANT
        start = self._end_of_first(text, messages, i, mark, is_prompt=True) if is_assistant else None
        if start is None:
            start = self._places(text, messages, {i: mark}, at_end=False).get(i)
        if end_of_content is None:
            end_of_content = self._places(text, messages, {i: mark}, at_end=True).get(i)
        end = None if end_of_content is None else self._end_of_token(text, end_of_content)
        if not is_assistant:
            end = end or end_of_content
        elif start is not None and (end is None or {*messages[i]} != {*MESSAGE_NAMES}):  # there is more than content
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

    def _places(self, text: str, messages: list[Record], marks: dict[int, str], *, at_end: bool) -> dict[int, int]:
        """Where contents begin or end in the text of all, by message, unless left out or changed by a mark."""
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
        self, text: str, messages: list[Record], n: int, mark: str, *, is_prompt: bool = False
    ) -> int | None:
        """The end of the first n messages, or of the prompt after them, in the text of all; None if not found."""
        closest = None
        try:
            part = self._fill(messages[:n], add_generation_prompt=is_prompt)
        except UserError:  # alone they are not a chat
            prompt = "" if n else self._generation_prompt()
            return text.index(prompt) + len(prompt) if prompt and prompt in text else None
        if text.startswith(part):
            return len(part)
        # Where more turns follow, a template may leave out thoughts or a system prompt of the earlier ones. What it
        # writes after the text of the last message stays the same, except the end of a chat, and a prompt that goes on
        # with what no turn has: then both agree up to a token.
        for marked in _mark_copies(messages[n - 1], mark) if n else [None]:
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

    def _around(self, mark: str, text: str, messages: list[Record], **variables: Json) -> tuple[str, str] | None:
        """The text before and after the mark in a message; None if the mark is left out, or changes the text."""
        try:
            before, found, after = self._fill(messages, **variables).rpartition(mark)
        except UserError:
            return None
        before = before.replace(mark, "")
        return (before, after) if found and before + after == text else None

    def _generation_prompt(self) -> str:
        """The text between a message of a user and the answer; empty if it cannot be found."""
        user = [{"role": "user", "content": "x"}]
        try:
            written, prompt = self._fill(user), self._fill(user, add_generation_prompt=True)
        except UserError:
            return ""
        return prompt[len(written) :] if prompt.startswith(written) else ""


def _mark_copies(value: Json, mark: str) -> Iterator[Json]:
    """Copies of a message, each with a mark in another of its texts, after it or before white space at its end."""
    if isinstance(value, str):
        for end in (len(value), len(value.rstrip())):
            yield value[:end] + mark + value[end:]
    elif isinstance(value, dict):
        names = sorted(value.keys() - {"role"}, key=[*value, "content"][::-1].index)  # the content first, then the last
        for name in names:
            yield from ({**value, name: copy} for copy in _mark_copies(value[name], mark))
    elif isinstance(value, list):
        for i in reversed(range(len(value))):
            yield from ([*value[:i], copy, *value[i + 1 :]] for copy in _mark_copies(value[i], mark))


class _Generation(jinja2.ext.Extension):
    """The tags around text that a model writes; each is replaced by `generation_mark` where it begins and ends."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(_GENERATION_MARK, "load", lineno=line)], lineno=line) for _ in "be"
        )
        return [begin, *body, end]


def _reason(error: Exception) -> str:
    """The message of an error of a template."""
    is_readable = isinstance(error, jinja2.TemplateError | UserError)
    return str(error) if is_readable else f"{type(error).__name__}: {error}"


class _Compiled(NamedTuple):
    template: jinja2.Template
    marks_generation: bool  # whether it has the tags of `_Generation`


@functools.cache
def _compile(source: str) -> _Compiled:
    """The template, with the functions that templates of Hugging Face may call."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Json,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
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
