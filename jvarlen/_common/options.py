"""The options of a command, from the fields of its settings: reading them, help, and errors in their words."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union

from jvarlen._common.checks import UserError
from jvarlen._common.settings import WRONG, plain_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["HIDDEN", "POSITIONAL", "Option", "help_of", "in_options", "options_of", "parse"]

HIDDEN = "hidden"  # metadata of the type of a field without an option
POSITIONAL = {"positional": True}  # metadata of a field whose values have no name

_D = TypeVar("_D", bound="DataclassInstance")
_Kind: TypeAlias = Any  # a type, or a form such as int | None
_Given: TypeAlias = "dict[tuple[str, ...], object]"  # values by the paths of their options
_WIDTH = 100
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: "True|False"}
_MEANT = {  # names of others that are not alike
    "lr": ("optimizer.learning-rate",),
    "batch-size": ("sequences-per-step", "max-tokens"),
    "seq-length": ("max-length",),
    "max-seq-length": ("max-length",),
}


class Option(NamedTuple):
    """An option of a command."""

    group: type[DataclassInstance]  # the settings whose field it sets
    path: tuple[str, ...]  # names of fields, from the settings of the command on
    name: str  # without dashes
    kind: _Kind
    default: object
    is_positional: bool

    @property
    def is_switch(self) -> bool:
        """Whether it is given as --name or --no-name."""
        return bool in _members(self.kind)

    @property
    def is_needed(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def usage(self) -> str:
        """How it is given."""
        if self.is_positional:
            return self.name.upper()
        return f"--{self.name}, --no-{self.name}" if self.is_switch else f"--{self.name} {_metavar(self.kind)}"

    def value(self, texts: Sequence[str]) -> object:
        """The value that texts mean."""
        try:
            return _value(self.kind, texts)
        except ValueError:
            shown = f", not {' '.join(texts)}" if texts else ""
            raise UserError(f"{self.usage.partition(' ')[0]} takes {_metavar(self.kind)}{shown}") from None


def options_of(settings: type[DataclassInstance], prefix: str = "", path: tuple[str, ...] = ()) -> Iterator[Option]:
    """The options of a command, in the order of its settings."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        name, group = field.metadata.get("name", field.name), field.default_factory
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            yield from options_of(group, prefix + field.metadata.get("prefix", f"{name}."), (*path, field.name))
        elif HIDDEN not in getattr(hints[field.name], "__metadata__", ()):
            made = field.default if group is dataclasses.MISSING else group()
            is_positional, name = "positional" in field.metadata, (prefix + name).replace("_", "-")
            yield Option(settings, (*path, field.name), name, hints[field.name], made, is_positional)


def parse(settings: type[_D], args: Sequence[str], prog: str, default: _D | None = None) -> _D:
    """The settings of a command from its arguments; those that are not given are those of `default`."""
    options = list(options_of(settings))
    given, unnamed = _read(args, options, prog)
    positional = [option for option in options if option.is_positional]
    for option in positional:
        count = len(unnamed) if _arity(option.kind) is None else 1
        if unnamed[:count]:
            given[option.path], unnamed = option.value(unnamed[:count]), unnamed[count:]
    if unnamed:
        raise UserError(f"{' '.join(unnamed)} is of no option: see {prog} --help")
    if missing := [option.usage for option in options if option.is_needed and option.path not in given]:
        raise UserError(f"give {', '.join(missing)}: see {prog} --help")
    return _made(settings, given, default)


def _read(args: Sequence[str], options: Sequence[Option], prog: str) -> tuple[_Given, list[str]]:
    """The values of the options that are given, and the arguments of none."""
    named = {option.name: option for option in options if not option.is_positional}
    switches = {f"no-{option.name}": option for option in options if option.is_switch}
    given: _Given = {}
    left, unnamed = list(args), list[str]()
    while left:
        arg = left.pop(0)
        if not arg.startswith("--"):
            unnamed.append(arg)
            continue
        name, is_assigned, text = arg.removeprefix("--").partition("=")
        if name in switches:
            given[switches[name].path] = False
            continue
        if name not in named:
            if any(option.is_positional and option.name == name for option in options):
                raise UserError(f"give {name.upper()} without --{name}: see {prog} --help")
            raise UserError(_unknown(name, {*named, *switches}, prog))
        option = named[name]
        if option.is_switch and not is_assigned:
            given[option.path] = True
            continue
        count = _arity(option.kind)
        following = itertools.takewhile(lambda each: not each.startswith("--"), left[:count])
        texts = [text] if is_assigned else list(following)
        left = left if is_assigned else left[len(texts) :]
        value, before = option.value(texts), given.get(option.path)
        given[option.path] = (*before, *value) if isinstance(before, tuple) and isinstance(value, tuple) else value
    return given, unnamed


def _unknown(name: str, known: Collection[str], prog: str) -> str:
    """What to say of an option that there is not."""
    by_end = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    meant = [each for each in _MEANT.get(name, ()) if each in known]
    meant = meant or [by_end[each] for each in difflib.get_close_matches(name.replace("_", "-"), by_end, 1)]
    hint = f": do you mean {' or '.join(f'--{each}' for each in meant)}?" if meant else ";"
    return f"there is no option --{name}{hint} {prog} --help-all lists all"


