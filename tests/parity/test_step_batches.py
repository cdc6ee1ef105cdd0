"""Steps of several groups in torch_ref: read as one batch each, and trained as one."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD
from torch.utils.data import DataLoader

import jvarlen
import torch_ref
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.hugging_face import hugging_face_tensors
from torch_ref.loading.batch import values_of
from torch_ref.training.train import check_whole_step, to_device

from . import in_both
from .test_torch_ref import dataset_of, small_model
from .twin import make_torch_model

LENGTHS = np.random.default_rng(0).integers(1, 13, 23)
BUCKETS = [(1, 4), (2, 4), (1, 8), (3, 12)]
SAMPLES = dataset_of(LENGTHS)
MAX_NORM = 0.9
PAIRS = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)


def plan_of(num_microbatches=2, lengths=LENGTHS, buckets=BUCKETS):
    return torch_ref.make_plan(lengths, buckets, sequences_per_step=9, num_microbatches=num_microbatches, seed=1)


def kept(ids):
    return [sample for sample in ids.reshape(-1).tolist() if sample >= 0]


def test_a_step_is_one_batch_of_its_groups():
    """In their order, with the shape of each; the step's samples are counted once, and those of a group apart."""
    plan = plan_of()
    assert plan.has_many_groups
    steps = list(torch_ref.load(plan, SAMPLES))
    assert len(steps) == plan.num_steps == 3
    for step, batch in enumerate(steps):
        assert isinstance(batch, torch_ref.StepBatch)
        assert batch.num_sequences == plan.num_sequences[step]
        assert sum(group.num_sequences for group in batch.groups) == batch.num_sequences
        for group, values in zip(plan.groups(step), batch.groups, strict=True):
            rows, length = plan.buckets.shapes[plan.group_bucket[group]]
            assert values.tokens.shape == (2, rows, length)
            assert values.ids.tolist() == plan.rows(group).tolist()
            assert values.lengths.sum() == plan.group_tokens[group]
            for place in np.argwhere(plan.rows(group) >= 0):
                sample = SAMPLES[plan.rows(group)[tuple(place)]]
                assert values.tokens[tuple(place)][: len(sample)].tolist() == sample.tolist()


def test_replicas_share_each_group():
    plan = plan_of()
    shares = [list(torch_ref.load(plan, SAMPLES, rank=rank, num_replicas=2)) for rank in range(2)]
    for whole, *parts in zip(torch_ref.load(plan, SAMPLES), *shares, strict=True):
        assert {part.num_sequences for part in parts} == {whole.num_sequences}
        for group, *of_ranks in zip(whole.groups, *(part.groups for part in parts), strict=True):
            assert {values.num_sequences for values in of_ranks} == {group.num_sequences}
            assert torch.equal(torch.cat([values.tokens for values in of_ranks]), group.tokens)


def test_a_later_start_gives_the_same_steps():
    plan = plan_of()
    last = list(torch_ref.load(plan, SAMPLES))[-1]
    (again,) = torch_ref.load(plan, SAMPLES, start_step=2)
    assert again.num_sequences == last.num_sequences
    for group, other in zip(last.groups, again.groups, strict=True):
        assert torch.equal(group.tokens, other.tokens)


def test_padding_rows_repeat_a_row_of_their_group():
    for batch in torch_ref.load(plan_of(), SAMPLES, padding_rows="repeat"):
        for group in batch.groups:
            padding = ~group.is_real
            assert (group.weights[padding] == 0).all()
            assert (group.tokens[padding] == group.tokens[0, 0]).all()


def test_fields_and_pairs_come_in_groups():
    fields = [{"tokens": sample, "label": i} for i, sample in enumerate(SAMPLES)]
    plan = plan_of()
    for step, batch in enumerate(torch_ref.load(plan, fields)):
        labels = torch.cat([group["label"][group["is_real"]] for group in batch.groups])
        assert sorted(labels.tolist()) == sorted(kept(plan.sample_ids[slice(*plan.step_offsets[step : step + 2])]))
    pairs = plan_of(lengths=PAIRS, buckets=[(2, 12, 6), (1, 12, 12)])
    batches = list(torch_ref.load(pairs, [(SAMPLES[i], SAMPLES[-1 - i]) for i in range(len(SAMPLES))]))
    assert all(isinstance(group, torch_ref.PairBatch) for batch in batches for group in batch.groups)
    assert sum(len(kept(group.ids)) for batch in batches for group in batch.groups) == len(SAMPLES)


def test_a_step_moves_to_a_device_whole():
    batch = next(iter(torch_ref.load(plan_of(), SAMPLES)))
    moved = to_device(batch, "meta")
    assert {
        value.device.type for group in moved.groups for value in values_of(group).values() if torch.is_tensor(value)
    }
    assert all(group.tokens.device.type == "meta" for group in moved.groups)
    assert moved.num_sequences == batch.num_sequences


