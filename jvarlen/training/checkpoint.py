"""Checkpoints of the state and of the place in the plan. No other module writes them; Orbax writes the state."""

# A checkpoint is a directory that gets its name, the number of steps done, only when all of it is on disk and listed
# with its hashes: it is there whole, or not at all. Orbax's `CheckpointManager` (0.11.25 and 0.12.8) gives less. It
# renames before files are synced, has no public hook between writing and naming, and deletes under the name; a failed
# deletion raises in the next save, a failed save leaves its files, and `BestN` keeps the last of equal metrics.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import dacite
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jvarlen._common.checks import UserError, check_choices, is_number, list_first
from jvarlen._common.files import move_into_place, read_object
from jvarlen._common.pytree import describe, is_key, key_of_words, leaves_by_name, words_of_key
from jvarlen._common.types import Array, KeyPath, PyTree
from jvarlen.distributed.processes import agree, is_main_process
from jvarlen.training.manifest import check_manifest, write_manifest
from jvarlen.training.optimizers import with_tables_of, without_tables
from jvarlen.training.place import Place

__all__ = ["Checkpoints", "Place", "open_checkpoints", "read_params", "read_shapes"]

_Which = Literal["latest", "best"]
_EVALUATED = "eval_params"
# What reading damaged files raises.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError)