def _made(settings: type[_D], given: _Given, default: _D | None, path: tuple[str, ...] = ()) -> _D:
    """The settings with the given values, by their paths."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(settings):
        here, group = (*path, field.name), field.default_factory
        if here in given:
            values[field.name] = given[here]
        elif any(each[: len(here)] == here for each in given) and isinstance(group, type):
            values[field.name] = _made(group, given, default and getattr(default, field.name), here)
    return settings(**values) if default is None else dataclasses.replace(default, **values)


def _members(kind: _Kind) -> list[_Kind]:
    """The types of a union, or the type."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    return [*typing.get_args(kind)] if typing.get_origin(kind) in (Union, types.UnionType) else [kind]


def _arity(kind: _Kind) -> int | None:
    """How many texts a value is; None for any number."""
    return None if typing.get_origin(_members(kind)[0]) is tuple else 1


def _metavar(kind: _Kind) -> str:
    """How values of a type are written."""
    members = [each for each in _members(kind) if each is not types.NoneType]
    if len(members) > 1:
        members = [each for each in members if each is not str or Path not in members]
        return "|".join(dict.fromkeys(map(_metavar, members)))
    origin, args = typing.get_origin(members[0]), typing.get_args(members[0])
    if origin is Literal:
        return "|".join(args)
    if origin is tuple:
        return f"{_metavar(args[0])} ..." if args[1:] == (Ellipsis,) else " ".join(map(_metavar, args))
    return _METAVARS[members[0]]


def _value(kind: _Kind, texts: Sequence[str]) -> object:
    """The texts as a value of a type; ValueError if they are none."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and Ellipsis in args:
        size = len(typing.get_args(args[0])) if typing.get_origin(args[0]) is tuple else 1
        return tuple(_value(args[0], texts[i : i + size]) for i in range(0, len(texts), size))
    if typing.get_origin(kind) is tuple:
        return tuple(_value(each, [text]) for each, text in zip(args, texts, strict=True))
    (text,) = texts
    for read in (int, float, {"True": True, "False": False, "None": None}.get, str):
        with contextlib.suppress(ValueError):
            if (value := plain_value(read(text), kind)) is not WRONG and (value is not None or text == "None"):
                return value
    raise ValueError(text)


def help_of(settings: type[DataclassInstance], prog: str, first: Sequence[str] = ()) -> str:
    """The help of a command: of all options, or of those that are needed or named first, in their order."""
    options, width = list(options_of(settings)), min(shutil.get_terminal_size().columns, _WIDTH)
    about = inspect.cleandoc(settings.__doc__ or "")
    usage = "".join(f" {option.usage}" for option in options if option.is_positional or option.is_needed)
    lines, group = [f"usage: {prog}{usage} [OPTIONS]", "", textwrap.fill(about, width), *[""] * bool(first)], None
    by_name = {option.name: option for option in options if option.is_needed or option.name in first}
    shown = [by_name[name] for name in dict.fromkeys([*first, *by_name]) if name in by_name] if first else options
    for option in shown:
        if option.group is not group and not first:
            group = option.group
            lines += ["", f"{(group.__doc__ or '').splitlines()[0].rstrip('.')}:" * (group is not settings)]
        text = in_options(_docs_of_fields(option.group).get(option.path[-1], ""), options)
        default = option.default
        if default not in (None, (), dataclasses.MISSING) and default is not False:
            said = " ".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else default
            text += f" Default: {said}."
        indent = " " * 8
        filled = textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        lines += [f"  {option.usage}", *filled]
    if first:
        lines += ["", f"{prog} --help-all lists all {len(options)} options."]
    return "\n".join(lines)


@functools.cache
def _docs_of_fields(settings: type) -> dict[str, str]:
    """What stands below each field of a class and of its bases."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(settings.__mro__)):
        (tree,) = [
            each
            for each in ast.walk(ast.parse(inspect.getsource(sys.modules[base.__module__])))
            if isinstance(each, ast.ClassDef) and each.name == base.__name__
        ]
        for field, doc in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs


def in_options(text: str, options: Iterable[Option]) -> str:
    """The text with options in place of settings: on_bad_sample="skip" becomes --on-bad-sample skip."""
    by_field = {option.path[-1]: option.name for option in options if not option.is_positional}
    names = "|".join(sorted(by_field, key=len, reverse=True))
    value = r"""(?:(?P<quote>["'])(?P<quoted>[^"']*)(?P=quote)|(?P<switch>True|False)\b|(?P<plain>\w(?:[\w.]*\w)?))?"""
    alone = r"(?P<alone>[a-z]+(?:_[a-z]+)+)(?![\w/=-]|\.\w)"  # nothing else is written so
    first = rf"(?:^|(?<=[,;:] )|(?<=and ))(?P<first>{names})(?= \()"  # a setting and its value, in parentheses
    users = r"""(?<!\w)(?P<mark>["']).*?(?P=mark)(?!\w)"""  # what stands in quotes, such as a field, stays

    def as_option(found: re.Match[str]) -> str:
        name = found["name"] or found["alone"] or found["first"]
        if name not in by_field:
            return found[0]
        given = found["quoted"] or found["plain"]
        return f"--{'no-' if found['switch'] == 'False' else ''}{by_field[name]}{f' {given}' if given else ''}"

    return re.sub(rf"(?<![\w./?&-])(?:(?P<name>{names})={value}|{alone})|{first}|{users}", as_option, text)
