"""Trains any loss and compares it with a plain loop over the microbatches.

The loop knows nothing of jvarlen: JAX's gradient of every microbatch, sums, one division, an update by Optax, with its
own keys and its own rule for extra state. Letters: M microbatches, B rows, T positions, D features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jvarlen import Bucket, CompileOptions, compile_buckets, make_train_step
from jvarlen.batches import BatchShapes
from jvarlen.training.train_state import new_state
from tests.support.collectives import Collectives, count_collectives
from tests.support.meshes import batch_shardings, data_mesh

M, B = 8, 3
NUM_STEPS = 3
BUCKET = Bucket(1, 1)  # its numbers say nothing: the batches are of many kinds


class Model(NamedTuple):
    """A loss as users write it, and its parameters, batch and optimizer."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    extra: Any = None
    seed: int | None = None
    optimizer: optax.GradientTransformation = optax.adamw(1e-2, eps=1e-3, weight_decay=1e-2)
    num_all_reduces: int = 1  # one for each type that gradients and losses are summed in


class Course(NamedTuple):
    """The results of some steps."""

    losses: list[np.ndarray]
    sums: list[dict[str, np.ndarray]]
    params: Any
    extra: Any


class Trained(NamedTuple):
    """The results of training by jvarlen, and figures of the compiled step."""

    course: Course
    collectives: dict[str, Collectives]
    flops: float
    argument_bytes: int


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def unequal_weights(*shape: int) -> np.ndarray:
    """Weights of M×B rows, or of what is in them; the last row of every other microbatch and the last but one
    microbatch are padding rows."""
    weights = np.random.default_rng(1).integers(1, 6, (M, B, *shape)).astype(float)
    weights[::2, -1] = 0
    weights[M - 2] = 0
    return weights


def random_rows(*shape: int, seed: int = 0) -> np.ndarray:
    """M×B rows of normal numbers; padding rows are zeros."""
    return random(M, B, *shape, seed=seed) * (unequal_weights() > 0).reshape(M, B, *(1 for _ in shape))


def random_params(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: jnp.array(random(*shape, seed=i) / 2) for i, (name, shape) in enumerate(shapes.items())}


def weighted(losses_B: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The sums that a loss returns."""
    return jnp.sum(losses_B * batch["weights"]), jnp.sum(batch["weights"])


def squared(outputs_BxD: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The sums of mean squared errors."""
    return weighted(jnp.mean((outputs_BxD - batch["y"]) ** 2, axis=-1), batch)


def train_plainly(model: Model, num_steps: int = NUM_STEPS) -> Course:
    """The loop that everything is compared with."""
    takes_key, takes_extra = model.seed is not None, model.extra is not None

    @jax.jit
    def of_microbatch(params, extra, microbatch, key):
        def loss(params):
            own_extra = jax.tree.map(lambda leaf: leaf, extra)
            arguments = ({"key": key} if takes_key else {}) | ({"extra": own_extra} if takes_extra else {})
            loss_sum, *others = model.loss_fn(params, microbatch, **arguments)
            new_extra = others.pop() if takes_extra else None
            weight_sum, sums = others if len(others) == 2 else (*others, {})
            return loss_sum, (weight_sum, sums, new_extra)

        return jax.value_and_grad(loss, has_aux=True)(params)

    update = jax.jit(optax.with_extra_args_support(model.optimizer).update)
    apply = jax.jit(optax.apply_updates)  # by itself: the compiler must not fuse it with the update
    params, extra = model.params, model.extra
    opt_state = model.optimizer.init(params)
    losses, all_sums = [], []
    for step in range(num_steps):
        parts = []
        for i in range(M):
            microbatch = jax.tree.map(lambda leaf, i=i: leaf[i] if np.ndim(leaf) else leaf, model.batch)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(model.seed), step), i) if takes_key else None
            parts.append(of_microbatch(params, extra, microbatch, key))
        parts = jax.device_get(parts)
        weights = [float(weight_sum) for (_, (weight_sum, _, _)), _ in parts]
        losses.append(sum(np.asarray(loss_sum, np.float64) for (loss_sum, _), _ in parts) / sum(weights))
        all_sums.append(jax.tree.map(lambda *leaves: sum(leaves), *(sums for (_, (_, sums, _)), _ in parts)))
        updates, opt_state = update(_mean([grads for _, grads in parts], weights), opt_state, params, value=losses[-1])
        params = apply(params, updates)
        if takes_extra:
            extra = _next_extra(extra, [new for (_, (_, _, new)), _ in parts], weights)
    return Course(losses, all_sums, params, extra)


