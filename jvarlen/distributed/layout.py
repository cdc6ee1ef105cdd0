"""Layouts: how a step spreads over devices, as sizes of mesh axes and what is sharded.

A layout is never part of a plan or its digest, and is read without JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal, get_args

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, check_choices, list_first

__all__ = ["MESH_AXES", "Keeps", "Layout", "ScheduleName"]

MESH_AXES = ("data", "stage", "sequence", "tensor")

ScheduleName = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"]

Keeps = Literal["inputs", "residuals"]

_NUMBERED = (*MESH_AXES, "zero", "chunks", "sequence_from")
_KEEP_WORDS: dict[str, Keeps] = {"keep_inputs": "inputs", "keep_residuals": "residuals"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step spreads over devices.

    As text, a layout is its words joined by dots, in any order: `data4.zero2`. Words are a name and its number
    (`data4`, `stage2`, `sequence2`, `tensor2`, `zero1`, `chunks2`, `sequence_from4096`), `sequence_parallel`, or a
    schedule (`gpipe`, `1f1b`, `eager_1f1b`, `interleaved`, `zero_bubble`), or what is kept (`keep_inputs`,
    `keep_residuals`). `str` leaves defaults out.

    Raises:
      ValueError: a size below 1, a number that is not an integer, an unknown schedule, a ZeRO level outside 0 to 3, or
        one above 0 on one data shard.

    Example:
      >>> layout = Layout.parse("zero2.data4")
      >>> str(layout), layout.num_devices
      ('data4.zero2', 4)

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """

    data: int = 1
    """Data-parallel shards: size of the mesh axis `"data"`."""
    stage: int = 1
    """Pipeline stages: size of the mesh axis `"stage"`."""
    sequence: int = 1
    """Parts of a row: size of the mesh axis `"sequence"`."""
    tensor: int = 1
    """Parts of a matrix product: size of the mesh axis `"tensor"`."""
    zero: int = 0
    """ZeRO level: what is sharded over `"data"` and `"sequence"`. 0 nothing, 1 the optimizer state, 2 also gradients, 3
    also parameters."""
    schedule: ScheduleName = "eager_1f1b"
    """Schedule of the pipeline."""
    chunks: int = 1
    """Model chunks of each stage, for interleaved schedules."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel layers are sharded by position over `"tensor"`."""
    sequence_from: int = 0
    """Buckets of at least this length spread their positions over `"sequence"`; shorter ones use that axis as data."""
    keeps: Keeps | None = None
    """What layers keep from the forward pass to the backward pass: their `"inputs"`, from which the backward pass
    recomputes them, or their `"residuals"`. None: inputs with stages, and residuals otherwise."""

    def __post_init__(self):
        check_at_least_one(**{name: getattr(self, name) for name in (*MESH_AXES, "chunks")})
        check_at_least_zero(zero=self.zero, sequence_from=self.sequence_from)
        check_choices(schedule=(self.schedule, ScheduleName))
        if self.keeps is not None:
            check_choices(keeps=(self.keeps, Keeps))
        if not isinstance(self.sequence_parallel, bool):
            raise UserError(f"sequence_parallel must be True or False, not {self.sequence_parallel!r}")
        if self.zero > 3:
            raise UserError(f"zero must be a level from 0 to 3, not {self.zero}")
        if self.zero and self.num_shards == 1:
            raise UserError(
                f"zero{self.zero} shards over 'data' and 'sequence', whose sizes are 1: add a word such as data2"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that a text names.

        Args:
          text: words joined by dots, in any order.

        Returns:
          The layout, with defaults for what has no word. `Layout.parse(str(layout)) == layout`.

        Raises:
          ValueError: unknown words, several words for one thing, or a layout that is not valid.
        """
        given: dict[str, list[str]] = {}
        values: dict[str, Any] = {}
        unknown = []
        for word in text.split("."):
            value: Any
            match = re.fullmatch(rf"({'|'.join(_NUMBERED)})([0-9]+)", word)
            if match:
                name, value = match[1], int(match[2])
            elif word in get_args(ScheduleName):
                name, value = "schedule", word
            elif word == "sequence_parallel":
                name, value = word, True
            elif word in _KEEP_WORDS:
                name, value = "keeps", _KEEP_WORDS[word]
            else:
                unknown.append(repr(word))
                continue
            given.setdefault(name, []).append(word)
            values[name] = value
        if unknown:
            known = [*(f"{name}N" for name in _NUMBERED), "sequence_parallel", *get_args(ScheduleName), *_KEEP_WORDS]
            raise UserError(f"a layout has no word {list_first(unknown)}; its words are {', '.join(known)}")
        if repeated := [f"{' and '.join(words)}" for words in given.values() if len(words) > 1]:
            raise UserError(f"the layout {text!r} says one thing more than once: {list_first(repeated, '; ')}")
        return cls(**values)

    def __str__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "schedule":
                words.append(value)
            elif field.name == "keeps":
                words.append(f"keep_{value}")
            else:
                words.append(field.name if value is True else f"{field.name}{value}")
        return ".".join(words) or "data1"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each mesh axis, in their order."""
        return {name: getattr(self, name) for name in MESH_AXES}

    @property
    def kept(self) -> Keeps:
        """What is held of layers, the default for these stages included."""
        return self.keeps or ("inputs" if self.stage > 1 else "residuals")

    @property
    def data_axes(self) -> str | tuple[str, str]:
        """The mesh axes over which a step is reduced and ZeRO shards: `"data"`, and `"sequence"` if it has several."""
        return "data" if self.sequence == 1 else ("data", "sequence")

    @property
    def num_shards(self) -> int:
        """How many devices these axes have."""
        return self.data * self.sequence

    @property
    def num_devices(self) -> int:
        """How many devices it takes: the product of the sizes of its axes."""
        return math.prod(self.axis_sizes.values())