class Checkpoints:
    """The checkpoints of one run, opened by `open_checkpoints`. Several processes all make the same calls."""

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_best: int,
        config: Mapping[str, Any],
        form: Any,
        for_evaluation: Callable[[PyTree], PyTree] | None,
    ):
        if is_main_process():
            directory.mkdir(parents=True, exist_ok=True)
            _remove_parts(directory)
        self._directory, self._config = directory, dict(config)
        self._form, self._for_evaluation = form, for_evaluation
        self._keep_last, self._keep_best = keep_last, keep_best
        # Otherwise every device would save a part of what all have, and the slices be compiled at the first save.
        whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
        self._metrics = _read_metrics(directory)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        self._has_failed = False

    def __enter__(self) -> Checkpoints:
        self._usual_hook = sys.unraisablehook
        sys.unraisablehook = functools.partial(_show_unless_raised, self._usual_hook)
        logging.getLogger("absl").addFilter(_is_not_raised)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the caller gets the error that ended the block
        finally:
            self._thread.shutdown()
            self._checkpointer.close()
            logging.getLogger("absl").removeFilter(_is_not_raised)
            if not self._has_failed:  # otherwise some writes are still under way
                sys.unraisablehook = self._usual_hook

    def save(self, state: PyTree, place: Place, *, metric: float | None = None) -> None:
        """Saves in the background, once the previous checkpoint is written; nothing if this place is already saved.

        Args:
          state: arrays that may be donated right after the call.
          place: the place of the training.
          metric: how good the state is, lower is better. With None or NaN it is not among the best.

        Raises:
          OSError: the previous checkpoint could not be written, as to a full disk; those before it are intact.
        """
        self.wait()
        step = place.num_steps_done
        if step in self._metrics:
            return
        part = self._directory / f".{step}.part"
        metric = None if metric is None or math.isnan(metric) else float(metric)
        about = {"place": dataclasses.asdict(place), "metric": metric, "leaves": self._describe(state)}
        written = self._to_write(state)
        with self._telling(step):
            if is_main_process():
                _remove_parts(self._directory)
                part.mkdir()
                (part / "about.json").write_text(json.dumps(about | {"config": self._config}, indent=1))
            self._checkpointer.save(part / "state", args=ocp.args.PyTreeSave(written))
        self._saving = step, self._thread.submit(self._commit, part, step, metric)

    @property
    def steps(self) -> list[int]:
        """Steps done at each existing checkpoint, ascending; waits for the one that is being written."""
        self.wait()
        return sorted(self._metrics)

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the lowest metric, the first among equals; None if none has a metric."""
        self.wait()
        return next(iter(_best(self._metrics)), None)

    def discard_after(self, step: int) -> None:
        """Removes newer checkpoints, since the steps that follow are taken again.

        Args:
          step: the newest to keep.
        """
        self.wait()
        self._remove([later for later in self._metrics if later > step])

    def restore(self, state: PyTree, which: _Which = "latest") -> tuple[Any, Place]:
        """A state and its place; the whole checkpoint is compared with its hashes before anything is loaded.

        Args:
          state: a state of the same structure, shapes and dtypes, sharded as the result shall be; or its shapes. The
            rates of `scale_by_planned_rate`, and all else that is planned, come from it.
          which: the newest checkpoint, or `best_step`.

        Returns:
          The state and its place.

        Raises:
          FileNotFoundError: there is no checkpoint, or none with a metric.
          ValueError: the checkpoint is damaged or belongs to another run; the message names the files and the remedy.
            Or it holds another state; every leaf that differs is listed.
        """
        self.wait()
        step = _choose(self._directory, self._metrics, which)
        agree("the checkpoint to resume from", step)  # by then process 0 has given it its name
        try:
            place, saved = _check(self._directory, step, self._metrics)
            given = self._describe(state)
            if differing := [name for name in saved | given if saved.get(name) != given.get(name)]:
                leaves = "; ".join(f"{name} {saved.get(name)}, here {given.get(name)}" for name in differing)
                raise UserError(f"it is of another model or optimizer: {leaves}")
            like = state if self._form is None else self._form.like(state)
            saved_like = without_tables(like)
            abstract = jax.tree.map(_shape_of, _serialize(saved_like))
            restore_args = jax.tree.map(
                # Orbax adds the zeros that are missing, and cuts those that are too many.
                lambda arg: dataclasses.replace(arg, strict=False) if isinstance(arg, ocp.ArrayRestoreArgs) else arg,
                ocp.checkpoint_utils.construct_restore_args(abstract),
            )
            path = self._directory / str(step) / "state"
            has_more = _EVALUATED in self._checkpointer.metadata(path).item_metadata.tree
            args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=has_more)
            restored = self._checkpointer.restore(path, args=args)
            restored = with_tables_of(jax.tree.map(key_of_words, restored, saved_like), like)
            return restored if self._form is None else self._form.restore(restored, state), place
        except _UNREADABLE as error:
            raise UserError(f"checkpoint {step} in {self._directory} cannot be resumed: {error}") from error

    def wait(self) -> None:
        """Waits until everything saved is on disk; raises OSError if it could not be written."""
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        with self._telling(step):
            future.result()

    @contextlib.contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """A block whose OSError says which checkpoint could not be written, and which ones are intact."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueError
            self._has_failed = True
            intact = f"; those of {list_first(sorted(self._metrics))} steps are intact" if self._metrics else ""
            if is_main_process():
                _remove_parts(self._directory)
            message = f"checkpoint {step} could not be written to {self._directory}: {_reason(error)}{intact}"
            raise OSError(message) from error

    def _commit(self, part: Path, step: int, metric: float | None) -> None:
        """In the background: completes a checkpoint once its state is written."""
        self._checkpointer.wait_until_finished()  # of several processes: for the parts of all
        if is_main_process():
            write_manifest(part)
            move_into_place(part, self._directory / str(step))
        self._metrics[step] = metric
        kept = {*sorted(self._metrics)[-self._keep_last :], *_best(self._metrics)[: self._keep_best]}
        self._remove(self._metrics.keys() - kept)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in list(steps):
            del self._metrics[step]
            if is_main_process():
                # Renamed first: nothing takes half a directory for a checkpoint, and the next save removes it.
                with contextlib.suppress(OSError):
                    shutil.rmtree((self._directory / str(step)).rename(self._directory / f".{step}.part"))

    def _to_write(self, state: PyTree) -> PyTree:
        """The form of a state in files; with the parameters to evaluate, where those are not the trained ones."""
        written = _serialize(without_tables(state if self._form is None else self._form.save(state)))
        evaluated = state if self._for_evaluation is None else self._for_evaluation(state)
        if evaluated is state:
            return written
        evaluated = evaluated._replace(opt_state=None)
        evaluated = evaluated if self._form is None else self._form.save(evaluated)
        return written._asdict() | {_EVALUATED: _serialize(evaluated.params)}

    def _describe(self, state: PyTree) -> dict[str, str]:
        """Type and shape of every leaf that is saved, without padding, by its path."""
        shapes = without_tables(state if self._form is None else self._form.shapes)
        return {name: describe(leaf) for name, leaf in leaves_by_name(shapes).items()}


