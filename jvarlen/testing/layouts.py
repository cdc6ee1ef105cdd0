"""Checks that a model trains to the same numbers on any layout. `jvarlen.testing` exports this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from jvarlen import parallel
from jvarlen._common.checks import list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import batch_shardings
from jvarlen.parallel.layers import LayeredModel, layered_loss_fn
from jvarlen.testing.partition import in_float64
from jvarlen.training.losses import LossFn
from jvarlen.training.step import make_train_step
from jvarlen.training.train_state import TrainState, init_train_state

__all__ = ["assert_layout_invariant"]


def assert_layout_invariant(
    model: LayeredModel | LossFn,
    params: Any,
    batch: Any,
    layouts: Iterable[Layout | str],
    *,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int = 10,
    seed: int = 0,
    rtol: float = 1e-12,
    **options: Any,
) -> list[Layout]:
    """Asserts that some steps give the same losses, gradient norms and parameters on any layout as on one device.

    Parameters are compared after the first and after the last step. Everything is computed in float64, where a mistake
    stands out from rounding. All steps are on the same batch. Layouts need devices: `jvarlen.distributed.split_cpu`
    splits the CPU into several.

    Args:
      model: as for `parallel.make_train_step`.
      params: as for `parallel.init_state`; floats are cast to float64.
      batch: pytree of arrays that begin with axis M, or are scalars, such as a `jvarlen.Batch`; floats are cast to
        float64.
      layouts: layouts, or their texts. The data shards of each must divide M, and so must data · context for rows that
        are not spread.
      optimizer: any Optax optimizer; None for AdamW, clipped by the norm of the whole gradient. Its eps of 1e-5 keeps
        the rounding of gradients that should be 0 from becoming updates.
      num_steps: steps on each layout.
      seed: for a model that takes keys.
      rtol: the largest difference allowed, relative to the loss, to the norm, and for any parameter to the largest of
        its array.
      **options: of `parallel.make_train_step`, such as `accumulate`.

    Returns:
      The layouts, which all agree.

    Raises:
      AssertionError: some layouts differ; the message names them, what differs, and by how much.
      ValueError: too few devices, or a layout that is not for this model, its parameters or this batch.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, microbatch):
      ...     return jnp.sum((microbatch @ params) ** 2), jnp.float32(len(microbatch))
      >>> assert_layout_invariant(loss_fn, np.ones((8, 8)), np.ones((2, 3, 8)), ["data1"])
      [Layout(data=1, stage=1, context=1, tensor=1, zero=0, schedule='eager_1f1b', virtual=1, ...)]
    """
    if optimizer is None:
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-5))
    whole_loss_fn = layered_loss_fn(model) if isinstance(model, LayeredModel) else model
    chosen = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    with jax.enable_x64(True):
        params, batch = in_float64((params, batch))
        whole = jax.jit(make_train_step(whole_loss_fn, optimizer, norms=True))
        _, expected = _take_steps(whole, init_train_state(params, optimizer, seed=seed), batch, num_steps)

        def values_on(layout: Layout) -> dict[str, np.ndarray]:
            on: dict[str, Any] = {"mesh": parallel.layout_mesh(layout), "layout": layout}
            state = parallel.init_state(params, optimizer, model=model, seed=seed, **on)
            step = jax.jit(parallel.make_train_step(model, optimizer, norms=True, **on, **options))
            placed = jax.device_put(batch, batch_shardings(batch, on["mesh"]))
            gather = functools.partial(parallel.gather_params, model=model, **on)
            return _take_steps(step, state, placed, num_steps, gather)[1]

        differing = {}
        for layout in chosen:
            if found := _differences(values_on(layout), expected, rtol):
                differing[layout] = found
    if differing:
        listed = (f"  {layout}: {list_first(found, '; ')}" for layout, found in differing.items())
        raise AssertionError(
            f"{len(differing)} of {len(chosen)} layouts differ from one device by more than {rtol:g} relative\n"
            + list_first(listed, "\n")
        )
    return chosen


def _take_steps(
    step: Callable[..., Any],
    state: TrainState,
    batch: Any,
    num_steps: int,
    params_of: Callable[[TrainState], Any] = lambda state: state.params,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """The state after some steps; by name, loss and gradient norm of each, and parameters after the first and last."""
    values: dict[str, np.ndarray] = {}
    for number in range(num_steps):
        state, metrics = step(state, batch)
        if number in (0, num_steps - 1):
            values |= _by_name(params_of(state), f" after step {number}")
        values[f"loss of step {number}"] = np.asarray(metrics.loss)
        values[f"gradient norm of step {number}"] = np.asarray(metrics.grad_norm)
    return state, values


def _by_name(params: Any, when: str) -> dict[str, np.ndarray]:
    return {f"params{name}{when}": np.asarray(leaf) for name, leaf in leaves_by_name(params).items()}


def _differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float) -> list[str]:
    """What differs, and by how much of its largest value."""
    differences = []
    for name, value in expected.items():
        largest = np.max(np.abs(value), initial=0.0) or 1.0
        error = np.max(np.abs(found[name] - value), initial=0.0) / largest
        if not error <= rtol:
            differences.append(f"{name} by {error:.1e}")
    return differences
