"""Asynchronous training in one program: gradients on past parameters, as old as a table says.

Letters: P rows of the table, M microbatches of a step, D the longest delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.parallel.train import make_train_step
from jvarlen.training.losses import LossFn
from jvarlen.training.step import StepFn, update_state, with_extra_args
from jvarlen.training.step_sums import LossProgram, StepSums, accumulate, split_step
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["Delays", "PastVersions", "keep_versions", "make_stale_train_step"]

Delays = int | Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer]


class PastVersions(NamedTuple):
    """The optimizer's state, and the past versions that gradients are computed on.

    Attributes:
      opt_state: the state of the optimizer.
      past: parameters and `extra`, each array with a leading axis D: version v is at v mod D.
      version: int32[], updates so far.
    """

    opt_state: Any
    past: Any
    version: jax.Array


def make_stale_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation | optax.MultiSteps, *, delays: Delays
) -> StepFn:
    """A train step whose gradients are computed on parameters that are some updates old.

    It does what `train_async` does, without worker processes, and with chosen instead of measured staleness. The
    gradient of a microbatch with delay d is computed on the parameters from d updates before, or on the first ones
    while there are fewer. All gradients of a step are added, divided once, and applied to the newest parameters.

    Three workers and a fourth that takes three times as long complete ten gradients while the fourth completes one.
    With one microbatch a step and no bound, the gradients are `delays=[3, 3, 3, 2, 2, 2, 2, 2, 2, 9]` updates old, in
    turn. The staleness of a run of `train_async` is `log.staleness`.

    Args:
      loss_fn: as for `make_train_step`. `extra` is as old as the parameters, and its changes are added to the newest.
      optimizer: as for `make_train_step`; unless all delays are 0, without one that evaluates the loss itself.
      delays: integers of at least 0. One number: for every gradient. [P]: for the steps, in turn; update u takes number
        u mod P. [P, M]: likewise, for each microbatch of a step.

    Returns:
      `train_step(state, batch) -> (state, Metrics)`, as of `make_train_step`, for one device. The state is that of
      `keep_versions`. If all delays are 0, it is the function that `make_train_step` returns.

    Raises:
      ValueError: delays of another form; when it is traced, a table for another M, a state that keeps other versions,
        or an optimizer that evaluates the loss itself.
    """
    table = _delay_table(delays)
    depth = int(table.max())
    if depth == 0:
        return make_train_step(loss_fn, optimizer)
    extended = with_extra_args(optimizer)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        kept = state.opt_state
        if not isinstance(kept, PastVersions) or (found := _depth_of(kept)) != depth:
            what = f"those of {found} updates" if isinstance(kept, PastVersions) else "no past versions"
            raise UserError(
                f"the delays reach back {depth} updates, and the state keeps {what}: keep_versions makes it"
            )
        loss = LossProgram(loss_fn)
        microbatches, keys = split_step(state, batch)
        num_microbatches = len(jax.tree.leaves(microbatches)[0])
        if table.shape[1] not in (1, num_microbatches):
            raise UserError(f"delays are for {table.shape[1]} microbatches a step, and the step has {num_microbatches}")
        delays_M = jnp.asarray(np.broadcast_to(table, (len(table), num_microbatches)), jnp.int32)[
            kept.version % len(table)
        ]

        def one(microbatch_and_key: Any) -> StepSums:
            (microbatch, key), delay = microbatch_and_key
            delay = jnp.minimum(delay, kept.version)
            newest = (state.params, state.extra)
            params, extra = jax.tree.map(
                lambda now, past: jnp.where(delay == 0, now, past[(kept.version - delay) % depth]), newest, kept.past
            )
            return loss.sum_microbatch(state._replace(params=params, extra=extra), microbatch, key)

        sums = accumulate(one, ((microbatches, keys), delays_M))
        inner, metrics = update_state(extended, state._replace(opt_state=kept.opt_state), batch, sums)
        past = jax.tree.map(
            lambda past, now: past.at[kept.version % depth].set(now), kept.past, (state.params, state.extra)
        )
        return inner._replace(opt_state=PastVersions(inner.opt_state, past, kept.version + 1)), metrics

    return train_step


def keep_versions(state: TrainState, *, delays: Delays) -> TrainState:
    """The state of `make_stale_train_step(…, delays=delays)`, which keeps past parameters beside the newest.

    Args:
      state: before the first step, of `make_train_step(loss_fn, optimizer).init`.
      delays: of the step; the longest one, D, is how many versions are kept.

    Returns:
      The same state, whose `opt_state` is a `PastVersions`: D more copies of the parameters. If all delays are 0, the
      state itself.

    Raises:
      ValueError: delays of another form.
    """
    depth = int(_delay_table(delays).max())
    if depth == 0:
        return state
    newest = (state.params, state.extra)
    past = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (depth, *jnp.shape(leaf))), newest)
    return state._replace(opt_state=PastVersions(state.opt_state, past, jnp.zeros((), jnp.int32)))


def _delay_table(delays: Delays) -> Int64[np.ndarray, "P M"]:
    """The delays as [P, M], or [P, 1] for any M."""
    try:
        table = np.asarray(delays)
    except ValueError:  # rows of different lengths
        table = np.empty(0)
    if table.dtype.kind not in "iu" or not table.size or table.ndim > 2 or table.min() < 0 or table.max() >= 2**31:
        raise UserError(f"delays must be integers of at least 0, one, or [P], or [P, M], not {delays!r}")
    return table.astype(np.int64).reshape(-1, table.shape[1] if table.ndim == 2 else 1)


def _depth_of(kept: PastVersions) -> int:
    return len(jax.tree.leaves(kept.past)[0])