# A failed write is raised, and said once. Orbax logs it several times; TensorStore prints a traceback for each array.


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Whether a record is not an error of Orbax's, which it logs and then raises."""
    return record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts


def _show_unless_raised(show: Callable[[Any], object], unraisable: Any) -> None:
    """Shows an exception of a callback, unless it is of TensorStore's writes after Orbax has given up."""
    if str(unraisable.exc_value) != "Event loop is closed":
        show(unraisable)


def open_checkpoints(
    directory: Path,
    *,
    keep_last: int = 2,
    keep_best: int = 0,
    config: Mapping[str, Any] | None = None,
    form: Any = None,
    for_evaluation: Callable[[PyTree], PyTree] | None = None,
) -> Checkpoints:
    """The checkpoints of a directory, for a `with` block; at its end everything saved is on disk.

    Unfinished checkpoints of a killed run are removed. No other run may have the directory open.

    Args:
      directory: created if missing; several processes need one that all of them reach.
      keep_last: how many of the newest checkpoints are kept, at least 1.
      keep_best: how many checkpoints with the lowest metrics are kept as well.
      config: settings of the run, as JSON values, kept in every checkpoint.
      form: the result of `TrainStep.portable_form`, in which states are saved; None saves them as they are.
      for_evaluation: that of the `TrainStep`. Where its optimizer keeps an average, checkpoints hold the parameters to
        evaluate besides those that are trained, and `read_params` reads them.

    Returns:
      `Checkpoints`, a context manager.

    Raises:
      ValueError: `keep_last` or `keep_best` is too small.
      OSError: the directory or last checkpoint cannot be written; if the block raised, its error has a note of that.
    """
    if keep_last < 1 or keep_best < 0:
        raise UserError(f"keep_last must be at least 1 and keep_best at least 0, not {keep_last} and {keep_best}")
    return Checkpoints(directory.resolve(), keep_last, keep_best, config or {}, form, for_evaluation)


def read_params(directory: Path, which: _Which = "latest") -> tuple[dict[str, np.ndarray], Place]:
    """The parameters of a checkpoint, without a state to restore, even while a run uses the directory.

    The whole checkpoint is compared with its hashes before anything is loaded.

    Args:
      directory: the checkpoints of a run.
      which: the newest checkpoint, or the one with the lowest metric.

    Returns:
      The parameters on the host, by dotted names such as `blocks.0.qkv.kernel`, and the place of the training.

    Raises:
      FileNotFoundError: there is no checkpoint, or none with a metric.
      ValueError: the checkpoint is damaged; the message names the files.
    """
    metrics = _read_metrics(directory)
    step = _choose(directory, metrics, which)
    try:
        place, _ = _check(directory, step, metrics)
        path = (directory / str(step) / "state").resolve()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            name = _EVALUATED if _EVALUATED in tree else "params"
            params = {name: tree[name]}
            as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), params)
            args = ocp.args.PyTreeRestore(params, restore_args=as_arrays, partial_restore=True)
            restored = checkpointer.restore(path, args=args)[name]
    except _UNREADABLE as error:
        raise UserError(f"checkpoint {step} in {directory} cannot be read: {error}") from error
    return {_name_of(path): array for path, array in jax.tree.leaves_with_path(restored)}, place


