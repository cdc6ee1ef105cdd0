"""A function cut into passes: the derivative of the whole, and what the passes hand on."""

import collections
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jvarlen import Layout
from jvarlen._common.jaxprs import is_attention
from jvarlen.attention import attend
from jvarlen.batches.batches import token_batch_spec
from jvarlen.models import DecoderConfig, layered, stack_layers
from jvarlen.models.decoder import param_shapes
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.passes import split_passes
from jvarlen.parallel.tensor import TensorSpec
from jvarlen.planning.buckets import Bucket
from tests.support.meshes import layout_mesh

PARAMS = {"in": np.full((3, 4), 0.3, np.float32), "out": np.full((4, 3), 0.2, np.float32)}
X = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "count": np.int32(2)}


def perceptron(params, x, scale, key):
    hidden = jnp.tanh(x["x"] @ params["in"].astype(jnp.float32)) * jax.random.bernoulli(key, 0.5, (2, 4))
    scaled = hidden * scale[:, None]
    return {"x": x["x"] + x["count"] * (scaled @ params["out"]), "count": x["count"] + 1}


SCALE, KEY = np.array([2.0, -1.0], np.float32), jax.random.key(3)


def counts(function, *args):
    """Products outside of attention, and calls of attention."""
    counted = collections.Counter()
    for eqn in jax.make_jaxpr(function)(*args).eqns:
        name = eqn.params["name"] if is_attention(eqn) else eqn.primitive.name
        counted[name.removeprefix("causal_").removeprefix("attention_")] += 1
    return [counted[name] for name in ("dot_general", "forward", "backward")]


def products(function, *args):
    return counts(function, *args)[0]


@pytest.mark.parametrize(
    ("remat", "weights_apart", "expected"),
    [
        ("none", False, [2, 4]),
        ("none", True, [2, 2, 2]),
        ("full", False, [2, 5]),  # all but what only y needs
        ("full", True, [2, 3, 4]),
    ],
)
@pytest.mark.parametrize("function", [perceptron, jax.jit(jax.jit(perceptron))])
def test_passes_give_the_derivative_and_run_products_as_often_as_said(function, remat, weights_apart, expected):
    @jax.jit
    def at_once(params, x):
        y, pull = jax.vjp(lambda params, x: function(params, X | {"x": x}, SCALE, KEY)["x"], params, x)
        return y, jnp.cos(y), *pull(jnp.cos(y))

    y, of_y, of_params, of_x = at_once(PARAMS, X["x"])
    of_y = [of_y]
    passes = split_passes(function, PARAMS, X, SCALE, KEY, remat=remat, weights_apart=weights_apart)
    found, residuals = passes.forward(PARAMS, X, SCALE, KEY)
    (found_of_x,), rest = passes.backward(PARAMS, residuals, of_y, SCALE, KEY)
    num = [
        products(passes.forward, PARAMS, X, SCALE, KEY),
        products(passes.backward, PARAMS, residuals, of_y, SCALE, KEY),
    ]
    if weights_apart:
        num.append(products(passes.weights, PARAMS, residuals, rest, SCALE, KEY))
        rest = passes.weights(PARAMS, residuals, rest, SCALE, KEY)
    assert num == expected
    if remat == "full":
        assert {leaf.shape for leaf in residuals} == {leaf.shape for leaf in jax.tree.leaves(X)}
    assert found["count"] == 3
    np.testing.assert_allclose(found["x"], y, rtol=1e-6)
    np.testing.assert_allclose(found_of_x, of_x, rtol=1e-6)
    for name, leaf in of_params.items():
        np.testing.assert_allclose(rest[name], leaf, rtol=1e-6)


