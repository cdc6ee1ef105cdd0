"""Tensor and sequence parallelism: the numbers of the unsplit model, and what is communicated."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jvarlen import Bucket, load, make_plan
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.hlo import list_collectives
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn, stack_layers, unstack_layers
from jvarlen.parallel.cross_entropy import vocabulary_cross_entropy
from jvarlen.parallel.evaluation import make_eval_step
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.parallel.tensor import (
    TensorSpec,
    check_tensor_divides,
    column_linear,
    enter_tensor_parallel,
    gather_heads,
    leave_tensor_parallel,
    merge_params,
    partition_specs,
    row_linear,
    split_params,
    sum_backward,
    sum_over_positions,
    take_features,
    take_positions,
    tensor_parallel_model,
    vocabulary_embedding,
)
from jvarlen.parallel.train import make_train_step
from jvarlen.testing import assert_layout_invariant
from tests.conftest import random_dataset
from tests.parallel.test_layers import microbatch_of as short_microbatch
from tests.support.meshes import layout_mesh

# Neither four nor two devices divide 131 tokens.
MODEL = DecoderConfig(num_layers=2, width=16, mlp_width=64, num_heads=8, num_kv_heads=4, vocab_size=131)
L = MODEL.num_layers
UNSPLIT = Axes()


def axes_of(sequence_parallel, key=None):
    return Axes(tensor="tensor", sequence_parallel=sequence_parallel, key=key)


def test_gradients_of_what_is_not_trained_are_not_summed():
    def loss(trained, others):
        one, *_ = sum_backward([trained, *others], "tensor")
        return jnp.sum(one**2)

    traced = jax.make_jaxpr(on_devices(2, jax.grad(loss), P(), P()))(jnp.ones(2), [jnp.ones(3), jnp.arange(3)])
    assert [shapes for name, shapes in operands_in(traced.jaxpr) if name.startswith("psum")] == [[(2,)]]


def operands_in(jaxpr):
    """The primitives of a program and of those inside, and the shapes of what they take."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [atom.aval.shape for atom in equation.invars]
        for value in equation.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from operands_in(inner)


def on_devices(num_devices, call, in_specs, out_specs):
    mesh = layout_mesh(Layout(data=1, tensor=num_devices))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def assert_equal_trees(found, expected, rtol=1e-12):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(expected_leaf).max() > 1e-6
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=rtol * np.abs(expected_leaf).max())


def loss_and_gradients(model, params, num_devices, sequence_parallel, *arguments):
    """The sums of the split model, merged; its sharded gradients; and the compiled program."""
    loss_fn = layered_loss_fn(tensor_parallel_model(model, axes_of(sequence_parallel)))
    specs = partition_specs(model.specs)
    step = on_devices(
        num_devices, jax.value_and_grad(loss_fn, has_aux=True), (specs, *(P() for _ in arguments)), ((P(), P()), specs)
    )
    split = split_params(params, model.specs, num_devices)
    compiled = step.lower(split, *arguments).compile()
    sums, grads = compiled(split, *arguments)
    return sums, merge_params(grads, model.specs), grads, compiled


def counts(compiled):
    number = collections.Counter()
    for each in list_collectives(compiled):
        number[each.kind] += each.times
    return dict(number)


@functools.cache
def microbatch_of(packed):
    """Rows of 16 positions, two of them more than any sample has."""
    microbatch = short_microbatch(packed)
    return jax.tree.map(lambda leaf: np.pad(leaf, ((0, 0), (0, 2))) if leaf.ndim == 2 else leaf, microbatch)


@functools.cache
def of_the_whole_model(packed, config=MODEL):
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params(config, seed=0))
        found = jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))(params, microbatch_of(packed))
        return jax.tree.map(np.asarray, stack_layers(params)), found


