"""The two models from the same weights and the two loaders on the same plan: the same losses and arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jvarlen
import torch_ref
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.config import RotaryScaling
from jvarlen.models.hugging_face import hugging_face_tensors
from tests.support.hand_made import batch_of
from torch_ref.training.train import take_microbatch

from ..conftest import random_dataset
from . import find
from .twin import gradients_of, make_torch_model

CONFIG = DecoderConfig(num_layers=2, width=32, num_heads=2)
DATASET = random_dataset(400, 48)
LENGTHS = np.diff(DATASET.offsets)


def make_plans(packing, **options):
    """The plan of each package, with buckets of two lengths and some padding rows."""
    options |= {"packing": packing, "seed": 5, "num_microbatches": 2}
    plans = [package.make_plan(LENGTHS, [(6, 24), (3, 64)], **options) for package in (jvarlen, torch_ref)]
    assert plans[0].digest == plans[1].digest
    return plans


def assert_same_batch(batch, reference):
    """In all fields, of which padded batches lack some."""
    for name in ("tokens", "lengths", "segment_ids", "positions", "weights", "ids", "is_real"):
        value = getattr(batch, name, None)
        if value is not None:
            np.testing.assert_array_equal(value, getattr(reference, name).numpy(), err_msg=name)
    assert float(batch.num_sequences) == float(reference.num_sequences)


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_both_loaders_give_the_same_arrays(packing):
    plan, torch_plan = make_plans(packing)
    pairs = list(zip(jvarlen.load(plan, DATASET), torch_ref.load(torch_plan, DATASET), strict=True))
    assert len(pairs) == plan.num_steps
    for batch, reference in pairs:
        assert_same_batch(batch, reference)


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_both_loaders_give_a_step_as_the_batches_of_its_groups(packing):
    plan, torch_plan = make_plans(packing, sequences_per_step=37)
    for step, (batch, reference) in enumerate(
        zip(jvarlen.load(plan, DATASET), torch_ref.load(torch_plan, DATASET), strict=True)
    ):
        for group, of_group, of_reference in zip(plan.groups(step), batch.groups, reference.groups, strict=True):
            assert_same_batch(of_group, of_reference)
            assert float(of_group.num_sequences) == plan.group_offsets[group + 1] - plan.group_offsets[group]
        assert float(batch.num_sequences) == reference.num_sequences == plan.num_sequences[step]


@pytest.mark.parametrize("length", [1, 1024])
def test_the_models_agree_at_every_length(length):
    params = init_params(CONFIG, seed=1)
    model = make_torch_model(CONFIG, params)
    tokens = np.random.default_rng(0).integers(0, 256, (2, length))
    weights = np.ones((2, length), np.float32)
    lengths = np.full(2, length, np.int32)
    batch = batch_of(tokens.astype(np.int32), lengths, weights, np.float32(2))
    loss, _ = jax.jit(make_loss_fn(CONFIG))(params, batch)
    torch_batch = torch_ref.Batch(
        torch.from_numpy(tokens), torch.from_numpy(lengths).long(), torch.from_numpy(weights), 2.0
    )
    reference, _ = torch_ref.loss_sums(model, torch_batch)
    np.testing.assert_allclose(float(loss), float(reference.detach()), rtol=1e-5)


@pytest.mark.parametrize("method", ["best_fit", "wrapped"])
def test_both_loaders_cut_the_same_chunks(method):
    """All tokens of all samples, once."""
    overlong, edges = ("split", [(6, 8), (3, 20)]) if method == "best_fit" else ("error", [(3, 20)])
    options = {"packing": method, "overlong": overlong, "num_microbatches": 2}
    plan, torch_plan = (package.make_plan(LENGTHS, edges, **options) for package in (jvarlen, torch_ref))
    assert plan.digest == torch_plan.digest
    assert plan.num_tokens.sum() == LENGTHS.sum()
    assert method == "wrapped" or plan.num_samples == (-(-LENGTHS // 20)).sum()
    read = [np.full(length, -1) for length in LENGTHS]
    batches = jvarlen.load(plan, DATASET, lengths=LENGTHS)
    for step, (batch, reference) in enumerate(zip(batches, torch_ref.load(torch_plan, DATASET), strict=True)):
        assert_same_batch(batch, reference)
        ids, starts = plan.rows(step), plan.chunks(step)
        for m, b, p in np.argwhere(ids >= 0):
            tokens = np.asarray(batch.tokens[m, b])[np.asarray(batch.segment_ids[m, b]) == p + 1]
            chunk = read[ids[m, b, p]][starts[m, b, p] :][: len(tokens)]
            assert (chunk == -1).all()
            chunk[:] = tokens
    assert all((tokens == DATASET[i]).all() for i, tokens in enumerate(read))
    second = torch_ref.load(torch_plan, DATASET, rank=1, num_replicas=2)
    for half, whole in zip(second, torch_ref.load(torch_plan, DATASET), strict=True):
        assert half.tokens.equal(whole.tokens[1:])


@pytest.mark.parametrize("packing", [{}, {"packing": "best_fit"}], ids=["padded", "packed"])
def test_rows_that_repeat_a_sample_are_no_samples_and_have_no_weight(package, packing):
    plan = package.make_plan([3] * 5, [(4, 3)], **packing)
    batches = list(package.load(plan, [np.arange(3)] * 5, padding_rows="repeat"))
    assert [float(batch.weights.sum()) for batch in batches] == [12, 3]
    assert (
        [float(batch.num_sequences) for batch in batches] == [int(batch.is_real.sum()) for batch in batches] == [4, 1]
    )


def weighted_samples(package):
    """Plain tokens, tokens with labels, and tokens with loss weights, of one package."""
    rng = np.random.default_rng(4)
    samples = []
    for i in range(60):
        tokens = DATASET[i].astype(np.int64)
        labels, weights = np.where(rng.random(len(tokens)) < 0.4, -100, tokens), rng.choice([0, 0.3, 1.7], len(tokens))
        of_labels = find(package, "WeightedTokens")(tokens, labels != -100)
        samples.append([tokens, of_labels, find(package, "WeightedTokens")(tokens, weights)][i % 3])
    return samples


HOW_ROWS_ARE_MADE = {
    "cut": ([(6, 30)], {"overlong": "truncate"}),
    "packed": ([(4, 64)], {"packing": "best_fit"}),
    "split": ([(4, 20)], {"packing": "best_fit", "overlong": "split"}),
    "wrapped": ([(4, 20)], {"packing": "wrapped"}),
}


@pytest.mark.parametrize("kind", ["padded", "mixture", *HOW_ROWS_ARE_MADE])
def test_labels_and_loss_weights_give_the_same_batches_and_loss(kind):
    """In float64, where nothing but a wrong weight can differ."""
    params = init_params(CONFIG, seed=1)
    model = make_torch_model(CONFIG, params)
    batches = []
    for package in (jvarlen, torch_ref):
        dataset, lengths, options = weighted_samples(package), LENGTHS[:60], {"seed": 1, "num_microbatches": 2}
        if kind == "mixture":
            dataset = package.Mixture([dataset[:40], dataset[40:]], [3, 1], seed=2, loss_weights=[1, 0.4])
            lengths = np.array([len(dataset[i]) for i in range(len(dataset))])
        edges, how = HOW_ROWS_ARE_MADE.get(kind, ([(8, 16), (4, 48)], {}))
        is_packed = "packing" in how
        plan = package.make_plan(lengths, edges, **how, **options)
        collate = {"collate": jvarlen.loading.collate_tokens} if package is jvarlen and is_packed else {}
        batches.append(package.load(plan, dataset, **collate))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        loss_fn, model = jax.jit(make_loss_fn(CONFIG)), model.double()
        steps = list(zip(*batches, strict=True))
        for batch, reference in steps:
            np.testing.assert_array_equal(batch.tokens, reference.tokens.numpy())
            np.testing.assert_array_equal(batch.weights, reference.weights.numpy())
            for begin_token in (None, 300):
                found, twin = (
                    package_of_batch.next_token_targets(of_package, begin_token=begin_token)
                    for package_of_batch, of_package in ((jvarlen.batches, batch), (torch_ref, reference))
                )
                for array, tensor in zip(found, twin, strict=True):
                    np.testing.assert_array_equal(array, tensor.numpy())
        batch, reference = next((b, r) for b, r in steps if set(np.unique(b.weights[0])) - {0, 1})
        part = {name: value[0] for name, value in reference._asdict().items() if isinstance(value, torch.Tensor)}
        loss, weight = loss_fn(params, jax.tree.map(lambda leaf: np.asarray(leaf)[0] if leaf.ndim else leaf, batch))
        expected, expected_weight = torch_ref.loss_sums(model, reference._replace(**part))
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(float(loss), float(expected.detach()), rtol=1e-12)
        np.testing.assert_allclose(float(weight), float(expected_weight), rtol=1e-6)


@pytest.mark.parametrize("package", [jvarlen, torch_ref], ids=lambda package: package.__name__)
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda weighted: weighted([1, 2], [1]), r"\(1,\)|not \(2,\)"),
        (lambda weighted: weighted([1, 2], [1, -1]), "at least 0"),
        (lambda weighted: weighted([1, 2], [1, np.nan]), "finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(package, make, named):
    with pytest.raises(ValueError, match=named):
        make(find(package, "WeightedTokens"))


SCALING = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=16)
# Every setting of the decoder at another value than the demo's.
FEATURES = [
    {},
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 10, "mlp_width": 24, "tied": True, "norm_epsilon": 1e-3},
    {"qkv_bias": True, "windows": (0, 5), "begins_samples": False},
    {"qk_norm": True, "out_bias": True, "windows": (2, 9), "rotary_base": 100.0, "begins_samples": False},
    {"rotary_scaling": SCALING, "head_size": 8, "vocab_size": 300},
]


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_the_models_have_the_same_loss_and_gradients(features, packing):
    """In float64, with parameters large enough that what is attended to decides."""
    config = dataclasses.replace(CONFIG, **features)
    plan, torch_plan = make_plans(packing)
    batch, reference = next(iter(jvarlen.load(plan, DATASET))), next(iter(torch_ref.load(torch_plan, DATASET)))
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), init_params(config, seed=1))
        microbatch = jax.tree.map(lambda leaf: np.asarray(leaf)[0] if leaf.ndim else leaf, batch)
        grad_fn = jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))
        (loss, weight), grads = grad_fn(params, microbatch)
    model = make_torch_model(config, params, torch.float64)
    expected, expected_weight = torch_ref.loss_sums(model, take_microbatch(reference, 0))
    expected.backward()
    assert loss.dtype == np.float64
    np.testing.assert_allclose(float(loss), float(expected.detach()), rtol=1e-12)
    assert float(weight) == float(expected_weight)
    found, references = hugging_face_tensors(grads, config), gradients_of(model)
    assert found.keys() == references.keys()
    for name, gradient in references.items():
        assert np.abs(gradient).max() > 0, name
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-12 * np.abs(gradient).max(), err_msg=name)