def read_shapes(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of the parameters of the newest checkpoint, without reading it.

    Args:
      directory: the checkpoints of a run.

    Returns:
      `jax.ShapeDtypeStruct` by the names of `read_params`; empty for a damaged checkpoint, or without one.
    """
    step = max(_read_metrics(directory), default=0)
    with contextlib.suppress(*_UNREADABLE), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        params = checkpointer.metadata((directory / str(step) / "state").resolve()).item_metadata.tree["params"]
        leaves = jax.tree.leaves_with_path(params)
        return {_name_of(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}
    return {}


def _choose(directory: Path, metrics: Mapping[int, float | None], which: _Which) -> int:
    """The steps of the newest or best checkpoint; raises FileNotFoundError without one."""
    check_choices(which=(which, _Which))
    if steps := _best(metrics)[:1] if which == "best" else sorted(metrics)[-1:]:
        return steps[0]
    raise FileNotFoundError(f"{directory} holds no checkpoint{' with a metric' if which == 'best' else ''}")


def _name_of(path: KeyPath) -> str:
    """The name of a leaf; a Flax variable is saved with its array under "value"."""
    return re.sub(r"(^|\.)value$", "", jax.tree_util.keystr(path, simple=True, separator="."))


def _check(directory: Path, step: int, steps: Iterable[int]) -> tuple[Place, dict[str, str]]:
    """Place and leaves of an intact checkpoint; raises ValueError with a remedy for any other."""
    path = directory / str(step)
    try:
        check_manifest(path)
        about = read_object(path / "about.json")
        place = dacite.from_dict(Place, about["place"], dacite.Config(strict=True))
        if place.num_steps_done != step:
            raise UserError(f"{path} is of {place.num_steps_done} steps")
    except (*_UNREADABLE, dacite.DaciteError) as error:
        others = list_first(sorted(set(steps) - {step})) or "none"
        raise UserError(f"{error}. Remove {path}, to use another checkpoint; there are: {others}") from error
    return place, about["leaves"]


def _serialize(state: PyTree) -> PyTree:
    """A state as Orbax takes it: the words of typed keys, and JAX's arrays in place of NumPy's."""

    def serialize_leaf(leaf: Array) -> PyTree:
        if isinstance(leaf, np.ndarray | np.generic):  # as a user's first state may hold
            return jnp.array(leaf)
        return words_of_key(leaf) if is_key(leaf) else leaf

    return jax.tree.map(serialize_leaf, state)


def _shape_of(leaf: Array) -> jax.ShapeDtypeStruct:
    """The shape to restore a leaf in: on the default device, if it is a shape without a sharding."""
    shape = ocp.utils.to_shape_dtype_struct(leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shape.sharding or jnp.zeros(()).sharding)


def _remove_parts(directory: Path) -> None:
    """Removes unfinished checkpoints, which killed processes left; what stays is in the way of no other step."""
    for part in directory.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)


def _read_metrics(directory: Path) -> dict[int, float | None]:
    """The metrics of all checkpoints by step; None also for a damaged one, which restoring it reports."""
    metrics: dict[int, float | None] = {}
    for path in directory.glob("[0-9]*"):  # of several processes, the first may not have made the directory yet
        if re.fullmatch("0|[1-9][0-9]*", path.name):
            metrics[int(path.name)] = None
            with contextlib.suppress(*_UNREADABLE):
                metric = read_object(path / "about.json")["metric"]
                metrics[int(path.name)] = metric if is_number(metric) else None
    return metrics


def _best(metrics: Mapping[int, float | None]) -> list[int]:
    """Steps that have a metric, sorted by metric, then by step."""
    return [step for _, step in sorted((metric, step) for step, metric in metrics.items() if metric is not None)]


def _reason(error: BaseException) -> str:
    """Why something could not be written, in one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore has it
    return os.strerror(int(code[1])) if code else str(error).partition("\n")[0] or type(error).__name__