@pytest.mark.parametrize(("num_devices", "sequence_parallel", "packed"), [(2, False, True), (4, True, True)])
def test_the_split_decoder_is_the_whole_one(num_devices, sequence_parallel, packed):
    params, (expected, expected_grads) = of_the_whole_model(packed)
    model = layered(MODEL)
    with jax.enable_x64(True):
        sums, grads, lying, compiled = loss_and_gradients(
            model, params, num_devices, sequence_parallel, microbatch_of(packed)
        )
        grads = unstack_layers(grads)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    assert_equal_trees(grads, expected_grads)
    if num_devices == 4:
        assert lying.ends["head"]["kernel"].shape == (16, 132)
        assert not np.any(lying.ends["head"]["kernel"][:, 131:])
    if sequence_parallel:
        # Two all-reduces are those of the cross-entropy, and one has all gradients of norms.
        assert counts(compiled) == {"all-gather": 4 * L + 2, "reduce-scatter": 4 * L + 2, "all-reduce": 3}
    else:
        assert counts(compiled) == {"all-reduce": 4 * L + 4}


def assert_shares_heads(num_kv_heads, sequence_parallel, **changes):
    fields = {"num_layers": 1, "num_kv_heads": num_kv_heads, "head_size": 4, "qkv_bias": True, "qk_norm": True}
    config = dataclasses.replace(MODEL, **fields | changes)
    params, (expected, expected_grads) = of_the_whole_model(True, config)
    with jax.enable_x64(True):
        sums, grads, _, compiled = loss_and_gradients(
            layered(config), params, 4, sequence_parallel, microbatch_of(True)
        )
        grads = unstack_layers(grads)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    assert_equal_trees(grads, expected_grads)
    return counts(compiled)


@pytest.mark.parametrize(("num_kv_heads", "sequence_parallel"), [(2, False), (1, True)])
def test_devices_share_heads_of_keys_and_values(num_kv_heads, sequence_parallel):
    kinds = assert_shares_heads(num_kv_heads, sequence_parallel)
    if not sequence_parallel:  # keys and values, and their gradients
        assert (kinds["all-gather"], kinds["reduce-scatter"]) == (2, 2)


def test_gradients_of_shared_heads_are_summed(monkeypatch):
    """Without the sum over the devices of a head, numbers would be wrong, and the test above would say so."""

    def gather_alone(x, num_heads, *, axes):
        whole = gather_heads(x, num_heads, axes=axes)
        if whole.shape == x.shape:
            return x
        begin = jax.lax.axis_index(axes.tensor) % (whole.shape[1] // x.shape[1]) * x.shape[1]
        own = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(whole), x, begin, 1)
        return own + jax.lax.stop_gradient(whole - own)

    monkeypatch.setattr("jvarlen.models.decoder.gather_heads", gather_alone)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_shares_heads(2, False, vocab_size=132)  # another one, as traced layers are kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kv_heads", "layout"), [(2, "data2.tensor4.zero3"), (1, "stage2.tensor4.1f1b"), (1, "context2.tensor4.zero1")]
)
def test_layouts_share_heads_of_keys_and_values(num_kv_heads, layout):
    config = dataclasses.replace(MODEL, num_kv_heads=num_kv_heads, head_size=4)
    dataset = random_dataset(12, 16)
    plan = make_plan(np.diff(dataset.offsets), [Bucket(2, 16)], packing="best_fit", num_microbatches=4)
    batch, params = next(iter(load(plan, dataset))), init_params(config, 0)
    assert len(assert_layout_invariant(layered(config), params, batch, [layout], rtol=1e-11)) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_the_forward_pass_communicates(sequence_parallel):
    model = layered(MODEL)
    loss_fn = layered_loss_fn(tensor_parallel_model(model, axes_of(sequence_parallel)))
    split = split_params(of_the_whole_model(False)[0], model.specs, 2)
    forward = on_devices(2, loss_fn, (partition_specs(model.specs), P()), P())
    found = counts(forward.lower(split, microbatch_of(False)).compile())
    if sequence_parallel:
        assert found == {"all-gather": 2 * L + 1, "reduce-scatter": 2 * L + 1, "all-reduce": 2}
    else:
        assert found == {"all-reduce": 2 * L + 3}


