"""One body of contract tests over every package that implements the contract."""

import dataclasses
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

# All packages are required: one that cannot be imported fails its tests. Naming fewer in PARITY_PACKAGES is for the
# time when one of them is still being written.
PACKAGES = tuple(os.environ.get("PARITY_PACKAGES", "jvarlen,torch_ref").split(","))


def find(package: ModuleType, name: str) -> Any:
    """A name that `torch_ref` has at the top, and `jvarlen` there or in its packages for planning and data."""
    places = [package] if package.__name__ != "jvarlen" else [package, package.planning, package.data]
    return next(getattr(place, name) for place in places if name in place.__all__)


def in_both(call: Callable[[ModuleType], Any]) -> tuple[Any, Any]:
    """What a call gives in either package."""
    return call(importlib.import_module("jvarlen")), call(importlib.import_module("torch_ref"))


def assert_same(one: Any, other: Any, *names: str) -> None:
    """Attributes of results of both packages are equal; arrays also in their dtype."""
    for name in names:
        value, expected = getattr(one, name), getattr(other, name)
        if name == "buckets":  # a dataclass of each package
            value, expected = dataclasses.astuple(value), dataclasses.astuple(expected)
        if isinstance(value, np.ndarray):
            assert value.dtype == expected.dtype, name
            assert np.array_equal(value, expected), name
        else:
            assert value == expected, name


def assert_same_plan(one: Any, other: Any) -> None:
    """Plans of both packages are equal integer for integer."""
    assert_same(one, other, "digest", "buckets", "num_microbatches", "sample_ids")
    assert_same(one, other, "group_bucket", "step_groups", "group_offsets", "group_tokens", "step_offsets")
    assert_same(one, other, "num_tokens", "num_sequences", "rows_per_step", "overlong", "num_dropped", "num_truncated")
    assert_same(one, other, "row_offsets", "chunk_starts", "samples_per_row", "num_steps")
    assert abs(one.padding - other.padding) < 1e-12
    assert list(one.groups_of_buckets().values()) == list(other.groups_of_buckets().values())
    for group in range(one.num_groups):
        assert np.array_equal(one.rows(group), other.rows(group))
        if one.chunk_starts is not None:
            assert np.array_equal(one.chunks(group), other.chunks(group))


def assert_same_packing(one: Any, other: Any) -> None:
    """Packings of both packages are equal integer for integer."""
    assert_same(one, other, "sample_ids", "row_offsets", "sample_lengths", "capacity", "num_tokens", "starts")
    assert_same(one, other, "chunk_starts", "row_lengths", "overlong", "num_dropped", "num_truncated", "fill")
