"""Stands in for jaxtyping: array types that say nothing."""

from typing import Any

import jax

Array = jax.Array


class _AnyArray:
    """What every dtype is here."""

    def __class_getitem__(cls, array_and_shape: Any) -> Any:
        return Any


def __getattr__(name: str) -> type[_AnyArray]:
    if not name[0].isupper():
        raise AttributeError(name)
    return _AnyArray