# For each function: its call, its arguments, the specs of these and of its result, and those that differ with context
# parallelism. There, gradients of whole parameters are a part of the sum.
FEATURES, POSITIONS = P(None, None, "tensor"), P(None, "tensor")
SHAPES = {"x": (3, 8, 12), "wide": (3, 8, 24), "w": (12, 24), "v": (24, 12), "b": (24,), "c": (12,), "table": (20, 12)}
PRIMITIVES = {
    "column": (column_linear, {"x": P(), "w": P(None, "tensor"), "b": P("tensor")}, FEATURES, {"x": POSITIONS}),
    "column_only": (column_linear, {"x": P(), "w": P(None, "tensor")}, FEATURES, {"x": POSITIONS}),
    "row": (row_linear, {"wide": FEATURES, "v": P("tensor"), "c": P()}, P(), {"out": POSITIONS}),
    "row_only": (row_linear, {"wide": FEATURES, "v": P("tensor")}, P(), {"out": POSITIONS}),
    "enter": (enter_tensor_parallel, {"x": P()}, None, {"x": POSITIONS}),
    "embedding": (
        lambda table, *, axes: vocabulary_embedding(table, tokens_of(20), axes=axes),
        {"table": P("tensor")},
        P(),
        {"out": POSITIONS},
    ),
    "cross_entropy": (
        lambda logits, *, axes: vocabulary_cross_entropy(logits, tokens_of(24), vocab_size=24, axes=axes),
        {"wide": FEATURES},
        P(),
        {},
    ),
}


def tokens_of(num_values):
    return jnp.asarray(np.random.default_rng(2).integers(0, num_values, (3, 8)))


@functools.cache
def result_and_gradients_of_the_plain_form(name):
    """The arguments, the weights of the result and, with these, the result and the gradients."""
    call, lying, out_spec, _ = PRIMITIVES[name]
    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=SHAPES[each]) for each in lying]
    plain = functools.partial(call, axes=UNSPLIT)
    with jax.enable_x64(True):
        weights = rng.normal(size=(4, *jax.eval_shape(plain, *arguments).shape))
        weights = weights[0] if out_spec is not None else weights

        @jax.jit
        def of_whole_arrays(weights, *arguments):
            out, pull = jax.vjp(plain, *arguments)
            return out, pull(weights)

        return arguments, weights, of_whole_arrays(weights if out_spec is not None else weights.sum(axis=0), *arguments)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_each_function_has_the_result_and_the_gradients_of_its_plain_form(name, sequence_parallel):
    call, lying, out_spec, when_sequence_parallel = PRIMITIVES[name]
    arguments, weights, (out, expected) = result_and_gradients_of_the_plain_form(name)
    if sequence_parallel:
        lying = {each: when_sequence_parallel.get(each, spec) for each, spec in lying.items()}
        out_spec = when_sequence_parallel.get("out", out_spec)
    partial = [sequence_parallel and spec == P() for spec in lying.values()]
    is_input = out_spec is None  # its gradients differ between devices, and are summed
    out_spec = P() if is_input else out_spec
    with jax.enable_x64(True):

        def on_device(weights, *arguments):
            out, pull = jax.vjp(functools.partial(call, axes=axes_of(sequence_parallel)), *arguments)
            grads = pull(weights[0] if is_input else weights)
            return out, [grad[None] if part else grad for grad, part in zip(grads, partial, strict=True)]

        in_specs = (P("tensor") if is_input else out_spec, *lying.values())
        grad_specs = [P("tensor") if part else spec for spec, part in zip(lying.values(), partial, strict=True)]
        found, grads = on_devices(4, on_device, in_specs, (out_spec, grad_specs))(weights, *arguments)
        assert_equal_trees(found, out, rtol=1e-13)
        grads = [np.sum(grad, axis=0) if part else grad for grad, part in zip(grads, partial, strict=True)]
        assert_equal_trees(grads, list(expected), rtol=1e-13)


def test_cross_entropy_of_any_vocabulary_is_stable_and_never_sees_padding():
    """Three tokens on four devices, so that one has padding only, and logits that float32 cannot exponentiate."""
    logits = np.array([[1e4, -1e4, 9999.0], [-3e38, 0, -1e30], [5, 5, 5]], np.float32)
    targets = jnp.array([2, 1, 0])
    padded = np.pad(logits, ((0, 0), (0, 1)), constant_values=3e38)

    def losses_and_gradient(logits):
        def total(logits):
            losses = vocabulary_cross_entropy(logits, targets, vocab_size=3, axes=axes_of(False))
            return jnp.sum(losses), losses

        grad, losses = jax.grad(total, has_aux=True)(logits)
        return losses, grad

    features = P(None, "tensor")
    losses, grad = on_devices(4, losses_and_gradient, features, (P(), features))(padded)
    plain = jax.jit(functools.partial(vocabulary_cross_entropy, vocab_size=3, axes=UNSPLIT))
    np.testing.assert_allclose(losses, plain(logits, targets), rtol=1e-3)  # which rounds at the size of the logits
    np.testing.assert_allclose(losses, [1 + np.log1p(np.exp(-1)), 0, np.log(3)], rtol=1e-6)
    grad = np.asarray(grad)
    expected = jax.jit(jax.grad(lambda logits: jnp.sum(plain(logits, targets))))(logits)
    np.testing.assert_allclose(grad[:, :3], expected, atol=1e-6)
    assert not np.any(grad[:, 3])
    in_bfloat16 = plain(logits[2:].astype(jnp.bfloat16), np.asarray(targets)[2:])
    assert in_bfloat16.dtype == np.float32