def take(batches, **options):
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    metrics = [torch_ref.train_step(model, optimizer, batch, **options) for batch in batches]
    return metrics, [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_step_of_groups_is_the_step_of_one_batch(num_microbatches, max_norm):
    """One division and one update; all of its samples in one microbatch give the same."""
    plan = plan_of(num_microbatches)
    whole = torch_ref.make_plan(LENGTHS, [(9, 12)], order=plan.sample_ids)
    assert whole.num_sequences.tolist() == plan.num_sequences.tolist()
    found, weights = take(torch_ref.load(plan, SAMPLES), max_norm=max_norm)
    expected, of_whole = take(torch_ref.load(whole, SAMPLES), max_norm=max_norm)
    for one, other in zip(found, expected, strict=True):
        assert one["num_sequences"] == other["num_sequences"]
        assert one["weight"] == other["weight"]
        torch.testing.assert_close(one["loss"], other["loss"], rtol=1e-12, atol=0)
    torch.testing.assert_close(weights, of_whole, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("packing", ["padded", "best_fit", "wrapped"])
def test_both_take_steps_of_groups_alike(packing):
    """Momentum in float64, with clipped gradients: losses of all steps, and final weights."""
    config = DecoderConfig(num_layers=1, width=16, num_heads=2, begins_samples=packing == "padded")
    buckets = [(1, 12), (2, 12)] if packing == "wrapped" else BUCKETS
    arguments = {"tokens_per_step": 60, "packing": packing, "num_microbatches": 2, "seed": 1}
    plan, other = in_both(lambda package: package.make_plan(LENGTHS, buckets, **arguments))
    assert plan.digest == other.digest
    assert plan.has_many_groups
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params(config, seed=0))
        model = make_torch_model(config, params, torch.float64)
        sgd = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.sgd(0.1, 0.9))
        train_step = jvarlen.make_train_step(make_loss_fn(config), sgd)
        state, step = train_step.init(params), jax.jit(train_step)
        expected = []
        for batch in jvarlen.load(plan, SAMPLES):
            state, metrics = step(state, batch)
            expected.append(float(metrics.loss))
        weights = hugging_face_tensors(state.params, config)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sdpa_kernel(SDPBackend.MATH):
        steps = list(torch_ref.load(other, SAMPLES))
        found = [float(torch_ref.train_step(model, optimizer, batch, max_norm=MAX_NORM)["loss"]) for batch in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), weights[name], rtol=0, atol=1e-12, err_msg=name)


def test_rates_see_the_whole_step():
    plan = plan_of()
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch_ref.VariableBatchSizeLR(optimizer, plan, 9)
    rates = []
    for _ in range(plan.num_steps):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 1.0, 5 / 9]
    assert torch_ref.lr_sequence(plan, 1.0, 9).tolist() == rates


def test_a_sampler_gives_one_group_after_the_other():
    """Each microbatch says how many its step has, and is no step by itself where there are several."""
    plan = plan_of()
    for rank in range(2):
        sampler = torch_ref.PlanBatchSampler(plan, rank, 2)
        planned = torch_ref.PlannedDataset(sampler, SAMPLES)
        assert len(sampler) == plan.num_groups
        listed = list(sampler)
        assert listed == [kept(plan.rows(group)[rank]) for group in range(plan.num_groups)]
        batches = list(DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate))
        shares = list(torch_ref.load(plan, SAMPLES, rank=rank, num_replicas=2))
        number = 0
        for step, share in enumerate(shares):
            of_step = batches[number : number + len(plan.groups(step))]
            number += len(of_step)
            for batch, group in zip(of_step, share.groups, strict=True):
                assert batch.num_sequences == plan.num_sequences[step]
                assert (batch.num_microbatches or 1) == len(of_step)
                assert torch.equal(batch.tokens, group.tokens)
                if len(of_step) == 1:
                    check_whole_step(batch)
                    continue
                with pytest.raises(ValueError, match=f"1 of the {len(of_step)} microbatches"):
                    check_whole_step(batch)
        assert number == len(batches) > len(shares)


def test_groups_are_compiled_by_their_buckets():
    """The shapes of all steps stay those of the plan; a group of another shape is refused before anything changes."""
    plan, model = plan_of(buckets=[(2, 4), (3, 12)]), small_model()
    compiled = torch_ref.compile_buckets(model, plan, backend="eager", progress=False)
    steps = list(torch_ref.load(plan, SAMPLES))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = [compiled(optimizer, batch)["loss"] for batch in steps]
    expected, weights = take(steps)
    torch.testing.assert_close(found, [metrics["loss"] for metrics in expected], rtol=1e-12, atol=0)
    torch.testing.assert_close([weight.detach() for weight in model.parameters()], weights, rtol=1e-12, atol=1e-14)
    used = [{int(plan.group_bucket[group]) for group in plan.groups(step)} for step in range(plan.num_steps)]
    assert [row.num_steps for row in compiled.rows] == [sum(k in each for each in used) for k in range(2)]
    (other, *_) = torch_ref.load(torch_ref.make_plan([5], [(2, 5)], num_microbatches=2), [SAMPLES[0][:5].repeat(5)[:5]])
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(torch_ref.UnplannedShapeError, match="no bucket was compiled"):
        compiled(optimizer, steps[0]._replace(groups=[*steps[0].groups, other]))
    torch.testing.assert_close([weight.detach() for weight in model.parameters()], before, rtol=0, atol=0)


def test_balance_moves_rows_within_their_groups():
    plan = plan_of()
    balanced = torch_ref.balance_plan(plan, LENGTHS.astype(float), 2)
    assert balanced.digest != plan.digest
    assert balanced.step_groups.tolist() == plan.step_groups.tolist()
    for group in range(plan.num_groups):
        assert sorted(kept(balanced.rows(group))) == sorted(kept(plan.rows(group)))
    before, after = (torch_ref.planning.balance.rank_costs(each, LENGTHS, 2) for each in (plan, balanced))
    assert after.sum(axis=1).tolist() == plan.num_tokens.tolist()
    assert (after.max(axis=1) <= before.max(axis=1)).all()
    assert (after.max(axis=1) - after.min(axis=1)).max() <= 3
