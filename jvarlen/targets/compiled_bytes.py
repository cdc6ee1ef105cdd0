"""The bytes of steps, interpolated between compiled programs or fitted to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from jvarlen.planning.buckets import Bucket
from jvarlen.planning.cost_model import CostModel

__all__ = ["NEAR", "CompiledBytes", "fit_costs"]

NEAR = 0.05  # of the limit: programs this near count most in the fit, which may be wrong by as much


class CompiledBytes:
    """Bytes of a device during a step, as `memory` of a `Budget`: interpolated between compiled programs, or fitted.

    Args:
      max_bytes: the limit, near which the fit is closest.
    """

    def __init__(self, max_bytes: float):
        self._max_bytes = max_bytes
        self._compiled: dict[Bucket, int] = {}
        self._fit = CostModel(0.0, 0.0, 0.0, "bytes")

    def add(self, bucket: Bucket, num_bytes: int, state_bytes: int) -> None:
        """Adds a compiled program's bytes, and those of the state, which do not depend on rows."""
        self._compiled[bucket] = num_bytes
        shapes = dict(self._compiled)
        if len(shapes) == 1:  # one program does not show how the bytes grow
            shapes[Bucket(0, bucket.length)] = state_bytes
        self._fit = fit_costs(shapes, self._max_bytes)

    def __call__(self, rows: npt.ArrayLike, length: npt.ArrayLike) -> Float64[np.ndarray, ...]:
        """Estimates the bytes of a bucket.

        Args:
          rows: integers[...].
          length: integers[...]; both broadcast.

        Returns:
          float64[...], which never fall as rows grow.
        """
        rows, length = np.broadcast_arrays(rows, length)
        values = np.array(self._fit(rows, length))
        for known in sorted({bucket.length for bucket in self._compiled}, reverse=True):
            of_rows = sorted((b.rows, each) for b, each in self._compiled.items() if b.length == known)
            compiled, num_bytes = np.array(of_rows, np.float64).T
            # More rows can take less, where XLA begins to fuse: fewer then count as if they took no more than that.
            num_bytes = np.minimum.accumulate(num_bytes[::-1])[::-1]
            constant = min(self._fit.constant, num_bytes[0])
            more = np.maximum(rows - compiled[-1], 0) * (num_bytes[-1] - constant) / compiled[-1]
            of_length = np.interp(rows, [0, *compiled], [constant, *num_bytes]) + more
            values = np.where(
                length == known, of_length, np.where(length < known, np.minimum(values, of_length), values)
            )
        return values


def fit_costs(values: Mapping[Bucket, float], near: float) -> CostModel:
    """Constant, tokens and pairs of tokens, with the least errors where values are near one."""
    import scipy.optimize  # here: importing it takes long

    rows, length = np.array(list(values), np.float64).T
    goal = np.array(list(values.values()), np.float64)
    weights = 1 / (np.abs(goal / near - 1) + NEAR) / goal
    terms = np.stack([np.ones_like(rows), rows * length, rows * length * length], axis=1) * weights[:, None]
    terms[:, 2] *= len({*length}) > 1  # rows of one length do not distinguish tokens from pairs of them
    scale = np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    return CostModel(*(scipy.optimize.nnls(terms / scale, goal * weights)[0] / scale).tolist())