# A model of a user's own: an input kernel and a table of positions that are whole, blocks of a norm, a gated perceptron
# with gate and up in one kernel, biases, a scale for features that every device shares, and dropout of two kinds.
WIDTH, HIDDEN, NUM_POSITIONS = 6, 8, 8


def embed(ends, microbatch, axes):
    return take_positions(microbatch["inputs"], axes=axes) @ ends["in"] + take_positions(ends["place"], axes=axes)


def block(own, x, microbatch, axes):
    normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * own["norm"]
    kernel, bias = own["gate_up"].reshape(WIDTH, -1), own["bias"].ravel()
    gate, up = jnp.split(column_linear(normed, kernel, bias, axes=axes), 2, axis=-1)
    shared = own["shared"] if axes.sequence_parallel else enter_tensor_parallel(own["shared"], axes=axes)
    hidden = jax.nn.silu(gate) * up * jnp.mean(shared)
    keep = jax.random.bernoulli(axes.key, 0.5, (*x.shape[:-2], NUM_POSITIONS, HIDDEN))
    hidden = hidden * take_features(keep, axes=axes)
    out = row_linear(hidden, own["down"], own["out_bias"], axes=axes)
    keep = jax.random.bernoulli(jax.random.fold_in(axes.key, 1), 0.5, (*x.shape[:-2], NUM_POSITIONS, WIDTH))
    return x + out * take_positions(keep, axes=axes)


def loss(ends, x, microbatch, axes):
    error = x @ ends["in"].T - take_positions(microbatch["targets"], axes=axes)
    total = sum_over_positions(
        jnp.sum(error**2 * take_positions(microbatch["weights"], -1, axes=axes)[..., None]), axes=axes
    )
    return total, jnp.sum(microbatch["weights"])


OWN = LayeredModel(
    embed,
    block,
    loss,
    specs=LayeredParams(
        {"in": P(), "place": P()},
        {
            "norm": P(),
            "gate_up": P(None, None, "tensor"),
            "bias": P(None, "tensor"),
            "shared": P(),
            "down": P("tensor"),
            "out_bias": P(),
        },
    ),
)


def own_params():
    rng = np.random.default_rng(0)
    shapes = LayeredParams(
        {"in": (5, WIDTH), "place": (NUM_POSITIONS, WIDTH)},
        {
            "norm": (2, WIDTH),
            "gate_up": (2, WIDTH, 2, HIDDEN),
            "bias": (2, 2, HIDDEN),
            "shared": (2, 3),
            "down": (2, HIDDEN, WIDTH),
            "out_bias": (2, WIDTH),
        },
    )
    return jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: type(x) is tuple)


@functools.cache
def of_the_whole_own_model():
    """Arguments of the loss function, and what it gives."""
    rng = np.random.default_rng(1)
    microbatch = {name: rng.normal(size=(3, NUM_POSITIONS, 5)) for name in ("inputs", "targets")}
    microbatch["weights"] = rng.integers(0, 2, (3, NUM_POSITIONS)).astype(np.float64)
    with jax.enable_x64(True):
        arguments = own_params(), microbatch, jax.random.key(7)
        return arguments, jax.jit(jax.value_and_grad(layered_loss_fn(OWN), has_aux=True))(*arguments)


@pytest.mark.parametrize(("num_devices", "sequence_parallel"), [(4, False), (4, True)])
def test_a_model_of_ones_own_with_dropout_is_the_unsplit_one(num_devices, sequence_parallel):
    (params, *rest), (expected, expected_grads) = of_the_whole_own_model()
    with jax.enable_x64(True):
        sums, grads, _, compiled = loss_and_gradients(OWN, params, num_devices, sequence_parallel, *rest)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    assert_equal_trees(grads, expected_grads)
    assert set(counts(compiled)) == {"all-reduce"} | ({"all-gather", "reduce-scatter"} if sequence_parallel else set())


