"""The same schedules in Optax and in PyTorch: the same rates in the tables, in force in torch, and applied by JAX."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

import jvarlen
import torch_ref
from jvarlen.training.optimizers import scale_by_planned_rate

BASE, LAST, WARMUP = 0.3, 0.015, 20
LENGTHS = np.random.default_rng(0).integers(1, 50, 1000)
BUCKETS = [(8, 20), (4, 50)]
JAX_PLANS = [jvarlen.make_plan(LENGTHS, BUCKETS, order="shuffle", epoch=epoch) for epoch in range(2)]
TORCH_PLANS = [torch_ref.make_plan(LENGTHS, BUCKETS, order="shuffle", epoch=epoch) for epoch in range(2)]
NUM_STEPS = sum(plan.num_steps for plan in JAX_PLANS)
NUM_SEQUENCES = np.concatenate([plan.num_sequences for plan in TORCH_PLANS])
COSINE_STEPS = NUM_STEPS - WARMUP


class Schedule(NamedTuple):
    """One schedule three times: in Optax, in torch, and as a formula."""

    in_optax: optax.Schedule
    in_torch: Callable[[Optimizer], schedulers.LRScheduler]
    formula: Callable[[int], float]


def cosine_at(t, period):
    return LAST + (BASE - LAST) * (1 + math.cos(math.pi * t / period)) / 2


def warmup_then_cosine(optimizer):
    warmup = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=COSINE_STEPS, eta_min=LAST)
    return schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[WARMUP])


SCHEDULES = {
    "constant": Schedule(optax.constant_schedule(BASE), lambda o: schedulers.ConstantLR(o, factor=1.0), lambda t: BASE),
    "step": Schedule(
        optax.exponential_decay(BASE, 50, 0.3, staircase=True),
        lambda o: schedulers.StepLR(o, step_size=50, gamma=0.3),
        lambda t: BASE * 0.3 ** (t // 50),
    ),
    "cosine": Schedule(
        optax.cosine_decay_schedule(BASE, NUM_STEPS, alpha=LAST / BASE),
        lambda o: schedulers.CosineAnnealingLR(o, T_max=NUM_STEPS, eta_min=LAST),
        lambda t: cosine_at(t, NUM_STEPS),
    ),
    "linear warm-up": Schedule(
        optax.linear_schedule(0.1 * BASE, BASE, WARMUP),
        lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=WARMUP),
        lambda t: BASE * (0.1 + 0.9 * min(t / WARMUP, 1)),
    ),
    "sequence": Schedule(
        optax.join_schedules(
            [
                optax.linear_schedule(0.1 * BASE, BASE, WARMUP),
                optax.cosine_decay_schedule(BASE, COSINE_STEPS, alpha=LAST / BASE),
            ],
            [WARMUP],
        ),
        warmup_then_cosine,
        lambda t: BASE * (0.1 + 0.9 * t / WARMUP) if t < WARMUP else cosine_at(t - WARMUP, COSINE_STEPS),
    ),
}


def weights(*rates):
    return [{"params": [torch.zeros(2, requires_grad=True)], "lr": rate} for rate in rates]


def run(scheduler, num_steps):
    """Yield what is in force at each step, which `get_last_lr` gives."""
    for _ in range(num_steps):
        in_force = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        assert scheduler.get_last_lr() == in_force
        yield in_force
        scheduler.optimizer.step()
        scheduler.step()


def planned_sgd(*args, **options):
    """Gradient descent at planned rates."""
    return optax.chain(optax.sgd(1.0), scale_by_planned_rate(*args, **options))


def applied_on_device(optimizer, num_groups=1):
    """Return float32[S, groups]: what plain gradient descent subtracts for gradients of 1, in one compiled update."""
    optimizer = optax.with_extra_args_support(optimizer)
    ones = {str(group): jnp.ones(()) for group in range(num_groups)}
    update, state, applied = jax.jit(optimizer.update), optimizer.init(ones), []
    for size in NUM_SEQUENCES:
        updates, state = update(ones, state, ones, batch_size=jnp.float32(size))
        applied.append([-updates[name] for name in ones])
    assert update._cache_size() == 1
    return np.array(jax.device_get(applied))


@pytest.mark.parametrize(
    ("name", "rule"), [*((name, "sqrt") for name in SCHEDULES), ("sequence", "linear"), ("sequence", None)]
)
def test_tables_rates_in_force_and_applied_rates_are_the_same(name, rule):
    """To 1e-12 in float64; JAX applies exactly the float32 rounding of a planned rate."""
    schedule = SCHEDULES[name]
    of_jax = jvarlen.lr_sequence(JAX_PLANS, schedule.in_optax, 6, rule=rule)
    of_torch = torch_ref.lr_sequence(TORCH_PLANS, schedule.formula, 6, rule=rule)
    scheduler = torch_ref.VariableBatchSizeLR(schedule.in_torch(SGD(weights(BASE))), NUM_SEQUENCES, 6, rule=rule)
    in_force = [rate for (rate,) in run(scheduler, NUM_STEPS)]
    for rates in (of_jax, in_force):
        np.testing.assert_allclose(rates, of_torch, rtol=1e-12, atol=0)

    planned = applied_on_device(planned_sgd(JAX_PLANS, schedule.in_optax, 6, rule=rule))
    assert planned[:, 0].tolist() == of_jax.astype(np.float32).tolist()


@pytest.mark.parametrize("counted_in", ["sequences", "tokens"])
def test_schedules_over_samples_are_the_same(counted_in):
    """Warm-up and cosine over all samples of both epochs; torch follows the table through `LambdaLR`."""
    total = 2 * {"sequences": len(LENGTHS), "tokens": int(LENGTHS.sum())}[counted_in]
    in_optax = optax.warmup_cosine_decay_schedule(0.1 * BASE, BASE, total // 10, total, LAST)

    def formula(count):
        if count < total // 10:
            return BASE * (0.1 + 0.9 * count / (total // 10))
        return cosine_at(count - total // 10, total - total // 10)

    of_jax = jvarlen.lr_sequence(JAX_PLANS, in_optax, 6, counted_in=counted_in)
    of_torch = torch_ref.lr_sequence(TORCH_PLANS, formula, 6, counted_in=counted_in)
    np.testing.assert_allclose(of_jax, of_torch, rtol=1e-12, atol=0)
    rates = of_torch.tolist()
    follower = schedulers.LambdaLR(SGD(weights(1.0)), lambda t: [*rates, 0.0][t])
    assert [rate for (rate,) in run(follower, NUM_STEPS)] == rates
    planned = applied_on_device(planned_sgd(JAX_PLANS, in_optax, 6, counted_in=counted_in))
    assert planned[:, 0].tolist() == of_jax.astype(np.float32).tolist()


def test_groups_of_parameters_have_the_same_rates():
    """Two base rates under one scale: a planned rate a group, one scale a chain, and torch's groups."""
    rates = 0.3, 0.02
    shape = optax.cosine_decay_schedule(1.0, NUM_STEPS, alpha=0.05)
    tables = np.stack(
        [jvarlen.lr_sequence(JAX_PLANS, lambda t, rate=rate: rate * shape(t), 6, rule="sqrt") for rate in rates], axis=1
    )
    optimizer = SGD(weights(*rates))
    cosine = schedulers.LambdaLR(optimizer, lambda t: 0.05 + 0.475 * (1 + math.cos(math.pi * t / NUM_STEPS)))
    in_force = list(run(torch_ref.VariableBatchSizeLR(cosine, NUM_SEQUENCES, 6, rule="sqrt"), NUM_STEPS))
    np.testing.assert_allclose(in_force, tables, rtol=1e-12, atol=0)

    labels = {"0": "0", "1": "1"}
    planned = {
        str(i): planned_sgd(JAX_PLANS, lambda t, rate=rate: rate * shape(t), 6, rule="sqrt")
        for i, rate in enumerate(rates)
    }
    assert (applied_on_device(optax.partition(planned, labels), 2) == tables.astype(np.float32)).all()
    bases = {str(i): optax.sgd(lambda t, rate=rate: rate * shape(t)) for i, rate in enumerate(rates)}
    scaled = optax.chain(optax.partition(bases, labels), jvarlen.scale_by_batch_size(6, rule="sqrt"))
    np.testing.assert_allclose(applied_on_device(scaled, 2), tables, rtol=2e-5)  # a cosine in float32


