"""Cost models: seconds or bytes of shapes of B rows and T tokens, fitted to a few that `measure_buckets` measured."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen._common.files import load_dataclass, save_dataclass
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings

__all__ = ["MOST_ERROR", "CostModel", "fit_cost_model", "warn_beyond_measured"]

Unit = Literal["seconds", "bytes"]

MOST_ERROR = 0.2  # of a fit that nothing is said of
_MOST_TIMES = 2  # so much larger than all that was measured may a bucket be
_LEAST_INDEPENDENCE = 1e-6  # of the three terms: the least singular value over the largest


@check_keywords
@dataclasses.dataclass(frozen=True)
class CostModel(Settings):
    """The cost of one microbatch: constant + linear·B·T + quadratic·pairs.

    The linear term is the cost of every token, padding included. The quadratic term is attention: `attend` computes the
    pairs of tokens of the same sample, Σ l² of a microbatch. Where nothing is packed, that is B·T².

    Attributes:
      constant: the same for any shape.
      linear: for each token, padding included.
      quadratic: for each pair of tokens of the same sample.
      unit: "seconds" or "bytes".
      device: the device that was measured.
      model: the model that was measured.
      largest_error: the largest relative error over the shapes it was fitted to.
      measured: (rows, length, value) of these shapes.
    """

    constant: float
    linear: float
    quadratic: float
    unit: Unit = "seconds"
    device: str = ""
    model: str = ""
    largest_error: float = 0.0
    measured: tuple[tuple[int, int, float], ...] = ()

    def __call__(
        self, rows: npt.ArrayLike, length: npt.ArrayLike, *, pairs: npt.ArrayLike | None = None
    ) -> Float64[np.ndarray, ...]:
        """The predicted cost of microbatches.

        Args:
          rows: integers[...], B.
          length: integers[...], T; all broadcast.
          pairs: numbers[...], Σ l² of the samples of a microbatch of packed rows, l tokens each; None: B·T², as of one
            sample a row.

        Returns:
          float64[...].
        """
        rows, length = np.asarray(rows), np.asarray(length)
        if pairs is not None:
            return self.constant + self.linear * (rows * length) + self.quadratic * np.asarray(pairs)
        return self.constant + rows * length * (self.linear + self.quadratic * length)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as JSON, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        save_dataclass(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          An equal model.

        Raises:
          ValueError: it holds no cost model; the message says what is wrong.
        """
        return load_dataclass(cls, path, "cost model")

    def __str__(self) -> str:
        scale, unit = (1e6, "µs") if self.unit == "seconds" else (1.0, "bytes")
        where = " on ".join(name for name in (self.model, self.device) if name)
        return (
            f"{self.constant * scale:.4g} {unit} + {self.linear * scale:.4g} {unit} a token + "
            f"{self.quadratic * scale:.4g} {unit} a pair of tokens"
            f"{f'; {where}' if where else ''}; largest error {self.largest_error:.1%} of {len(self.measured)} shapes"
        )