def test_without_an_axis_they_are_plain():
    rng = np.random.default_rng(0)
    x, w, v, b = (jnp.asarray(rng.normal(size=shape)) for shape in ((2, 4), (4, 6), (6, 4), (6,)))
    assert column_linear(x, w, b, axes=UNSPLIT).tolist() == (x @ w + b).tolist()
    assert row_linear(x @ w, v, axes=UNSPLIT).tolist() == (x @ w @ v).tolist()
    for call in (enter_tensor_parallel, leave_tensor_parallel, take_features, take_positions, sum_over_positions):
        assert call(x, axes=UNSPLIT) is x
    assert vocabulary_embedding(w, jnp.array([3, 0]), axes=UNSPLIT).tolist() == w[jnp.array([3, 0])].tolist()
    assert check_tensor_divides(UNSPLIT, num_heads=3) == 1


@pytest.mark.parametrize("num_devices", [1, 4])
def test_parameters_are_split_and_merged(num_devices):
    for model, params in ((layered(MODEL), of_the_whole_model(False)[0]), (OWN, own_params())):
        split = split_params(params, model.specs, num_devices)
        assert_equal_trees(merge_params(split, model.specs), params, rtol=0)
        assert jax.tree.structure(partition_specs(model.specs)) == jax.tree.structure(params)
    split = split_params(of_the_whole_model(False)[0], layered(MODEL).specs, num_devices)
    assert split.ends["head"]["kernel"].shape == (16, 132 if num_devices > 1 else 131)


def test_what_the_devices_do_not_divide_is_refused_by_name():
    config = DecoderConfig(num_layers=1, width=18, num_heads=3)
    params = jax.eval_shape(lambda: stack_layers(init_params(config, 0)))
    specs = jax.tree.map(  # that do not tell heads
        lambda spec: dataclasses.replace(spec, num_heads=None) if isinstance(spec, TensorSpec) else spec,
        layered(config).specs,
        is_leaf=lambda spec: isinstance(spec, TensorSpec | P),
    )
    with pytest.raises(
        ValueError, match=r"the 4 devices .*'tensor' do not divide .*\['out'\].*\[1,18,18\] \(dimension 1: 18\)"
    ):
        split_params(params, specs, 4)
    with pytest.raises(ValueError, match=r"\['gate_up'\].*\(dimension 3: 8\)"):
        split_params(own_params(), OWN.specs, 3)
    with pytest.raises(
        ValueError, match=r"the 2 devices .*'tensor' do not divide .*\['out'\].*num_heads: 3, which would be"
    ):
        split_params(params, layered(config).specs, 2)
    split = jax.eval_shape(lambda params: split_params(params, specs, 2), params)
    microbatch = microbatch_of(False)

    def trace(config, params, num_devices, sequence_parallel, microbatch):
        model = layered(config)
        loss_fn = layered_loss_fn(tensor_parallel_model(model, axes_of(sequence_parallel)))
        jax.eval_shape(on_devices(num_devices, loss_fn, (partition_specs(model.specs), P()), P()), params, microbatch)

    with pytest.raises(ValueError, match=r"the 2 devices of the axis 'tensor' do not divide num_heads \(3\)"):
        trace(config, split, 2, False, microbatch)
    split = split_params(of_the_whole_model(False)[0], layered(MODEL).specs, 4)
    with pytest.raises(
        ValueError, match=r"the 4 devices .* do not divide 14 positions: give make_buckets a length_mult"
    ):
        trace(MODEL, split, 4, True, short_microbatch(False))


