"""Seconds of a step of every bucket on many layouts at once, by what they are spent on. NumPy only.

Letters: C layouts, K buckets, L layers, M microbatches of a step, m of a data shard, S stages, V chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

__all__ = ["StepSeconds"]


class StepSeconds(NamedTuple):
    """Seconds of one step, by what they are spent on; each is float64[C, K], a row for a layout, or float64[K].

    Attributes:
      compute: forward and backward passes of the microbatches of a device, with what is computed again.
      bubble: waiting for other stages.
      tensor: communication over "tensor".
      sequence: communication over "sequence" for rows that are spread.
      stage: sending from stage to stage.
      data: communication of gradients and parameters over "data" and "sequence" that no backward pass hides.
      update: of the optimizer.
    """

    compute: Float64[np.ndarray, ...]
    bubble: Float64[np.ndarray, ...]
    tensor: Float64[np.ndarray, ...]
    sequence: Float64[np.ndarray, ...]
    stage: Float64[np.ndarray, ...]
    data: Float64[np.ndarray, ...]
    update: Float64[np.ndarray, ...]

    @property
    def total(self) -> Float64[np.ndarray, ...]:
        """The sum of all."""
        return np.add.reduce([np.asarray(part) for part in self])