@check_keywords
def fit_cost_model(
    shapes: Sequence[tuple[int, int]] | npt.NDArray[np.integer],
    measured: npt.ArrayLike,
    *,
    unit: Unit = "seconds",
    device: str = "",
    model: str = "",
) -> CostModel:
    """Fits a cost model to measured shapes, by least squares of the relative error, no coefficient below 0.

    Args:
      shapes: (rows, length) pairs, at least 3 different ones with at least 2 different lengths. Full buckets of one
        budget all hold nearly as many tokens, which does not determine the constant: measure fewer rows too.
      measured: floats[len(shapes)], the cost of one microbatch of each, above 0.
      unit: "seconds" or "bytes".
      device: the device that was measured, kept in the cost model.
      model: the model that was measured, kept in the cost model.

    Returns:
      `CostModel`. If it misses a value by more than 20 %, a warning says by how much, and what was measured.

    Raises:
      ValueError: too few shapes, or shapes that cannot determine the three terms; not one value a shape; values that
        are not finite and above 0, listed by shape.

    Example:
      >>> shapes = [(8, 64), (4, 128), (1, 512), (2, 512)]
      >>> fitted = fit_cost_model(shapes, [1e-3 + b * t * (2e-6 + 1e-8 * t) for b, t in shapes])
      >>> round(fitted.linear * 1e6, 6), round(fitted.quadratic * 1e6, 6)
      (2.0, 0.01)

    References:
      Lawson and Hanson 1974, "Solving Least Squares Problems" (non-negative least squares).
    """
    if wrong := [f"({rows}, {length})" for rows, length in shapes if not (is_integer(rows) and is_integer(length))]:
        raise UserError(f"shapes must be (rows, length) pairs of integers, not {list_first(wrong)}")
    shapes = [(int(rows), int(length)) for rows, length in shapes]
    values = np.asarray(measured, np.float64)
    if values.shape != (len(shapes),):
        raise UserError(f"{len(shapes)} shapes need as many measured values, not an array of shape {values.shape}")
    each = zip(shapes, values.tolist(), strict=True)
    if wrong := [f"{b}×{t}: {value}" for (b, t), value in each if min(b, t) < 1 or not 0 < value < np.inf]:
        raise UserError(f"shapes and measured values must be above 0, and finite: {list_first(wrong)}")
    rows, length = np.array(shapes, np.float64).reshape(-1, 2).T
    terms = np.stack([np.ones_like(rows), rows * length, rows * length * length], axis=1)
    scaled = terms / terms.max(axis=0, initial=1)
    if len(shapes) < 3 or np.linalg.matrix_rank(scaled, rtol=_LEAST_INDEPENDENCE) < 3:
        raise UserError(
            "these shapes do not tell what a step, a token and attention cost: 3 are needed, of 2 lengths, and not all "
            f"of equally many tokens; measure a length with other rows as well; given were {shapes}"
        )
    terms /= values[:, None]
    scale = terms.max(axis=0)  # the terms differ by many orders of magnitude
    import scipy.optimize  # here: importing it takes long, and few need it

    coefficients = scipy.optimize.nnls(terms / scale, np.ones(len(values)))[0] / scale
    constant, linear, quadratic = coefficients.tolist()
    errors = np.abs(terms @ coefficients - 1)
    fitted = CostModel(
        constant=constant,
        linear=linear,
        quadratic=quadratic,
        unit=unit,
        device=device,
        model=model,
        largest_error=float(errors.max()),
        measured=tuple((b, t, value) for (b, t), value in zip(shapes, values.tolist(), strict=True)),
    )
    if fitted.largest_error > MOST_ERROR:
        b, t, value = fitted.measured[int(errors.argmax())]
        warnings.warn(
            f"the cost model is off by up to {fitted.largest_error:.0%}: {b}×{t} was measured at {value:.3g} "
            f"{unit}, it says {float(fitted(b, t)):.3g}; {np.count_nonzero(errors > MOST_ERROR)} of "
            f"{len(shapes)} shapes are off by more than {MOST_ERROR:.0%}. Measure again with nothing else running and "
            "more repeats, or only shapes of about the size that is planned",
            stacklevel=3,
        )
    return fitted


def warn_beyond_measured(cost: object, buckets: Iterable[tuple[int, ...]]) -> None:
    """Warns of buckets far larger than all shapes that a cost model was fitted to; other costs say nothing of that."""
    if not isinstance(cost, CostModel) or not cost.measured:
        return
    longest = max(length for _, length, _ in cost.measured)
    largest = max(rows * length for rows, length, _ in cost.measured)
    beyond = [(b, t) for b, t in buckets if t > _MOST_TIMES * longest or b * t > _MOST_TIMES * largest]
    if beyond:
        # From this line, so that Python shows what several functions say of the same buckets only once.
        warnings.warn(
            f"the cost model was measured with rows of up to {longest:,} tokens and up to {largest:,} tokens in all; "
            f"its {cost.unit} are a guess for buckets more than {_MOST_TIMES} times as large: "
            f"{list_first(f'{b}×{t}' for b, t in beyond)}. Measure such lengths and max_tokens as well",
            stacklevel=1,
        )