def test_heads_that_neither_divide_the_devices_nor_are_divided_are_refused():
    config = dataclasses.replace(MODEL, num_heads=12, num_kv_heads=3, head_size=8, vocab_size=132)
    params = jax.eval_shape(lambda: stack_layers(init_params(config, 0)))
    with pytest.raises(ValueError, match=r"the 4 devices .*\['k'\].*\(num_heads: 3, which would be cut\).*\['v'\]"):
        split_params(params, layered(config).specs, 4)
    cut = dataclasses.replace(config, num_kv_heads=1, head_size=6)  # four devices have no part of six features each
    with pytest.raises(ValueError, match=r"the 4 devices .*\['k'\].*\(dimension 2: 6\)"):
        split_params(jax.eval_shape(lambda: stack_layers(init_params(cut, 0))), layered(cut).specs, 4)
    call = on_devices(4, functools.partial(gather_heads, num_heads=3, axes=axes_of(False)), P(), P())
    with pytest.raises(ValueError, match=r"must be a multiple or a divisor of the num_kv_heads \(3\)"):
        call(jnp.ones((2, 6)))


def test_other_mistakes_are_refused():
    no_specs = layered(MODEL)._replace(specs=None)
    with pytest.raises(ValueError, match="nothing of this model is split along the axis 'tensor': its specs are None"):
        tensor_parallel_model(no_specs, axes_of(False))
    with pytest.raises(ValueError, match=r"the specs of a model are not those of these parameters: .*\['place'\]"):
        split_params(LayeredParams({"in": np.ones((5, 6))}, own_params().layers), OWN.specs, 2)
    params, specs = of_the_whole_model(False)[0], layered(dataclasses.replace(MODEL, vocab_size=130)).specs
    with pytest.raises(ValueError, match=r"\['embed'\].* \(dimension 0: 131, not 130\), \['head'\]"):
        split_params(params, specs, 2)
    with pytest.raises(ValueError, match="7 logits on each of 1 devices are not those of a vocabulary of 8"):
        vocabulary_cross_entropy(jnp.ones((2, 7)), jnp.array([0, 1]), vocab_size=8, axes=UNSPLIT)
    with pytest.raises(ValueError, match="the 4 devices of the axis 'tensor' do not divide 6 features"):
        jax.eval_shape(on_devices(4, lambda x: take_features(x, axes=axes_of(False)), P(), P()), jnp.ones((2, 6)))


@functools.cache
def plan_and_data():
    """Two steps of four microbatches, the last one with padding rows."""
    dataset = random_dataset(2 * 4 * 3 - 2, 8)
    return make_plan(np.diff(dataset.offsets), [Bucket(3, 8)], order="length", num_microbatches=4), dataset


ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=8)  # whose means over arrays padding would change


# Logits and inputs of 131 tokens, which nothing divides.
PADDED = LayeredModel(
    lambda ends, batch, axes: vocabulary_embedding(ends["embed"], batch.tokens, axes=axes),
    lambda own, x, batch, axes: (
        x + row_linear(jnp.tanh(column_linear(x, own["up"], axes=axes)), own["down"], axes=axes)
    ),
    lambda ends, x, batch, axes: (
        jnp.sum(
            vocabulary_cross_entropy(column_linear(x, ends["head"], axes=axes), batch.tokens, vocab_size=131, axes=axes)
            * batch.weights
        ),
        jnp.sum(batch.weights),
    ),
    specs=LayeredParams(
        {"embed": TensorSpec(P("tensor"), num_values=131), "head": TensorSpec(P(None, "tensor"), num_values=131)},
        {"up": P(None, "tensor"), "down": P("tensor")},
    ),
)


def test_the_optimizer_never_sees_what_vocabularies_are_padded_with():
    rng, (plan, dataset) = np.random.default_rng(0), plan_and_data()
    shapes = [{"embed": (131, 16), "head": (16, 131)}, {"up": (2, 16, 32), "down": (2, 32, 16)}]
    params = LayeredParams(*({name: rng.normal(size=each) / 4 for name, each in part.items()} for part in shapes))
    batch, layouts = next(iter(load(plan, dataset))), ["data2.tensor4.zero1"]
    assert_layout_invariant(PADDED, params, batch, layouts, optimizer=ADAFACTOR, num_steps=2, rtol=1e-11)


def test_what_cannot_be_trained_over_tensor_is_refused():
    layout = Layout.parse("data2.tensor2")
    on = {"layout": layout}
    optimizer = optax.sgd(0.1)
    needs = "tensor2 takes a LayeredModel with specs"
    for model in (make_loss_fn(MODEL), OWN._replace(specs=None)):
        for make in (functools.partial(make_train_step, optimizer=optimizer), make_eval_step):
            with pytest.raises(ValueError, match=needs):
                make(model, **on)