# What the scheduler is over: also those that restart, cycle momentum or look at a metric.

WRAPPED = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=[0.5, 0.1], total_steps=40),
    "cyclic": lambda o: schedulers.CyclicLR(o, base_lr=0.1, max_lr=0.5, step_size_up=4, cycle_momentum=False),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
    "three in sequence": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.LinearLR(o, 0.1, total_iters=4),
            schedulers.ExponentialLR(o, 0.9),
            schedulers.CosineAnnealingLR(o, T_max=10),
        ],
        milestones=[4, 12],
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=6), schedulers.ExponentialLR(o, 0.9)], o
    ),
    "table": lambda o: schedulers.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 2 / (2 + t)]),
}
SIZES = [10, 4, 1, 7, 0, 16, 2]


def optimizer_of_two_groups():
    return AdamW(weights(1.0, 0.2))


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_checkpoint_read_safely_goes_on_with_the_sequence(name, optimizer_first, tmp_path):
    """From a file, into an optimizer whose state is read before or after the schedulers are made."""
    whole = torch_ref.VariableBatchSizeLR(WRAPPED[name](optimizer_of_two_groups()), SIZES, 4, repeat=True)
    list(run(whole, 13))
    torch.save({"scheduler": whole.state_dict(), "optimizer": whole.optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer = optimizer_of_two_groups()
    if optimizer_first:
        optimizer.load_state_dict(state["optimizer"])
    resumed = torch_ref.VariableBatchSizeLR(WRAPPED[name](optimizer), SIZES, 4, repeat=True)
    resumed.load_state_dict(state["scheduler"])
    assert resumed.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == whole.get_last_lr()
    if not optimizer_first:
        optimizer.load_state_dict(state["optimizer"])
    assert list(run(resumed, 15)) == list(run(whole, 15))


EPOCHS = [
    torch_ref.make_plan(np.random.default_rng(1).integers(1, 51, 156), [(12, 20), (8, 35), (4, 50)], epoch=epoch)
    for epoch in range(3)
]


@pytest.mark.parametrize(
    "given",
    [lambda: EPOCHS, lambda: iter(EPOCHS), lambda: np.concatenate([plan.num_sequences for plan in EPOCHS])],
    ids=["plans", "iterator", "array"],
)
def test_every_epoch_has_the_rates_of_its_order(given, tmp_path):
    """78 steps, of which 34 had other rates where the sizes of the first epoch repeated; also when resumed."""
    expected = torch_ref.lr_sequence(EPOCHS, 0.5, 8, rule="sqrt").tolist()
    repeated = torch_ref.lr_sequence([EPOCHS[0]] * 3, 0.5, 8, rule="sqrt").tolist()
    assert len(expected) == 78
    assert sum(one != other for one, other in zip(expected, repeated, strict=True)) == 34
    scheduler = torch_ref.VariableBatchSizeLR(SGD(weights(0.5)), given(), 8, rule="sqrt")
    assert [rate for (rate,) in run(scheduler, 40)] == expected[:40]
    resumed = torch_ref.VariableBatchSizeLR(SGD(weights(0.5)), given(), 8, rule="sqrt")
    resumed.load_state_dict(scheduler.state_dict())
    assert [rate for (rate,) in run(resumed, 38)] == expected[40:]


@pytest.mark.parametrize("sizes", [[3, 4, 5], EPOCHS[0], EPOCHS[:2]], ids=["array", "plan", "plans"])
def test_a_scheduler_can_be_pickled_copied_and_saved_whole(sizes, tmp_path):
    """With its optimizer, after steps; the batch sizes that are to come go along."""
    scheduler = torch_ref.VariableBatchSizeLR(SGD(weights(1.0)), sizes, 10)
    for _ in run(scheduler, 2):
        pass
    torch.save(scheduler, tmp_path / "scheduler.pt")
    copies = [pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)]
    copies.append(torch.load(tmp_path / "scheduler.pt", weights_only=False))
    num_left = 1 if sizes == [3, 4, 5] else EPOCHS[0].num_steps  # of two plans, into the second
    to_come = list(run(scheduler, num_left - 2 * (sizes is EPOCHS[0])))
    for each in copies:
        assert list(run(each, len(to_come))) == to_come


@pytest.mark.parametrize("sizes", [[8, 2, 4], EPOCHS[0], EPOCHS[:1]], ids=["array", "plan", "plans"])
def test_no_step_follows_the_last_batch_size(sizes):
    """Neither of the optimizer, which changes nothing, nor of the scheduler, nor in a state; unless they repeat."""
    num_steps = 3 if sizes == [8, 2, 4] else EPOCHS[0].num_steps
    last = torch.ones(1, requires_grad=True)
    scheduler = torch_ref.VariableBatchSizeLR(SGD([last], lr=1.0), sizes, 4)
    rates = list(run(scheduler, num_steps))
    assert scheduler.get_last_lr() == rates[-1]
    last.grad = torch.ones(1)
    for step in (scheduler.optimizer.step, scheduler.step):
        with pytest.raises(ValueError, match=rf"step {num_steps} has no batch size.*once a microbatch.*repeat=True"):
            step()
    assert last.item() == 1.0
    shorter = torch_ref.VariableBatchSizeLR(SGD(weights(1.0)), [8, 2], 4)
    with pytest.raises(ValueError, match="has no batch size"):
        shorter.load_state_dict(scheduler.state_dict())
    assert shorter.get_last_lr() == [2.0]
    repeating = torch_ref.VariableBatchSizeLR(SGD(weights(1.0)), sizes, 4, repeat=True)
    assert list(run(repeating, 2 * num_steps)) == 2 * rates


def test_a_plateau_scheduler_gets_its_metric():
    """Arguments of step go to the wrapped scheduler, which sees unscaled rates."""
    plateau = schedulers.ReduceLROnPlateau(SGD(weights(1.0)), factor=0.5, patience=0)
    scheduler = torch_ref.VariableBatchSizeLR(plateau, [8, 2], 4, repeat=True)
    rates = []
    for metric in (3.0, 3.0, 2.0, 2.0):
        rates += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step(metric)
    assert rates == [2.0, 0.5, 1.0, 0.25]


NEW_GROUP_RATES = {
    # Scales 2, 0.5, 1, 2; the new group comes with rate 3 when the scale is 0.5.
    "constant": (lambda o: o, [[2.0], [0.5, 1.5], [1.0, 3.0], [2.0, 6.0]]),
    "halved": (lambda o: schedulers.ExponentialLR(o, 0.5), [[2.0], [0.25, 1.5], [0.25, 1.5], [0.25, 1.5]]),
    "halved once": (lambda o: schedulers.StepLR(o, 2, 0.5), [[2.0], [0.5, 1.5], [0.5, 1.5], [1.0, 3.0]]),
}


@pytest.mark.parametrize("name", NEW_GROUP_RATES)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_rate_of_a_group_that_is_added_later_is_scaled(name, kind):
    """From its first step on, as the update itself shows, and then as the wrapped scheduler goes on with it."""
    make, expected = NEW_GROUP_RATES[name]
    old, new = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = SGD([{"params": [old], "lr": kind(1.0)}])
    scheduler = torch_ref.VariableBatchSizeLR(make(optimizer), [8, 2, 4], 4, repeat=True)
    for t, rates in enumerate(expected):
        if t == 1:
            optimizer.add_param_group({"params": [new], "lr": kind(3.0)})
        for param in (old, new):
            param.detach().zero_()
            param.grad = torch.ones(1)
        optimizer.step()
        assert [-group["params"][0].item() for group in optimizer.param_groups] == rates
        assert [float(rate) for rate in scheduler.get_last_lr()] == rates
        scheduler.step()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", ["ChainedScheduler", "SequentialLR"])
def test_a_member_of_other_schedulers_is_refused_with_the_way_out(name, inner, place):
    """When they are made, in any place, whether it wraps a scheduler or not, and before any rate changes."""
    optimizer = optimizer_of_two_groups()
    others = [schedulers.ExponentialLR(optimizer, 0.9), schedulers.ConstantLR(optimizer, 0.5)]
    over = schedulers.StepLR(optimizer, 2) if inner else optimizer
    members = [*others[:place], torch_ref.VariableBatchSizeLR(over, SIZES, 4), *others[place:]]
    before = [group["lr"] for group in optimizer.param_groups]
    makers = {
        "ChainedScheduler": lambda: schedulers.ChainedScheduler(members),
        "SequentialLR": lambda: schedulers.SequentialLR(optimizer, members, milestones=[3, 5]),
    }
    with pytest.raises(ValueError, match=rf"member of {name}.*VariableBatchSizeLR\({name}\(...\)"):
        makers[name]()
    assert [group["lr"] for group in optimizer.param_groups] == before


def test_schedulers_below_the_scale_give_rates_computed_by_hand():
    """What the refusal says to do: half the rate twice and 0.9 to the power of t, then 0.5 to the power of t - 3."""
    optimizer = SGD(weights(1.0))
    chained = schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, total_iters=2), schedulers.ExponentialLR(optimizer, 0.9)]
    )
    rates = [rate for (rate,) in run(torch_ref.VariableBatchSizeLR(chained, [8, 2, 4], 4, repeat=True), 4)]
    np.testing.assert_allclose(rates, [2 * 0.5, 0.5 * 0.45, 0.81, 2 * 0.729], rtol=1e-12)
    optimizer = SGD(weights(1.0))
    parts = [schedulers.LinearLR(optimizer, 0.25, total_iters=3), schedulers.ExponentialLR(optimizer, 0.5)]
    sequence = schedulers.SequentialLR(optimizer, parts, milestones=[3])
    rates = [rate for (rate,) in run(torch_ref.VariableBatchSizeLR(sequence, [8, 2, 4], 4, repeat=True), 5)]
    np.testing.assert_allclose(rates, [2 * 0.25, 0.5 * 0.5, 0.75, 2 * 1.0, 0.5 * 0.5], rtol=1e-12)


