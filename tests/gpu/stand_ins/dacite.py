"""Stands in for dacite: reading settings or compile reports back from JSON raises an error that it is missing."""

from typing import Any


class DaciteError(Exception):
    pass


class Config:
    def __init__(self, **settings: Any):
        pass


def from_dict(*arguments: Any) -> Any:
    raise ImportError("dacite is not installed; it reads objects back from JSON", name="dacite")
