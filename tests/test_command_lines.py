"""Settings of every command with numbers that they cannot take: refused by the name of the setting."""

import dataclasses
import importlib
import typing

import jaxtyping
import numpy as np
import pytest

from jvarlen import UserError
from jvarlen.cli import COMMANDS


def settings_of(settings):
    """Each setting of a command: its class, name and type."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(field.default_factory):
            yield from settings_of(field.default_factory)
        else:
            yield settings, field.name, set(typing.get_args(hints[field.name])) or {hints[field.name]}


@pytest.fixture
def without_type_checks():
    """Settings get what their types forbid, as they do outside tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("module", "class_name"), [command[:2] for command in COMMANDS.values()])
def test_settings_take_no_number_that_cannot_be(module, class_name):
    """Python's numbers, which need no parser: taken, or refused by the name of the setting."""
    command = getattr(importlib.import_module(f"jvarlen.{module}"), class_name)
    for settings, field, kinds in settings_of(command):
        missing = dataclasses.MISSING
        given = [each for each in dataclasses.fields(settings) if each.default is each.default_factory is missing]
        fitting = {"max_tokens": 512, "run_dirs": ()}
        required = {each.name: fitting.get(each.name, "here") for each in given if each.name != field}
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
