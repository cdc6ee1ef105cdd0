"""AdamW by batch sizes: PyTorch's against PyTorch's own AdamW, and the rule written out in NumPy."""

import copy
import functools
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_ref
from jvarlen.training import adamw_by_batch_size
from torch_ref import AdamWByBatchSize
from torch_ref.training import adamw

from .inputs import text_of

BASE, RATE, DECAY = 8, 1e-2, 0.1
NUM_STEPS = 100
RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 65, NUM_STEPS)
SIZES[[0, 3, 40]] = 0, 0, 512
GRADIENTS_SxD = RNG.normal(size=(NUM_STEPS, 6)) * RNG.exponential(size=(NUM_STEPS, 1))
INITIAL_D = RNG.normal(size=6)
SETTINGS = [
    {"rule": "sqrt"},
    {"rule": "linear", "eps_rule": "sqrt", "eps": 1e-3},
    {"rule": None, "betas": (0.0, 0.95), "eps_rule": "sqrt"},
    {"rule": lambda ratio: ratio**0.25, "weight_decay": 0.0},
]


def rule_of(rule, ratio):
    """The scale, written out."""
    return {"sqrt": ratio**0.5, "linear": ratio, None: 1.0}[rule] if not callable(rule) else rule(ratio)


def adamw_in_numpy(
    sizes, *, rule="sqrt", betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY, eps_rule=None, rate=RATE, first=0
):
    """Parameters after every step: the rule as it is stated, in extended precision; `rate` may be one a step."""
    parameter, mean, square = INITIAL_D.astype(np.longdouble), np.longdouble(0), np.longdouble(0)
    betas, total, after = [np.longdouble(beta) for beta in betas], np.longdouble(0), []
    rates = np.broadcast_to(rate, len(sizes))
    for size, rate, gradient in zip(sizes, rates, GRADIENTS_SxD[first:], strict=False):
        ratio = np.longdouble(size) / BASE
        kept = [beta**ratio for beta in betas]
        mean = kept[0] * mean + (1 - kept[0]) * gradient
        square = kept[1] * square + (1 - kept[1]) * gradient**2
        total += ratio
        corrections = [1 - beta**total if total else 1 for beta in betas]
        scaled_eps = eps if eps_rule is None else (eps / np.sqrt(ratio) if ratio else np.inf)
        towards = mean / corrections[0] / (np.sqrt(square / corrections[1]) + scaled_eps)
        parameter = parameter - rate * rule_of(rule, ratio) * (towards + weight_decay * parameter)
        after.append(parameter.astype(np.float64))
    return np.array(after)


def make_parameter():
    return nn.Parameter(torch.from_numpy(INITIAL_D.copy()))


def make_optimizer(parameters, **options):
    return AdamWByBatchSize(parameters, **({"lr": RATE, "base_batch_size": BASE, "weight_decay": DECAY} | options))


def set_batch_size(optimizer, size):
    for group in optimizer.param_groups:
        group["batch_size"] = size


def take_steps(optimizer, parameter, steps, sizes=None):
    """The parameter after each step; `sizes` are set in the groups."""
    after = []
    for step in steps:
        parameter.grad = torch.from_numpy(GRADIENTS_SxD[step].copy())
        if sizes is not None:
            set_batch_size(optimizer, sizes[step])
        optimizer.step()
        after.append(parameter.detach().numpy().copy())
    return np.array(after)


@pytest.mark.parametrize("options", SETTINGS, ids=text_of)
def test_the_rule_is_followed_at_every_step(options):
    """Batches of 0 to 64 times the base, and tiny ones, set by the loop or told before: to 1e-12 of NumPy."""
    for sizes in (SIZES, SIZES * 1e-5):
        expected = adamw_in_numpy(sizes, **options)
        assert np.isfinite(expected).all()
        for batch_sizes in (None, sizes):
            parameter = make_parameter()
            optimizer = make_optimizer([parameter], batch_sizes=batch_sizes, **options)
            after = take_steps(optimizer, parameter, range(NUM_STEPS), sizes if batch_sizes is None else None)
            np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("options", SETTINGS, ids=text_of)
