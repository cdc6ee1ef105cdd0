"""Training on a device: as PyTorch trains there, with command buffers and without, and in bfloat16."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
import pytest

import jvarlen
from jvarlen.loading.plan_source import PlanSource
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.hugging_face import hugging_face_tensors
from jvarlen.training.train_state import new_state

NUM_STEPS, NUM_MICROBATCHES = 24, 2
BASE_BATCH_SIZE, RATE, BETAS, EPS, WEIGHT_DECAY = 12, 3e-3, (0.9, 0.95), 1e-8, 0.1
MODEL = DecoderConfig(num_layers=1, width=32, num_heads=2)


def plan_of(package, lengths):
    buckets = package.make_buckets(lengths, 192, max_shapes=2, num_microbatches=NUM_MICROBATCHES, length_multiple=8)
    plan = package.make_plan(lengths, buckets, order="shuffle", seed=5, num_microbatches=NUM_MICROBATCHES)
    assert plan.num_steps >= NUM_STEPS
    return plan


@pytest.fixture(scope="module")
def plan(lengths):
    plan = plan_of(jvarlen, lengths)
    assert len(set(plan.step_bucket[:NUM_STEPS].tolist())) == 2
    assert any((plan.rows(step) < 0).any() for step in range(NUM_STEPS)), "no padding row"
    return plan


@pytest.fixture(scope="module")
def batches(plan, dataset):
    """Batches of the plan on the device, as `load` puts them there, which needs Grain."""
    source = PlanSource(plan, dataset, jvarlen.loading.collate_tokens)
    return [jax.device_put(source[step]) for step in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def initial():
    """Parameters on the host: steps give up the memory of those on the device."""
    return jax.device_get(init_params(MODEL, seed=0))


def train(model, initial, plan, batches, **options):
    """The loss of every step; whatever compiles after the first moment is an error."""
    schedule = optax.linear_schedule(RATE, RATE / 10, NUM_STEPS)
    optimizer = optax.chain(
        optax.adamw(schedule, *BETAS, EPS, weight_decay=WEIGHT_DECAY),
        jvarlen.scale_by_batch_size(BASE_BATCH_SIZE, rule="sqrt"),
    )
    with jax.default_matmul_precision("highest"):
        state = new_state(jax.device_put(initial), optimizer)
        step = jvarlen.compile_buckets(
            jvarlen.make_train_step(make_loss_fn(model), optimizer),
            state,
            plan,
            progress=False,
            options=jvarlen.CompileOptions(cache_dir=None, **options),
        )
    sums = []
    with jvarlen.no_recompiles():
        for batch in batches:
            state, metrics = step(state, batch)
            sums.append((metrics.loss_sum, metrics.weight_sum))
        jax.block_until_ready(state)
    assert sum(row.times_used for row in step.report) == len(batches)
    return np.divide(*np.array(jax.device_get(sums), np.float64).T)


@pytest.fixture(scope="module")
def losses(initial, plan, batches):
    return train(MODEL, initial, plan, batches)


@contextlib.contextmanager
def exact_kernels():
    """Multiplications in all of float32's bits, and attention by its definition."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_losses_are_those_of_pytorch_on_the_same_device(torch_ref, torch_device, losses, initial, lengths, dataset):
    """From the same weights, over AdamW steps in float32."""
    import torch

    plan = plan_of(torch_ref, lengths)
    config = torch_ref.DecoderConfig(width=MODEL.width, num_layers=MODEL.num_layers, num_heads=MODEL.num_heads)
    model = torch_ref.Decoder(config).to(torch_device)
    torch_ref.load_params(model, hugging_face_tensors(initial, MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPS, WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)
    scheduler = torch_ref.VariableBatchSizeLR(schedule, plan.num_sequences, BASE_BATCH_SIZE, rule="sqrt")
    expected = []
    with exact_kernels():
        for _, batch in zip(range(NUM_STEPS), torch_ref.load(plan, dataset), strict=False):
            expected.append(torch_ref.train_step(model, optimizer, torch_ref.to_device(batch, torch_device))["loss"])
            scheduler.step()
    expected = torch.stack(expected).cpu().numpy()
    assert len(expected) == NUM_STEPS
    assert expected[-1] < expected[0] - 0.5
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=0)


def test_command_buffers_change_no_loss_and_compile_nothing(initial, plan, batches, losses):
    # Two compilations may sum in another order, and so may two runs of one on a GPU.
    found = train(MODEL, initial, plan, batches, xla_options=("xla_gpu_enable_command_buffer=",))
    np.testing.assert_allclose(found, losses, rtol=1e-4, atol=0)


@pytest.mark.parametrize("attention", ["xla", "triton", "cudnn"])
def test_steps_in_bfloat16_are_finite_and_learn(initial, plan, batches, losses, attention, on_gpu):
    """Padding rows are among them."""
    if attention != "xla" and not on_gpu:
        pytest.skip("a kernel of GPUs")
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16", attention=attention)
    found = train(model, initial, plan, batches)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, losses, rtol=0.05, atol=0)
