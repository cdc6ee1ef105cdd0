"""Command lines of every option with values that it cannot take: exit code 2 and one line that names it."""

import dataclasses
import itertools
import typing

import jaxtyping
import numpy as np
import pytest

from jvarlen import UserError
from jvarlen.cli import COMMANDS, _class_of, _flags, main

BASE = {
    "plan": ["lengths.npy", "--max-tokens", "512"],
    "sort": ["lengths.npy"],
    "train": [],
    "report": ["run"],
    "sample": ["run", "--prompt", "a"],
    "export": ["run", "model.safetensors"],
    "compile": ["lengths.npy", "--max-tokens", "512", "--target", "here"],
    "measure": [],
}
NO_NUMBERS = ["nan", "-inf", "x", "", "1,2", "0x10", "None?", "\x1b[2J"]
NO_COUNTS = ["-1", "0.5", "1e400", "1e3", "9223372036854775808", *NO_NUMBERS]


def settings_of(command):
    """Each setting of a command: its class, name, flag and type."""
    flags = dict(_flags(command))

    def walk(settings):
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if dataclasses.is_dataclass(field.default_factory):
                yield from walk(field.default_factory)
            elif field.name in flags:
                yield (
                    settings,
                    field.name,
                    flags[field.name],
                    set(typing.get_args(hints[field.name])) or {hints[field.name]},
                )

    return list(walk(command))


def command_lines():
    """A number option and a value that it cannot take, of each command; of the many of `train` fewer values."""
    for name in COMMANDS:
        for place, (_, _, flag, kinds) in enumerate(settings_of(_class_of(name))):
            if kinds & {int, float} and str not in kinds:
                values = NO_COUNTS if int in kinds else NO_NUMBERS
                num_values = 1 if name == "train" else 4
                chosen = itertools.islice(
                    itertools.cycle(values), place % len(values), place % len(values) + num_values
                )
                yield from (pytest.param(name, flag, value, id=f"{name} {flag} {value!a}") for value in chosen)


@pytest.mark.parametrize(("name", "flag", "value"), list(command_lines()))
def test_a_value_that_is_no_number_of_its_kind_is_one_line_with_the_option(
    name, flag, value, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.arange(1, 50))
    for started in ("jvarlen.runs.fit.fit", "jvarlen.runs.commands.measure_costs"):
        monkeypatch.setattr(started, lambda *args, **kwargs: pytest.fail("it began"))
    assert main([name, *BASE[name], flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jvarlen: ")
    assert flag in line
    assert line.isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.npy"]


@pytest.fixture
def without_type_checks():
    """Settings get what their types forbid, as they do outside tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", COMMANDS)
def test_settings_take_no_number_that_cannot_be(name):
    """Python's numbers, which need no parser: taken, or refused by the name of the setting."""
    for settings, field, _, kinds in settings_of(_class_of(name)):
        missing = dataclasses.MISSING
        given = [each for each in dataclasses.fields(settings) if each.default is each.default_factory is missing]
        required = {each.name: 512 if each.name == "max_tokens" else () for each in given if each.name != field}
        is_number = kinds & {int, float} and Ellipsis not in kinds
        for value in (float("nan"), float("inf"), -1, 0, 2**31, 2**63, 10**400) if is_number else ():
            try:
                settings(**required | {field: value})
            except UserError as error:
                message = str(error)
            else:
                assert value < (np.inf if float in kinds else 2**63), (field, value)
                assert float in kinds or isinstance(value, int), (field, value)
                continue
            assert field in message
