"""Chats as texts, by the templates that come with tokenizers.

Templates are untrusted: they run in Jinja's sandbox, and a bad one is a ValueError with the reason.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from jvarlen._common.checks import UserError
from jvarlen.data.marked_text import MarkedText

__all__ = ["ChatTemplate"]

_TODAY = date(2024, 7, 26)  # of templates that write it: a sample must have the same tokens whenever it is read


class ChatTemplate:
    """The chat template that comes with a tokenizer.

    Args:
      source: a Jinja template with the variable `messages`.
      special_tokens: the texts of the tokenizer's special tokens; the one that ends a message is learned with it.
      variables: more variables, such as `bos_token`.

    A template that writes today's date gets 26 July 2024, so that a sample is the same in every epoch.

    Raises:
      ValueError: it is no template.

    References:
      Hugging Face, "Chat templates", https://huggingface.co/docs/transformers/chat_templating
    """

    def __init__(self, source: str, special_tokens: Iterable[str] = (), variables: dict[str, str] | None = None):
        self._arguments = source, sorted(special_tokens), variables or {}
        self.key = json.dumps(self._arguments, sort_keys=True)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is no Jinja template: {error}") from None

    @classmethod
    def beside(cls, tokenizer: Path, special_tokens: Iterable[str]) -> ChatTemplate | None:
        """The template in `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer file, if there is one."""
        source = None
        settings: dict[str, Any] = {}
        config, own = tokenizer.with_name("tokenizer_config.json"), tokenizer.with_name("chat_template.jinja")
        if config.is_file():
            try:
                settings = json.loads(config.read_bytes())
                source = settings.get("chat_template")
            except (ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{config} is damaged: {error}") from None
        if isinstance(source, list):  # several by name
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
        if own.is_file():
            source = own.read_text(errors="replace")
        if not isinstance(source, str):
            return None
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
        variables = {name: text for name, text in texts.items() if isinstance(text, str)}
        try:
            return cls(source, special_tokens, variables)
        except UserError as error:
            raise UserError(f"{own if own.is_file() else config}: {error}") from None

    def render(self, messages: list[dict[str, Any]], loss_on: frozenset[str]) -> MarkedText:
        """The text of a chat.

        Args:
          messages: with `role` and `content`.
          loss_on: the roles that are learned; empty for everything.

        Returns:
          The text. Of a learned message, the content and the special token that ends it are learned.

        Raises:
          ValueError: the template rejects the messages, or leaves out or changes one of them.
        """
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
                raise UserError(f"the chat template leaves out message {i + 1}, of role {message['role']!r}")
            written += before
            content = message["content"]
            if not text.startswith(written + content):
                content = content.strip()  # as many templates do
            if not text.startswith(written + content):
                raise UserError(f"the chat template changes the content of message {i + 1}: loss_on cannot find it")
            start = len(written)
            written += content
            if message["role"] in loss_on:
                learned.append((start, self._end_of(text, len(written))))
        return MarkedText(text, tuple(learned), True)

    def _fill(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=False, **self._arguments[2])
        except Exception as error:  # the template may do anything
            raise UserError(f"the chat template rejects it: {error}") from None

    def _end_of(self, text: str, end: int) -> int:
        """The end of the special token that follows, or `end`."""
        start = end + len(text[end:]) - len(text[end:].lstrip())
        fitting = [token for token in self._arguments[1] if token and text.startswith(token, start)]
        return start + max(map(len, fitting)) if fitting else end

    def __getstate__(self) -> Any:
        return self._arguments

    def __setstate__(self, state: Any) -> None:
        ChatTemplate.__init__(self, *state)


class _Generation(jinja2.ext.Extension):
    """The tags around what a model writes; here they change nothing."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What chat templates of Hugging Face may use."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": _TODAY.strftime,
    }
    return environment
