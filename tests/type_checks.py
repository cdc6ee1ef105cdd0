"""Signatures are checked while tests run, except where a test hands a function what it must refuse."""

from typing import Any

import beartype
import pytest
from jaxtyping import config, install_import_hook

PACKAGES = (  # whose arrays have shapes that types tell
    "attention", "batches", "distributed", "loading", "models", "parallel", "reports", "sorting", "training",
)  # fmt: skip
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # an int is a float as well
_raises = pytest.raises


def install() -> None:
    """From now on, modules of the packages are imported with checks."""
    install_import_hook([f"jvarlen.{package}" for package in PACKAGES], "tests.type_checks.check")
    pytest.raises = RaisesUnchecked


class RaisesUnchecked:
    """As `pytest.raises`, for what functions refuse themselves."""

    def __init__(self, *expected: Any, **options: Any):
        self._raises = _raises(*expected, **options)

    def __enter__(self) -> pytest.ExceptionInfo:
        self._before = config.jaxtyping_disable
        config.update("jaxtyping_disable", True)
        return self._raises.__enter__()

    def __exit__(self, *error: Any) -> bool:
        config.update("jaxtyping_disable", self._before)
        return self._raises.__exit__(*error)