def test_the_last_rate_is_the_one_in_force_whoever_set_it():
    """Also after the optimizer alone was given a state, and for a tensor, of which it gives a copy."""
    scheduler = torch_ref.VariableBatchSizeLR(optimizer_of_two_groups(), SIZES, 4)
    state = scheduler.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    scheduler.optimizer.load_state_dict(state)
    assert scheduler.get_last_lr() == [7.0, 0.5]
    held = AdamW(weights(1.0)[0]["params"], lr=torch.tensor(1.0))
    scheduler = torch_ref.VariableBatchSizeLR(held, SIZES, 4)
    (given,) = scheduler.get_last_lr()
    assert isinstance(given, torch.Tensor)
    given.zero_()
    assert held.param_groups[0]["lr"] == 2.5


@pytest.mark.parametrize(
    ("sizes", "base"),
    [([], 4), ([[1, 2]], 4), (3, 4), ([1, -2], 4), ([1, 2], 0), (iter([]), 4), (iter([1, 2]), 4)],
    ids=["none", "2-D", "a number", "negative", "base 0", "iterator of none", "iterator of numbers"],
)
def test_bad_batch_sizes_are_refused_before_anything_changes(sizes, base):
    """The optimizer's rates stay."""
    optimizer = optimizer_of_two_groups()
    with pytest.raises(ValueError, match="batch"):
        torch_ref.VariableBatchSizeLR(optimizer, sizes, base)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.2]