def test_parameters_other_arguments_and_what_depends_on_them_alone_are_not_kept():
    """Kept are x, its count, and tanh. Not kept: parameters, their cast, the scale, the mask, what is scaled by it."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    passes = split_passes(perceptron, params, X, SCALE, KEY)
    _, residuals = passes.forward(params, X, SCALE, KEY)
    assert sorted((leaf.shape, leaf.dtype.name) for leaf in residuals) == [
        ((), "float32"),
        ((2, 3), "float32"),
        ((2, 4), "float32"),
    ]


def test_what_has_effects_is_done_once():
    seen = []

    def noting(w, x):
        jax.debug.callback(lambda value: seen.append(("forward", float(value))), x)
        return w * jnp.sin(x)

    passes = split_passes(noting, jnp.float32(2), jnp.float32(3), weights_apart=True)
    _, residuals = passes.forward(jnp.float32(2), jnp.float32(5))
    _, handed = passes.backward(jnp.float32(2), residuals, [jnp.float32(1)])
    passes.weights(jnp.float32(2), residuals, handed)
    jax.effects_barrier()
    assert seen == [("forward", 5.0)]


def random_function(rng):
    """Products, elements and slices of vectors in two types."""
    sizes, ops = [2, 3, 5, 7], []
    for _ in range(rng.randint(3, 5)):
        ops.append(
            (rng.choice(["product", "mul", "tanh", "slice", "half"]), rng.random(), rng.random(), rng.choice(sizes))
        )
    params = [np.full((7, size), 0.1, np.float32) for *_, size in ops]

    def function(params, x):
        values = [x]
        for (name, first, second, _), param in zip(ops, params, strict=True):
            a, b = (values[int(place * len(values))] for place in (first, second))
            match name:
                case "product":
                    values.append(a.astype(np.float32) @ param[: len(a)])
                case "mul":
                    num = min(len(a), len(b))
                    values.append(a[:num] * jnp.sin(b[:num]))
                case "tanh":
                    values.append(jnp.tanh(a))
                case "slice":
                    values.append(a[: max(1, len(a) - 1)] + 1)
                case "half":
                    values.append(a.astype(jnp.float16))
        return values[-1].astype(np.float32), values[-2]

    return function, params


def fewest_bytes(function, params, x):
    """The least of all sets of forward values that, with parameters, give the backward pass without a product twice."""
    y = jax.eval_shape(function, params, x)

    def whole(params, x, of_y):
        y, pull = jax.vjp(function, params, x)
        return y, pull(of_y)

    traced = jax.make_jaxpr(whole)(params, x, y).jaxpr
    of_x, *of_y = traced.invars[len(params) :]
    forward, backward, eqns = {of_x}, {*of_y}, traced.eqns
    needed, used = {var for var in traced.outvars if not isinstance(var, Literal)}, []
    for eqn in reversed(eqns):
        if needed & {*eqn.outvars}:
            needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
            used.insert(0, eqn)
    later = []
    for eqn in used:
        taken = {var for var in eqn.invars if not isinstance(var, Literal)}
        if taken & backward:
            backward |= {*eqn.outvars}
            later.append(taken)
        elif taken & forward:
            forward |= {*eqn.outvars}
    in_backward = {var for taken in later for var in taken} | {
        v for v in traced.outvars[2:] if not isinstance(v, Literal)
    }
    in_backward &= forward
    again = [eqn for eqn in used if eqn.primitive.name != "dot_general" and {*eqn.outvars} <= forward]

    def suffice(kept):
        there = {*kept}
        for eqn in again:
            if all(isinstance(var, Literal) or var in there or var not in forward for var in eqn.invars):
                there |= {*eqn.outvars}
        return in_backward <= there

    candidates = [var for var in forward if var.aval.size]
    if len(candidates) > 14:
        return None
    return min(
        sum(var.aval.size * var.aval.dtype.itemsize for var in kept)
        for num in range(len(candidates) + 1)
        for kept in itertools.combinations(candidates, num)
        if suffice(kept)
    )


def bytes_of(arrays):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)


def test_residuals_are_the_fewest_bytes_that_suffice_without_a_product_twice():
    num_tried = 0
    for seed in range(24):
        function, params = random_function(random.Random(seed))
        x = np.linspace(-1, 1, 7, dtype=np.float32)
        expected = fewest_bytes(function, params, x)
        if expected is not None:
            num_tried += 1
            passes = split_passes(function, params, x)
            assert bytes_of(jax.eval_shape(passes.forward, params, x)[1]) == expected, seed
            if num_tried % 8 == 0:
                y, residuals = passes.forward(params, x)
                of_x, of_params = passes.backward(params, residuals, [*map(jnp.cos, y)])
                _, pull = jax.vjp(function, params, x)
                for found, right in zip([*of_params, *of_x], jax.tree.leaves(pull((*map(jnp.cos, y),))), strict=True):
                    np.testing.assert_allclose(found, right, rtol=2e-3, atol=1e-6)
    assert num_tried > 12


def attending(params, x):
    """Nothing is named but the first product's result."""
    hidden = checkpoint_name(jnp.tanh(x @ params["in"]), "hidden")
    heads = (hidden @ params["qkv"]).reshape(1, -1, 3, 2, 4)
    attended = attend(*(heads[:, :, i] for i in range(3)), implementation="blocks")
    return x + attended.reshape(x.shape) @ params["out"]


ATTENDING = {"in": (8, 8), "qkv": (8, 24), "out": (8, 8)}


