"""Layouts: how a step spreads over devices, as sizes of mesh axes and what is sharded.

A layout is never part of a plan or its digest, and is read without JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal, get_args

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings

__all__ = ["MESH_AXES", "Layout", "ReduceDtype", "Remat", "ScheduleName"]

MESH_AXES = ("data", "stage", "context", "tensor")

ScheduleName = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"]

Remat = Literal["none", "selective", "full"]

ReduceDtype = Literal["float32", "bfloat16"]

_NUMBERED = (*MESH_AXES, "zero", "virtual", "context_from", "grad_bucket_bytes", "layers")
_WORDS: dict[str, tuple[str, Any]] = {  # the field that a word without a number sets, and its value
    "data": ("data", -1),
    "sequence_parallel": ("sequence_parallel", True),
    **{name: ("schedule", name) for name in get_args(ScheduleName)},
    **{f"remat_{name}": ("remat", name) for name in get_args(Remat)},
    **{f"reduce_{name}": ("reduce_dtype", name) for name in get_args(ReduceDtype)},
}
_WORD_OF = {setting: word for word, setting in _WORDS.items()}


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Settings):
    """How a step spreads over devices.

    As text, a layout is its words joined by dots, in any order: `data4.zero2`. Words are a name and its number
    (`data4`, `stage2`, `context2`, `tensor2`, `zero1`, `virtual2`, `context_from4096`, `grad_bucket_bytes65536`,
    `layers9`),
    `data`, `sequence_parallel`, a schedule (`gpipe`, `1f1b`, `eager_1f1b`, `interleaved`, `zero_bubble`), what the
    backward pass computes again (`remat_full`, `remat_selective`, `remat_none`), or the type in which gradients are
    sent (`reduce_bfloat16`, `reduce_float32`). `str` leaves defaults out.

    Raises:
      ValueError: a size below 1, a number that is not an integer, an unknown schedule, a ZeRO level outside 0 to 3, or
        one above 0 on one data shard.

    Example:
      >>> layout = Layout.parse("zero2.data4")
      >>> str(layout), layout.num_devices
      ('data4.zero2', 4)
      >>> str(Layout()), str(Layout(tensor=2).for_devices(8))
      ('data', 'data4.tensor2')

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """

    data: int = -1
    """Data-parallel shards: size of the mesh axis `"data"`. -1 leaves it open: `for_devices` and
    `place` fill all devices."""
    stage: int = 1
    """Pipeline stages: size of the mesh axis `"stage"`."""
    context: int = 1
    """Parts of a row: size of the mesh axis `"context"`."""
    tensor: int = 1
    """Parts of a matrix product: size of the mesh axis `"tensor"`."""
    zero: int = 0
    """ZeRO level, which shards over `"data"` and `"context"`: 0 nothing, 1 the optimizer state, 2 also gradients, 3
    also parameters."""
    schedule: ScheduleName = "eager_1f1b"
    """Schedule of the pipeline."""
    virtual: int = 1
    """Virtual stages of each stage, for the schedule `interleaved`."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel layers are sharded by position over `"tensor"`."""
    context_from: int = 0
    """Buckets of at least this length spread their positions over `"context"`; shorter ones use that axis as data."""
    remat: Remat | None = None
    """Rematerialization: layers keep for the backward pass all that it uses (`"none"`), results of attention and
    arrays named by `jax.ad_checkpoint.checkpoint_name` (`"selective"`), or only their inputs, to run again
    (`"full"`). None takes `"full"` with stages, and otherwise `"none"`."""
    reduce_dtype: ReduceDtype = "float32"
    """The type in which gradients are sent over the data axes. `"bfloat16"` halves the bytes: each device's gradients
    are rounded once, and so are sums that all devices get; they are added in float32 at least."""
    grad_bucket_bytes: int = 0
    """Reduce gradients in buckets of this many bytes, the first of 1 MiB at most, each as soon as it is complete, so
    that reducing overlaps with the rest of the backward pass. PyTorch's default is 25 MiB. 0 reduces all at once, at
    the end of the step."""
    layers: int = 0
    """Layers of each stage, or virtual stage; the last ones have what is left. 0: as few as possible."""

    def __post_init__(self):
        super().__post_init__()
        given = {name: getattr(self, name) for name in (*MESH_AXES, "virtual")}
        if self.data == -1:
            del given["data"]
        check_at_least_one(**given)
        names = "zero", "context_from", "grad_bucket_bytes", "layers"
        check_at_least_zero(**{name: getattr(self, name) for name in names})
        if self.zero > 3:
            raise UserError(f"zero must be a level from 0 to 3, not {self.zero}")
        if self.zero and self.data != -1 and self.num_shards == 1:
            raise UserError(
                f"zero{self.zero} shards over 'data' and 'context', whose sizes are 1: add a word such as data2"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that a text names; `Layout.parse(str(layout)) == layout`.

        Args:
          text: words joined by dots, in any order. Unknown ones, or several for one thing, are a ValueError.

        Returns:
          The layout, with defaults for what has no word.
        """
        given: dict[str, list[str]] = {}
        values: dict[str, Any] = {}
        unknown = []
        for word in text.split("."):
            if match := re.fullmatch(rf"({'|'.join(_NUMBERED)})([0-9]+)", word):
                name, value = match[1], int(match[2])
            elif word in _WORDS:
                name, value = _WORDS[word]
            else:
                unknown.append(repr(word))
                continue
            given.setdefault(name, []).append(word)
            values[name] = value
        if unknown:
            known = ", ".join([*_WORDS, *(f"{name}N" for name in _NUMBERED)])
            raise UserError(f"a layout has no word {list_first(unknown)}; its words are {known}")
        if repeated := [" and ".join(words) for words in given.values() if len(words) > 1]:
            raise UserError(f"the layout {text!r} says one thing more than once: {list_first(repeated, '; ')}")
        return cls(**values)

    def __str__(self) -> str:
        changed = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ".".join(_WORD_OF.get((name, value), f"{name}{value}") for name, value in changed) or "data"

    def for_devices(self, num_devices: int) -> Layout:
        """The same layout with the number of data shards that fills these devices.

        Args:
          num_devices: all devices; ValueError if the layout cannot take this many.

        Returns:
          The layout.
        """
        if self.data != -1:
            if num_devices != self.num_devices:
                raise UserError(f"the layout {self} takes {self.num_devices} devices, not the {num_devices} given ones")
            return self
        of_shard = dataclasses.replace(self, data=1, zero=0).num_devices
        if num_devices < 1 or num_devices % of_shard:
            raise UserError(f"the layout {self} takes a multiple of {of_shard} devices, not {num_devices}")
        return dataclasses.replace(self, data=num_devices // of_shard)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each mesh axis, in their order; raises ValueError while the number of data shards is open."""
        if self.data == -1:
            raise UserError(f"the layout {self} has as many data shards as devices leave: say how many, such as data8")
        return {name: getattr(self, name) for name in MESH_AXES}

    @property
    def remat_in_force(self) -> Remat:
        """Rematerialization, the default for these stages included."""
        return self.remat or ("full" if self.stage > 1 else "none")

    @property
    def data_axes(self) -> str | tuple[str, str]:
        """The mesh axes over which a step is reduced and ZeRO shards: `"data"`, and `"context"` if it has several."""
        return "data" if self.context == 1 else ("data", "context")

    @property
    def is_data_parallel(self) -> bool:
        """Whether microbatches alone are spread, over devices that all hold the whole state."""
        spread = ("stage", "context", "tensor", "zero", "virtual", "sequence_parallel", "context_from")
        return all(getattr(self, name) == getattr(Layout, name) for name in spread)

    @property
    def num_shards(self) -> int:
        """How many devices these axes have."""
        return self.axis_sizes["data"] * self.context

    @property
    def num_devices(self) -> int:
        """How many devices it takes: the product of the sizes of its axes."""
        return math.prod(self.axis_sizes.values())