def test_jax_takes_the_same_steps(options, planned):
    """With traced and with planned batch sizes, in float64, to 1e-12."""
    parameter = make_parameter()
    expected = take_steps(make_optimizer([parameter], **options), parameter, range(NUM_STEPS), SIZES)
    options = {"weight_decay": DECAY, "plan": SIZES if planned else None} | options
    b1, b2 = options.pop("betas", (0.9, 0.999))
    with jax.enable_x64(True):
        optimizer = adamw_by_batch_size(RATE, BASE, b1=b1, b2=b2, **options)

        @jax.jit
        def step(params, state, gradient, size):
            updates, state = optimizer.update(gradient, state, params, batch_size=size)
            return optax.apply_updates(params, updates), state

        params, after = jnp.asarray(INITIAL_D), []
        state = optimizer.init(params)
        for gradient, size in zip(GRADIENTS_SxD, SIZES, strict=True):
            params, state = step(params, state, gradient, np.float64(size))
            after.append(params)
    np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("together", [False, True])
def test_batches_of_the_base_size_give_adamw(monkeypatch, together):
    """To 1e-12 of PyTorch's, for two groups of a rate and decay each, with a parameter that gets gradients late.

    One parameter at a time, as on a CPU, and those of a group together, as elsewhere.
    """
    if together:
        monkeypatch.setattr(adamw, "_updated_together", lambda parameters: [parameters])
    options = [{"lr": 2e-2, "betas": (0.8, 0.99)}, {"weight_decay": 0.5, "eps": 1e-4}]
    ours, theirs = ([make_parameter() for _ in range(3)] for _ in range(2))
    groups = [[{"params": of[:2], **options[0]}, {"params": of[2:], **options[1]}] for of in (ours, theirs)]
    optimizer = make_optimizer(groups[0])
    reference = torch.optim.AdamW(groups[1], RATE, weight_decay=DECAY)
    for step in range(NUM_STEPS):
        for parameters in (ours, theirs):
            for index, parameter in enumerate(parameters):
                scaled = torch.from_numpy(GRADIENTS_SxD[step] * (index + 1))
                parameter.grad = None if index == 1 and step < 5 else scaled
        set_batch_size(optimizer, BASE)
        optimizer.step()
        reference.step()
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_batch_of_twice_the_size_counts_as_two_for_both_moments():
    """With equal gradients, at rate 0."""
    moments = []
    for sizes in ([BASE] * 6, [2 * BASE] * 3, [3 * BASE, BASE, 2 * BASE]):
        parameter = make_parameter()
        optimizer = make_optimizer([parameter], lr=0.0)
        for size in sizes:
            parameter.grad = torch.from_numpy(GRADIENTS_SxD[0].copy())
            set_batch_size(optimizer, size)
            optimizer.step()
        assert parameter.detach().numpy().tolist() == INITIAL_D.tolist()
        moments.append([optimizer.state[parameter][name].numpy() for name in ("exp_avg", "exp_avg_sq")])
    np.testing.assert_allclose(moments[1], moments[0], rtol=1e-12)
    np.testing.assert_allclose(moments[2], moments[0], rtol=1e-12)


@pytest.mark.parametrize(("rule", "eps"), [("sqrt", 0.0), (None, 1e-8)])
def test_a_first_batch_of_0_changes_nothing(rule, eps):
    parameter = make_parameter()
    optimizer = make_optimizer([parameter], rule=rule, eps=eps, weight_decay=0.0)
    take_steps(optimizer, parameter, [0], SIZES)
    assert parameter.detach().numpy().tolist() == INITIAL_D.tolist()


