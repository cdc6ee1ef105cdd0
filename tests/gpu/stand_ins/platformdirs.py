"""Stands in for platformdirs: a program's cache and data directories on Linux."""

import os
from pathlib import Path


def user_cache_path(name: str) -> Path:
    return _in_home("XDG_CACHE_HOME", ".cache") / name


def user_data_path(name: str) -> Path:
    return _in_home("XDG_DATA_HOME", ".local/share") / name


def _in_home(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual)
