"""Cost models: the seconds of any shape, fitted to a few measured shapes."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import MAX_LISTED, check_integer, known_keywords

__all__ = ["CostModel", "fit_cost_model", "warn_beyond_measured"]

_MOST_ERROR = 0.2  # without a warning
_MOST_TIMES = 2


@known_keywords
@dataclass(frozen=True)
class CostModel:
    """What a microbatch costs: constant + linear * rows * length + quadratic * pairs of tokens that share a sample.

    Attributes:
        constant: of every microbatch, whatever its shape.
        linear: of each position.
        quadratic: of each such pair, as attention costs; rows of one sample have rows * length ** 2.
        unit: of the results, "seconds" say.
        device: what was measured on.
        model: what was measured.
        largest_error: the largest |predicted / measured - 1| of the measurements fitted.
        measured: (rows, length, value) of these.
    """

    constant: float
    linear: float
    quadratic: float
    unit: str = "seconds"
    device: str = ""
    model: str = ""
    largest_error: float = 0.0
    measured: tuple[tuple[int, int, float], ...] = ()

    def __call__(self, rows: ArrayLike, length: ArrayLike, *, pairs: ArrayLike | None = None) -> Any:
        """Return the cost of microbatches.

        Args:
            rows: integers of a shape that broadcasts with `length`.
            length: integers, in tokens.
            pairs: the sums of the squared lengths of the samples in packed rows; None if each row has one sample.

        Returns:
            float64 of the common shape.
        """
        positions = np.asarray(rows) * np.asarray(length)
        if pairs is not None:
            return self.constant + self.linear * positions + self.quadratic * np.asarray(pairs)
        return self.constant + positions * (self.linear + self.quadratic * np.asarray(length))


@known_keywords
def fit_cost_model(
    shapes: Sequence[tuple[int, int]],
    measured: ArrayLike,
    *,
    unit: str = "seconds",
    device: str = "",
    model: str = "",
) -> CostModel:
    """Fit a cost model to measurements by least squares of the relative error, all coefficients at least 0.

    Args:
        shapes: (rows, length) of each measured microbatch.
        measured: [n] what each cost, finite and above 0.
        unit: the unit of `measured`.
        device: what was measured on.
        model: what was measured.

    Returns:
        The model that minimises the sum of (predicted / measured - 1)**2, with a warning if it misses a measurement by
        more than 20 %.

    Raises:
        ValueError: if the two differ in number, if there are fewer than three distinct shapes or two distinct lengths,
            or if a measurement is not finite and above 0 (the first are listed by shape).

    Example:
        >>> fitted = fit_cost_model([(1, 10), (2, 10), (1, 100)], [8.0, 14.0, 152.0])
        >>> round(fitted.linear, 6), round(fitted.quadratic, 6), round(float(fitted(2, 100)), 6)
        (0.5, 0.01, 302.0)
    """
    pairs = _check_shapes(shapes)
    values = np.asarray(measured)
    if values.ndim != 1 or len(values) != len(pairs):
        raise ValueError(f"measured must be one number a shape: {len(pairs)} shapes, got shape {values.shape}")
    if values.dtype.kind not in "iuf":
        raise ValueError(f"measured must be numbers, got dtype {values.dtype}")
    costs = values.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))
    if len(bad):
        listed = ", ".join(f"{pairs[i][0]} x {pairs[i][1]}: {values[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"measured must be finite and above 0: {listed}; {len(bad)} in all")
    num_lengths = len({length for _, length in pairs})
    if len(set(pairs)) < 3 or num_lengths < 2:
        raise ValueError(
            "a cost model needs at least 3 distinct shapes of at least 2 distinct lengths, "
            f"got {len(set(pairs))} of {num_lengths}"
        )
    constant, linear, quadratic = _solve(np.array(pairs, dtype=np.float64), costs)
    fitted = CostModel(constant, linear, quadratic, unit=unit, device=device, model=model)
    rows, length = np.array(pairs, dtype=np.int64).T
    predicted = fitted(rows, length)
    errors = np.abs(predicted / costs - 1)
    worst = int(errors.argmax())
    if errors[worst] > _MOST_ERROR:
        warnings.warn(
            f"the cost model misses {int((errors > _MOST_ERROR).sum())} of {len(pairs)} measurements by more than "
            f"{_MOST_ERROR:.0%}, {rows[worst]} x {length[worst]} by {errors[worst]:.0%}: {predicted[worst]:.3g} {unit} "
            f"where {costs[worst]:.3g} were measured; measure again, undisturbed, or only shapes like the planned ones",
            stacklevel=3,
        )
    measurements = zip(*np.array(pairs).T.tolist(), costs.tolist(), strict=True)
    return replace(fitted, largest_error=float(errors[worst]), measured=tuple(measurements))


def warn_beyond_measured(cost: object, buckets: Iterable[tuple[int, ...]]) -> None:
    """Warn of buckets more than twice as large as all that a `CostModel` was fitted to."""
    if not isinstance(cost, CostModel) or not cost.measured:
        return
    longest = max(length for _, length, _ in cost.measured)
    largest = max(rows * length for rows, length, _ in cost.measured)
    beyond = [
        f"{rows} x {length}"
        for rows, length in buckets
        if length > _MOST_TIMES * longest or rows * length > _MOST_TIMES * largest
    ]
    if beyond:
        listed = ", ".join(beyond[:MAX_LISTED]) + (" ..." if len(beyond) > MAX_LISTED else "")
        warnings.warn(
            f"the cost model was measured up to {longest} tokens a row and {largest} in all, and is extrapolated to "
            f"more than {_MOST_TIMES} times that for {listed}: measure such shapes too",
            stacklevel=5,
        )


def _solve(shapes: NDArray[np.float64], costs: NDArray[np.float64]) -> list[float]:
    rows, length = shapes.T
    terms = np.stack([np.ones_like(rows), rows * length, rows * length * length], axis=1)
    # Shapes that all hold equally many tokens say nothing about the constant.
    if np.linalg.matrix_rank(terms / terms.max(axis=0), rtol=1e-6) < 3:
        raise ValueError(
            "the shapes do not tell the three coefficients apart, as when all hold equally many tokens: "
            f"measure a length with another number of rows too; got {shapes.astype(int).tolist()}"
        )
    terms /= costs[:, None]
    # The columns differ by many powers of ten: scaled alike, none of them is lost to rounding.
    scale = terms.max(axis=0)
    return (_least_squares(terms / scale, np.ones_like(costs)) / scale).tolist()


def _least_squares(terms: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients with the least sum of squares, none of them negative: the best of all subsets."""
    best, least = np.zeros(terms.shape[1]), np.inf
    for is_used in product([False, True], repeat=terms.shape[1]):
        solution = np.zeros(terms.shape[1])
        solution[list(is_used)] = np.linalg.lstsq(terms[:, is_used], wanted)[0]
        error = float(((terms @ solution - wanted) ** 2).sum())
        if (solution >= 0).all() and error < least:
            best, least = solution, error
    return best


def _check_shapes(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = []
    for index, pair in enumerate(shapes):
        if len(pair) != 2:
            raise ValueError(f"shape {index} must be a pair (rows, length), got {pair!r}")
        rows, length = pair
        pairs.append((check_integer(f"rows of shape {index}", rows), check_integer(f"length of shape {index}", length)))
    return pairs