def test_a_resumed_run_goes_on_exactly():
    """From a checkpoint that safe loading reads, with the batch sizes that are left, and with a tensor as the rate."""
    for rate in (RATE, torch.tensor(RATE, dtype=torch.float64)):
        whole, first = make_parameter(), make_parameter()
        make = functools.partial(make_optimizer, lr=rate, batch_sizes=SIZES)
        expected = take_steps(make([whole]), whole, range(NUM_STEPS))
        take_steps(optimizer := make([first]), first, range(30))
        torch.save({"weight": first.detach(), "optimizer": optimizer.state_dict()}, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed = nn.Parameter(saved["weight"])
        optimizer = make([resumed])
        optimizer.load_state_dict(saved["optimizer"])
        assert take_steps(optimizer, resumed, range(30, NUM_STEPS)).tolist() == expected[30:].tolist()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies_go_on_from_the_same_place(duplicate):
    parameter = make_parameter()
    optimizer = make_optimizer([parameter], batch_sizes=SIZES, rule="linear", eps_rule="sqrt")
    take_steps(optimizer, parameter, range(30))
    other = duplicate(optimizer)
    ((copied,),) = [group["params"] for group in other.param_groups]
    assert copied is not parameter
    expected = take_steps(optimizer, parameter, range(30, 60))
    assert take_steps(other, copied, range(30, 60)).tolist() == expected.tolist()


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
@pytest.mark.parametrize("given", [lambda plans: plans, iter, lambda plans: (plan for plan in plans)])
def test_plans_of_all_epochs_tell_the_batch_sizes(unit, given):
    """Samples or tokens of their steps; the step after the last is refused, and changes nothing."""
    lengths, buckets = [3, 5, 9, 2, 8, 8, 1], [(3, 5), (2, 9)]
    plans = [torch_ref.make_plan(lengths, buckets, order="shuffle", epoch=epoch) for epoch in range(2)]
    sizes = np.concatenate([getattr(plan, f"num_{unit}") for plan in plans])
    assert len(set(sizes.tolist())) > 1
    parameter = make_parameter()
    optimizer = make_optimizer([parameter], batch_sizes=given(plans), unit=unit)
    after = take_steps(optimizer, parameter, range(len(sizes)))
    np.testing.assert_allclose(after, adamw_in_numpy(sizes), rtol=1e-12, atol=1e-12)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"step {len(sizes)} has no batch size, there are {len(sizes)}: give the"):
        take_steps(optimizer, parameter, [len(sizes)])
    assert str(optimizer.state_dict()) == str(state)
    assert parameter.detach().numpy().tolist() == after[-1].tolist()


def test_a_plan_of_another_size_does_not_tell_tokens():
    plan = torch_ref.make_plan([[3, 4], [5, 2]], max_tokens=30, size="product", max_shapes=1)
    with pytest.raises(ValueError, match=r"count tokens.*plan\.num_tokens"):
        make_optimizer([make_parameter()], batch_sizes=plan, unit="tokens")


def test_a_step_uses_up_the_batch_size_that_is_set():
    """One that is not set again, or not in all groups, is refused; a scheduler's copy of a group has nothing stale."""
    first, second = make_parameter(), make_parameter()
    optimizer = make_optimizer([{"params": [first]}, {"params": [second]}])
    take_steps(optimizer, first, [0], [torch.tensor(16)])
    with pytest.raises(
        ValueError, match=r"step 1 has no batch size in parameter groups \[0, 1\]: before each step, set"
    ):
        optimizer.step()
    optimizer.param_groups[0]["batch_size"] = 16
    with pytest.raises(ValueError, match=r"in parameter groups \[1\]"):
        optimizer.step()


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), "8", True])
def test_bad_batch_sizes_of_a_step_are_refused(size):
    parameter = make_parameter()
    optimizer = make_optimizer([parameter])
    with pytest.raises(ValueError, match="batch_size must be a finite number at least 0"):
        take_steps(optimizer, parameter, [0], [size])
    assert parameter.detach().numpy().tolist() == INITIAL_D.tolist()