@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        ("none", [[3, 1, 0], [6, 0, 1]]),
        ("selective", [[3, 1, 0], [7, 0, 1]]),  # that of queries, keys and values again
        ("full", [[3, 1, 0], [8, 1, 1]]),
    ],
)
def test_attention_and_what_is_named_run_once_unless_all_is_computed_again(remat, expected):
    params = {name: jnp.full(shape, 0.1) for name, shape in ATTENDING.items()}
    x = jnp.linspace(-1, 1, 6 * 8).reshape(6, 8)
    passes = split_passes(attending, params, x, remat=remat)
    y, residuals = passes.forward(params, x)
    found = [counts(passes.forward, params, x), counts(passes.backward, params, residuals, [y])]
    assert found == expected


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, [(6, 8)]),
        (jax.checkpoint_policies.save_only_these_names("hidden"), [(6, 8), (6, 5)]),
        (jax.checkpoint_policies.dots_saveable, [(6, 8), (6, 5), (6, 8)]),
    ],
)
def test_a_checkpoint_in_the_function_keeps_what_it_says_and_never_more(policy, kept, remat):
    def function(params, x):
        hidden = checkpoint_name(jnp.tanh(x @ params["in"]), "hidden")
        return x + jnp.sin(hidden @ params["out"])

    params, x = {"in": jnp.full((8, 5), 0.1), "out": jnp.full((5, 8), 0.1)}, jnp.ones((6, 8))
    passes = split_passes(jax.checkpoint(function, policy=policy), params, x, remat=remat)
    shapes = [leaf.shape for leaf in jax.eval_shape(passes.forward, params, x)[1]]
    assert sorted(shapes) == sorted([(6, 8)] if remat == "full" else kept)


@pytest.mark.parametrize(
    ("remat", "expected"), [("none", [[1, 0], [0, 1]]), ("selective", [[1, 0], [1, 1]]), ("full", [[1, 0], [1, 1]])]
)
def test_communication_runs_twice_only_where_all_is_computed_again(remat, expected):
    """The product of gathered rows: its weight gradient takes them, and that of x is reduced."""

    def function(params, x):
        return x + jnp.tanh(jax.lax.all_gather(x, "tensor", tiled=True) @ params).sum()

    found = []

    def on_device(params, x):
        passes = split_passes(function, params, x, remat=remat)
        y, residuals = passes.forward(params, x)
        for traced in (
            jax.make_jaxpr(passes.forward)(params, x),
            jax.make_jaxpr(passes.backward)(params, residuals, [y]),
        ):
            names = [eqn.primitive.name for eqn in traced.eqns]
            found.append([names.count(name) for name in ("all_gather", "reduce_scatter")])
        return y

    mesh = layout_mesh(Layout(data=1, tensor=2))
    specs = PartitionSpec(), PartitionSpec("tensor")
    on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    jax.eval_shape(on_devices, jnp.ones((4, 3)), jnp.ones((6, 4)))
    assert found == expected


LLAMA = DecoderConfig(
    num_layers=1, width=4096, mlp_width=14336, num_heads=32, num_kv_heads=8, vocab_size=256, compute_dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("axes", "remat", "expected"),
    [
        # Queries, keys and values 3, attention and its projection 4, gate and up 14, in units of the width; log-sums
        # of 32 heads in float32; two statistics of norms.
        (Axes(), "none", 21 * 4096 + 4 * 32 + 4 * 2),
        (Axes(), "selective", 7 * 4096 + 4 * 32),  # without gate and up
        (Axes(), "full", 0),
        # All but the projection and the statistics lies over four devices; what is gathered takes 2 each.
        (Axes(tensor="tensor"), "none", 19 * 1024 + 2 * 4096 + 4 * 8 + 4 * 2),
        (Axes(tensor="tensor", sequence_parallel=True), "none", 21 * 1024 + 2 * 2 * 4096 + 4 * 8 + 2),
        (Axes(tensor="tensor", sequence_parallel=True), "selective", 7 * 1024 + 4 * 8),
    ],
)
def test_bytes_a_token_of_a_layer_of_llama_3_8b_beside_its_input(axes, remat, expected):
    model, length = layered(LLAMA), 1024
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), param_shapes(LLAMA))
    stacked = jax.eval_shape(stack_layers, shapes).layers
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        (stacked, token_batch_spec(Bucket(1, length), 1), jnp.ones((1, 1, length, 4096), jnp.bfloat16)),
    )
    found = []

    def on_device(params, batch, x):
        passes = split_passes(lambda *given: model.layer(*given, axes), params, x, batch, remat=remat)
        y, residuals = passes.forward(params, x, batch)
        assert any(leaf.shape == x.shape for leaf in residuals)
        found.append((bytes_of(residuals) - bytes_of([x])) / length)
        return y

    lie = PartitionSpec(None, "tensor") if axes.sequence_parallel else PartitionSpec()
    if axes.tensor is not None:
        kinds = PartitionSpec | TensorSpec
        of_params = jax.tree.map(
            lambda spec: getattr(spec, "spec", spec), model.specs.layers, is_leaf=lambda spec: isinstance(spec, kinds)
        )
        specs, mesh = (of_params, PartitionSpec(), lie), layout_mesh(Layout(data=1, tensor=4))
        on_device = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=lie, check_vma=False)
    jax.eval_shape(on_device, *given)
    assert found == [expected]
