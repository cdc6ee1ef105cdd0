"""The log of an asynchronous run: which gradients each update took, and on which parameters they were computed.

Letters: U updates, M microbatches of a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically
from jvarlen._common.pytree import is_key, leaves_by_name

__all__ = ["ArrivalLog", "digest_of_state"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ArrivalLog:
    """What happened in `train_async`, in the order of the updates; `replay` repeats it.

    Version v of the parameters is that after v updates of the run.

    Attributes:
      plan_digest: of the plan.
      staleness_bound: of the run; None: unbounded.
      initial_digest: SHA-256 of the state before the first update, as hex digits.
      final_digest: likewise, after the last one.
      steps: int64[U], the step of the plan that each update took.
      versions: int64[U, M], the version on which the gradient of each microbatch was computed.
      workers: int64[U, M], the worker that computed it.
      arrived_s: float64[U, M], when it arrived, in seconds since the first microbatch was handed out.
      applied_s: float64[U], when the update was applied, likewise.
      losses: float64[U], the loss of each update, Σ loss / Σ weight over its microbatches.
    """

    plan_digest: str
    staleness_bound: int | None
    initial_digest: str
    final_digest: str
    steps: Int64[np.ndarray, " U"]
    versions: Int64[np.ndarray, "U M"]
    workers: Int64[np.ndarray, "U M"]
    arrived_s: Float64[np.ndarray, "U M"]
    applied_s: Float64[np.ndarray, " U"]
    losses: Float64[np.ndarray, " U"]

    def __post_init__(self) -> None:
        num_updates = len(self.steps)
        shapes = {name: np.shape(getattr(self, name)) for name in _ARRAYS}
        of_parts = (num_updates, *self.versions.shape[1:2])
        wrong = [
            f"{name} {list(shape)}"
            for name, shape in shapes.items()
            if shape != (of_parts if name in _OF_PARTS else (num_updates,))
        ]
        if wrong or self.versions.ndim != 2:
            raise UserError(f"arrays of an arrival log must be of the same updates and microbatches: {wrong}")
        if missing := sorted({*range(self.first_step, self.first_step + num_updates)} - {*self.steps.tolist()}):
            raise UserError(f"an arrival log must take every step once, and lacks {list_first(missing)}")
        late = np.flatnonzero((self.staleness < 0).any(axis=1) | (self.versions < 0).any(axis=1)).tolist()
        if late:
            raise UserError(f"updates of an arrival log take versions that do not exist yet: {list_first(late)}")

    @property
    def first_step(self) -> int:
        """The least step of the plan."""
        return int(self.steps.min()) if len(self.steps) else 0

    @property
    def staleness(self) -> Int64[np.ndarray, "U M"]:
        """int64[U, M]: updates applied between the parameters of each gradient and its own update."""
        return np.arange(len(self.steps))[:, None] - self.versions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` file, atomically.

        Args:
          path: the file.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["staleness_bound"] = -1 if self.staleness_bound is None else self.staleness_bound
        with write_atomically(Path(path)) as file:
            np.savez_compressed(file, **fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ArrivalLog:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The log.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no arrival log, or damaged.
        """
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {field.name: arrays[field.name] for field in dataclasses.fields(cls)}
            fields: dict[str, Any] = {name: found[name] if name in _ARRAYS else found[name].item() for name in found}
            bound = fields["staleness_bound"]
            return cls(**fields | {"staleness_bound": None if bound < 0 else bound})
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no arrival log {path}") from None
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} holds no arrival log: {error}") from error


_OF_PARTS = ("versions", "workers", "arrived_s")
_ARRAYS = ("steps", "applied_s", "losses", *_OF_PARTS)


def digest_of_state(state: Any) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all arrays of a pytree, as hex digits."""
    digest = hashlib.sha256()
    for name, leaf in leaves_by_name(state).items():
        array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
