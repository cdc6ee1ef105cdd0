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
      held_out_bits_per_byte_before: of the evaluation before the first step; None until then.
    """

    num_steps_done: int
    epoch: int
    step: int
    plan_digest: str
    num_tokens_done: int = 0
    num_positions_done: int = 0
    train_s: float = 0.0
    held_out_bits_per_byte_before: float | None = None


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, manager: ocp.CheckpointManager):
        self._manager = manager

    def save(self, state: Any, place: Place) -> None:
        """Saves in the background; nothing happens where this place is saved already."""
        if self._manager.latest_step() == place.num_steps_done:
            return
        about = {"place": dataclasses.asdict(place), "leaves": _describe(state)}
        self._manager.save(
            place.num_steps_done,
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about)),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved yet."""
        return self._manager.latest_step() is None

    def restore_latest(self, state: Any) -> tuple[Any, Place]:
        """The newest state and place.

        Args:
          state: a state of the same structure, shapes and dtypes.

        Raises:
          FileNotFoundError: no checkpoint is there.
          ValueError: the checkpoint is damaged, or of another state; every leaf that differs is named.
        """
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"{self._manager.directory} holds no checkpoint to resume from")
        try:
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            place, saved, given = Place(**about["place"]), about["leaves"], _describe(state)
            if differing := [name for name in saved | given if saved.get(name) != given.get(name)]:
                leaves = "; ".join(f"{name} {saved.get(name)}, here {given.get(name)}" for name in differing)
                raise ValueError(f"it is of another model or optimizer: {leaves}")
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
            args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract, restore_args=restore_args))
            return self._manager.restore(step, args=args)["state"], place
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"checkpoint {step} in {self._manager.directory} cannot be resumed: {error}") from error


def _describe(state: Any) -> dict[str, str]:
    """Type and shape of every leaf, by its path."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in jax.tree.leaves_with_path(state)
    }


@contextlib.contextmanager
def open_checkpoints(directory: Path) -> Iterator[Checkpoints]:
    """Opens a directory of checkpoints; leaves it when all that was saved is on disk."""
    options = ocp.CheckpointManagerOptions(max_to_keep=_NUM_KEPT, create=True)
    # Otherwise every device would save a part of what all have, and the slices be compiled at the first save.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        "about": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(directory.resolve(), options=options, item_handlers=handlers) as manager:
        yield Checkpoints(manager)
        manager.wait_until_finished()
