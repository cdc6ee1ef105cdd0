"""Checkpoints: in goes the state and the place in the plan, out comes a directory, and the same two back.

The only module that writes checkpoints. Orbax writes them in the background, each in one piece or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

__all__ = ["Checkpoints", "Place", "open_checkpoints"]

_NUM_KEPT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where training stands.

    Attributes:
      num_steps_done: steps since the start of training.
      epoch: the epoch of the next step.
      step: the next step within the plan of that epoch.
      plan_digest: the digest of that plan.
      num_tokens_done: real tokens trained on.
      num_positions_done: positions trained on, padding included.
      train_s: seconds of training so far.
    """

    num_steps_done: int
    epoch: int
    step: int
    plan_digest: str
    num_tokens_done: int = 0
    num_positions_done: int = 0
    train_s: float = 0.0


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, manager: ocp.CheckpointManager):
        self._manager = manager

    def save(self, state: Any, place: Place) -> None:
        """Saves in the background; nothing happens where this place is saved already."""
        if self._manager.latest_step() == place.num_steps_done:
            return
        self._manager.save(
            place.num_steps_done,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(dataclasses.asdict(place))
            ),
        )

    def wait(self) -> None:
        """Waits until what was saved is on disk."""
        self._manager.wait_until_finished()

    def restore_latest(self, state: Any) -> tuple[Any, Place]:
        """The newest state and place.

        Args:
          state: a state of the same structure, shapes and dtypes.

        Raises:
          FileNotFoundError: no checkpoint is there.
          ValueError: the checkpoint is of another state, or damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"{self._manager.directory} holds no checkpoint to resume from")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), place=ocp.args.JsonRestore())
            )
            return restored["state"], Place(**restored["place"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"checkpoint {step} in {self._manager.directory} cannot be resumed: {error}") from error


@contextlib.contextmanager
def open_checkpoints(directory: Path) -> Iterator[Checkpoints]:
    """Opens a directory of checkpoints; leaves it when all that was saved is on disk."""
    options = ocp.CheckpointManagerOptions(max_to_keep=_NUM_KEPT, create=True)
    with ocp.CheckpointManager(directory.resolve(), options=options) as manager:
        yield Checkpoints(manager)
        manager.wait_until_finished()