def test_a_batch_that_is_not_the_planned_one_is_refused():
    parameter = make_parameter()
    optimizer = make_optimizer([parameter], batch_sizes=[8, 4, 2])
    take_steps(optimizer, parameter, [0], [8])
    with pytest.raises(ValueError, match=r"step 1 has a batch of 2 sequences, batch_sizes say 4.*load_state_dict"):
        take_steps(optimizer, parameter, [1], [8, 2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"base_batch_size": 0}, "base_batch_size"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers below 1, got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas must be two"),
        ({"betas": (-0.1, 0.9)}, "beta must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"rule": "cubic"}, "rule must be.*cubic"),
        ({"unit": "bytes"}, "unit must be.*bytes"),
        ({"eps_rule": "linear"}, "eps_rule must be.*linear"),
        ({"batch_sizes": [1, -2]}, "batch sizes.*id 1: -2"),
        ({"batch_sizes": []}, "batch_sizes are empty"),
        ({"batch_sizes": [[1, 2]]}, "plan must be"),
        ({"batch_sizes": np.ones((2, 2))}, "batch_sizes must be plans or numbers"),
        ({"batch_sizes": iter([])}, "batch_sizes are empty"),
        ({"rule": lambda ratio: ratio - 2, "batch_sizes": [32, 8]}, "scales that the rule gives.*-1"),
    ],
    ids=text_of,
)
def test_bad_arguments_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        make_optimizer([make_parameter()], **options)


def test_settings_of_a_group_are_checked_and_a_new_group_joins_in():
    """Its moments begin with its own first step, as if it were alone."""
    parameter, added = make_parameter(), make_parameter()
    optimizer = make_optimizer([parameter], batch_sizes=SIZES)
    take_steps(optimizer, parameter, range(30))
    for wrong in ({"betas": (0.9, 2.0)}, {"unit": "tokens"}, {"lr": "0.1"}):
        with pytest.raises(ValueError, match=r"betas must be|all groups count sequences|lr must be"):
            optimizer.add_param_group({"params": [added], **wrong})
    optimizer.add_param_group({"params": [added]})
    parameter.grad = None
    after = take_steps(optimizer, added, range(30, 60))
    np.testing.assert_allclose(after, adamw_in_numpy(SIZES[30:60], first=30), rtol=1e-12, atol=1e-12)


def test_states_of_other_optimizers_and_units_are_refused():
    """Their places and counts would be taken for others."""
    by_tokens, adamw = make_optimizer([make_parameter()], unit="tokens"), torch.optim.AdamW([make_parameter()])
    for other in (by_tokens, adamw):
        with pytest.raises(ValueError, match=r"state must be of AdamWByBatchSize\(unit='sequences'\)"):
            make_optimizer([make_parameter()]).load_state_dict(other.state_dict())


def test_sparse_and_complex_gradients_are_refused():
    complex_one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = make_optimizer([complex_one, table.weight])
    complex_one.grad = torch.zeros_like(complex_one)
    table(torch.tensor([1])).sum().backward()
    set_batch_size(optimizer, 8)
    with pytest.raises(ValueError, match=r"dense and real.*\[\(2,\), \(5, 2\)\]"):
        optimizer.step()


def test_schedulers_of_torch_go_on_top_and_ours_refuses():
    """Which would scale a second time."""
    parameter = make_parameter()
    optimizer = make_optimizer([parameter], batch_sizes=SIZES)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="would a second time: leave out VariableBatchSizeLR"):
        torch_ref.VariableBatchSizeLR(scheduler, SIZES, BASE)
    after = []
    for step in range(3):
        after.extend(take_steps(optimizer, parameter, [step]))
        scheduler.step()
    expected = adamw_in_numpy(SIZES[:3], rate=RATE * 0.5 ** np.arange(3))
    np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)
    assert optimizer.param_groups[0]["lr"] == RATE / 8