def _mean(grads: list[Any], weights: list[float]) -> Any:
    """Added in float32 at least, divided once."""

    def mean(*leaves: np.ndarray) -> np.ndarray:
        wide = jnp.promote_types(leaves[0].dtype, jnp.float32)
        return (sum(leaf.astype(wide) for leaf in leaves) / sum(weights)).astype(leaves[0].dtype)

    return jax.tree.map(mean, *grads)


def _next_extra(extra: Any, news: list[Any], weights: list[float]) -> Any:
    """Floats change by the weighted mean of the changes, integers by their sum, a bool where any does; padding rows
    change nothing."""

    def changed(old: Any, *new: Any) -> Any:
        if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            old = np.asarray(old)  # of which nothing is compiled
        real = [(weight, leaf) for weight, leaf in zip(weights, new, strict=True) if weight]
        if jnp.issubdtype(old.dtype, jnp.floating):
            return old + sum(weight * (leaf - old) for weight, leaf in real) / sum(weights)
        if jnp.issubdtype(old.dtype, jnp.integer):
            return old + sum(leaf - old for _, leaf in real)
        if old.dtype == bool:
            return old ^ any(leaf != old for _, leaf in real)
        return old

    return jax.tree.map(changed, extra, *news)


def train(model: Model, mesh: Mesh | int | None, num_steps: int = NUM_STEPS) -> Trained:
    """The same by jvarlen, on a mesh, on a number of devices, or without a mesh."""
    if isinstance(mesh, int):
        mesh = data_mesh(mesh)
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.batch)
    batch = jax.device_put(model.batch, batch_shardings(model.batch, mesh) if mesh is not None else None)
    # The steps write over them.
    params, extra = jax.device_put((model.params, model.extra), may_alias=False)
    if model.extra is model.params:
        extra = params
    state = new_state(params, model.optimizer, extra=extra, seed=model.seed)
    step = compile_buckets(
        make_train_step(model.loss_fn, model.optimizer, layout=mesh),
        state,
        BatchShapes(
            [BUCKET],
            num_microbatches=M,
            layout=mesh,
            batch_spec=lambda bucket, num_microbatches: spec,
            has_many_groups=False,
        ),
        progress=False,
        options=CompileOptions(cache_dir=None),
    )
    losses, sums = [], []
    for _ in range(num_steps):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        sums.append(jax.tree.map(np.asarray, metrics.sums))
    row = step.report[0]
    course = Course(losses, sums, state.params, state.extra)
    return Trained(course, count_collectives(step.program_text(BUCKET)), row.flops, row.argument_bytes)


@functools.cache
def _made_and_trained(make_model: Callable[[], Model]) -> tuple[Model, Course]:
    model = make_model()
    return model, train_plainly(model)


def on_devices(models: Sequence[Callable[[], Model]], others: Sequence[int | None] = ()) -> pytest.MarkDecorator:
    """Each model on four devices, the first on other numbers as well; None: on no mesh."""
    cases = [*((model, 4) for model in models), *((models[0], number) for number in others)]
    return pytest.mark.parametrize(("model", "num_devices"), cases)


def assert_trains_as_a_plain_loop(
    make_model: Callable[[], Model], num_devices: int | None, *, tolerance: float = 1e-12
) -> None:
    """Trains a model by jvarlen: the same losses, parameters, sums and extra state, and one all-reduce a step."""
    with jax.enable_x64(True):
        model, expected = _made_and_trained(make_model)
        course, collectives, *_ = train(model, num_devices)
        assert_same_course(course, expected, tolerance)
        moved = jax.tree.map(
            lambda new, old: np.max(np.abs(np.asarray(new) - np.asarray(old))), course.params, model.params
        )
        assert max(jax.tree.leaves(moved)) > 1e-4  # there was something to compare
        if num_devices is None:
            assert collectives == {}
        elif num_devices > 1:
            assert collectives == {"all-reduce": Collectives(model.num_all_reduces, 0)}


def assert_same_course(course: Course, expected: Course, tolerance: float = 1e-12) -> None:
    """Compares every number, array by array."""
    assert jax.tree.structure(course.params) == jax.tree.structure(expected.params)
    for what, ones, others in zip(Course._fields, course, expected, strict=True):
        by_path = zip(jax.tree.leaves_with_path(ones), jax.tree.leaves_with_path(others), strict=True)
        for (path, one), (_, other) in by_path:
            name = f"{what}{jax.tree_util.keystr(path)}"
            assert one.dtype == other.dtype or what in ("losses", "sums"), name
            np.testing.assert_allclose(_numbers(one), _numbers(other), rtol=tolerance, atol=tolerance, err_msg=name)


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf, np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64)