def test_a_closure_gives_the_loss_and_may_set_the_batch_size():
    parameter = make_parameter()
    optimizer = make_optimizer([parameter])

    def closure():
        optimizer.zero_grad()
        loss = (parameter * torch.from_numpy(GRADIENTS_SxD[0])).sum()
        loss.backward()
        set_batch_size(optimizer, 20)
        return loss

    assert optimizer.step(closure).item() == pytest.approx(INITIAL_D @ GRADIENTS_SxD[0])
    np.testing.assert_allclose(parameter.detach(), adamw_in_numpy([20])[0], rtol=1e-12)


def test_a_step_whose_gradients_overflow_uses_its_batch_up():
    """By a `GradScaler`, which scales the others back; moments and parameters are those of the other steps alone."""
    parameter, scaler = make_parameter(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = make_optimizer([parameter], batch_sizes=SIZES)
    overflows = {1, 4}
    for step in range(8):
        scale = float(scaler.scale(torch.ones(1)))
        scaled = GRADIENTS_SxD[step] * (np.inf if step in overflows else scale)
        parameter.grad = torch.from_numpy(scaled)
        if step == 5:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    alone = make_parameter()
    expected = take_steps(make_optimizer([alone]), alone, [step for step in range(8) if step not in overflows], SIZES)
    np.testing.assert_allclose(parameter.detach(), expected[-1], rtol=1e-12)
    assert optimizer.param_groups[0]["num_steps"] == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_have_the_dtype_of_their_parameter(dtype):
    """Mixed with others in one group."""
    small, wide = nn.Parameter(torch.ones(3, dtype=dtype)), make_parameter()
    optimizer = make_optimizer([small, wide])
    small.grad = torch.ones_like(small)
    after = take_steps(optimizer, wide, range(3), [16, 2, 8])
    np.testing.assert_allclose(after, adamw_in_numpy([16, 2, 8]), rtol=1e-12, atol=1e-12)
    assert {value.dtype for value in optimizer.state[small].values() if isinstance(value, torch.Tensor)} == {dtype}
    assert small.isfinite().all()


def mean_of_values(model, microbatch):
    """A loss whose gradient is the mean of the samples' values."""
    values = microbatch.tokens if isinstance(microbatch, torch_ref.Batch) else microbatch["values"]
    weights = microbatch.weights if isinstance(microbatch, torch_ref.Batch) else microbatch["weights"]
    return (model.weight * values.double().sum(-1, keepdim=True)).sum(), weights.sum()


@pytest.mark.parametrize("planned", [False, True])
def test_the_train_step_tells_samples_and_tokens_of_the_step(planned):
    """Those of the whole step; tokens where the batch counts them, else the plan must."""
    samples = [np.arange(length) for length in (3, 5, 9, 2, 8, 8, 1)]
    plan = torch_ref.make_plan(list(map(len, samples)), [(3, 5), (2, 9)], order="length", num_microbatches=2)
    batches, weights = list(torch_ref.load(plan, samples)), []
    fields = {"values": torch.ones(1, 2, 3), "weights": torch.ones(1, 2), "num_sequences": 2, "num_tokens": 6}
    for unit in ("sequences", "tokens"):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = make_optimizer(model.parameters(), unit=unit, batch_sizes=plan if planned else None)
        if unit == "tokens" and not planned:
            torch_ref.train_step(model, optimizer, fields, loss_fn=mean_of_values)
            assert optimizer.state[model.weight]["num_base_batches"] == 6 / BASE
            with pytest.raises(ValueError, match="step 1 has no batch size"):
                torch_ref.train_step(model, optimizer, batches[0], loss_fn=mean_of_values)
            continue
        for batch in batches:
            torch_ref.train_step(model, optimizer, batch, loss_fn=mean_of_values)
        total = (plan.num_sequences if unit == "sequences" else plan.num_tokens).sum() / BASE
        assert optimizer.state[model.weight]["num_base_batches"] == pytest.approx(total, rel=1e-15)
        weights.append(model.weight.item())
    assert len(set(weights)) == len(weights)
