"""A whole training in JAX and in PyTorch, from the same weights on the same plan: the same losses and weights."""

import itertools
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler as schedulers

import jvarlen
import torch_ref
from jvarlen.batches import BatchShapes
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.training.optimizers import scale_by_planned_rate
from jvarlen.training.train_state import new_state
from torch_ref.training.train import to_device

from .twin import make_torch_model

pytestmark = pytest.mark.slow


def counting_dataset(num_samples, longest):
    """Bytes that count up from anywhere by ones, twos or threes: much can be learned in few steps."""
    rng = np.random.default_rng(0)
    lengths, starts = rng.integers(1, longest + 1, num_samples), rng.integers(0, 95, num_samples)
    strides = rng.integers(1, 4, num_samples)
    counts = zip(starts, strides, lengths, strict=True)
    return TokenDataset.from_bytes(
        [(32 + (start + stride * np.arange(n)) % 95).astype(np.uint8).tobytes() for start, stride, n in counts]
    )


DATASET = counting_dataset(407, 48)
LENGTHS = np.diff(DATASET.offsets)
PEAK_RATE, FIRST_RATE, LAST_RATE, NUM_WARMUP_STEPS = 3e-3, 3e-4, 3e-5, 10
BASE_BATCH_SIZE, WEIGHT_DECAY, BETAS, EPS = 12, 0.1, (0.9, 0.95), 1e-8
PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU for torch")]
    ),
]


MODEL = DecoderConfig(num_layers=1, width=32, num_heads=2)


class Setting(NamedTuple):
    """What is trained, the same in both packages, over as many epochs as the steps take.

    `dtype` is that of parameters, activations and optimizer state, `packed` says whether rows hold several samples, and
    `max_norm` is the global norm to which gradients are clipped.
    """

    num_steps: int
    dtype: str = "float32"
    packed: bool = False
    max_norm: float | None = None
    device: str = "cpu"


class Trained(NamedTuple):
    """A loss a step, and a model of PyTorch that holds the final weights."""

    losses: np.ndarray
    model: torch_ref.Decoder


def make_plan(package, setting, epoch):
    """The plan of an epoch, in shuffled order, with some padding rows."""
    options = {"seed": 5, "epoch": epoch, "num_microbatches": 4}
    if setting.packed:
        return package.make_plan(LENGTHS, [(6, 32), (4, 48)], packing="best_fit", **options)
    buckets = package.make_buckets(LENGTHS, 192, max_shapes=2, num_microbatches=4)
    return package.make_plan(LENGTHS, buckets, **options)


def make_plans(package, setting):
    """The plans of as many epochs as the steps take."""
    plans = []
    while sum(plan.num_steps for plan in plans) < setting.num_steps:
        plans.append(make_plan(package, setting, len(plans)))
    return plans


def jax_optimizer(setting, plans):
    """AdamW, whose rate is scaled on the device, or, where float32 would not do for that, comes from a table."""
    schedule = optax.warmup_cosine_decay_schedule(
        FIRST_RATE, PEAK_RATE, NUM_WARMUP_STEPS, setting.num_steps, end_value=LAST_RATE
    )
    scale = [jvarlen.scale_by_batch_size(BASE_BATCH_SIZE, rule="sqrt")]
    if setting.dtype == "float64":
        schedule, scale = 1.0, [scale_by_planned_rate(plans, schedule, BASE_BATCH_SIZE, rule="sqrt")]
    clip = [] if setting.max_norm is None else [optax.clip_by_global_norm(setting.max_norm)]
    adamw = optax.adamw(schedule, *BETAS, EPS, weight_decay=WEIGHT_DECAY)
    return optax.chain(*clip, adamw, *scale)


def train_in_jax(setting, plans, initial):
    """Train with every bucket compiled ahead of time."""
    mesh = Mesh(np.array(jax.devices(PLATFORMS[setting.device])[:1]), ("data",))
    with jax.enable_x64(setting.dtype == "float64"), jax.default_matmul_precision("highest"):
        optimizer = jax_optimizer(setting, plans)
        state = new_state(jax.tree.map(lambda leaf: leaf.astype(setting.dtype), initial), optimizer)
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        step = jvarlen.compile_buckets(
            jvarlen.make_train_step(make_loss_fn(MODEL), optimizer, layout=mesh),
            state,
            BatchShapes.of_plan(plans[0], layout=mesh),
            progress=False,
        )
        batches = jvarlen.load(plans.__getitem__, DATASET, num_epochs=len(plans), layout=mesh)
        losses = []
        for batch in itertools.islice(batches, setting.num_steps):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
    return Trained(losses=np.array(jax.device_get(losses)), model=model_of(setting, state.params))


def model_of(setting, params):
    """A model of PyTorch with weights of JAX."""
    return make_torch_model(MODEL, params, getattr(torch, setting.dtype)).to(setting.device)


@contextmanager
def exact_kernels():
    """Multiplications in all of float32's bits, and attention by its definition, on any device."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def train_in_torch(setting, plans, initial):
    """Train; the norms of the gradients come back as well where they are clipped."""
    model = model_of(setting, initial)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, BETAS, EPS, WEIGHT_DECAY)
    norms = []
    if setting.max_norm is not None:

        def clip(*_):
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)))

        optimizer.register_step_pre_hook(clip)
    warmup = schedulers.LinearLR(optimizer, FIRST_RATE / PEAK_RATE, total_iters=NUM_WARMUP_STEPS)
    cosine = schedulers.CosineAnnealingLR(optimizer, setting.num_steps - NUM_WARMUP_STEPS, LAST_RATE)
    schedule = schedulers.SequentialLR(optimizer, [warmup, cosine], [NUM_WARMUP_STEPS])
    scheduler = torch_ref.VariableBatchSizeLR(schedule, plans, BASE_BATCH_SIZE, rule="sqrt")
    batches = itertools.chain.from_iterable(torch_ref.load(plan, DATASET) for plan in plans)
    losses = []
    with exact_kernels():
        for batch in itertools.islice(batches, setting.num_steps):
            metrics = torch_ref.train_step(model, optimizer, to_device(batch, setting.device))
            losses.append(metrics["loss"])
            scheduler.step()
    return Trained(losses=torch.stack(losses).cpu().numpy(), model=model), norms


def train_in_both(setting):
    """Train in JAX and in PyTorch, in several buckets and with some padding row."""
    plans, torch_plans = make_plans(jvarlen, setting), make_plans(torch_ref, setting)
    assert [plan.digest for plan in plans] == [plan.digest for plan in torch_plans]
    assert set(plans[0].step_bucket.tolist()) == set(range(len(plans[0].buckets.shapes)))
    assert len(plans[0].buckets.shapes) > 1
    assert any(has_padding_row(plans[0].rows(step)) for step in range(plans[0].num_steps))
    initial = init_params(MODEL, seed=0)
    # First, because the steps of JAX give up the memory of the initial weights.
    expected, norms = train_in_torch(setting, torch_plans, initial)
    found = train_in_jax(setting, plans, initial)
    assert found.losses.shape == expected.losses.shape == (setting.num_steps,)
    assert found.losses.dtype == expected.losses.dtype == setting.dtype
    return found, expected, norms


def has_padding_row(rows):
    """Whether a step of [M, B] samples, or of [M, B, P] samples of packed rows, has a row without any."""
    return bool((rows < 0).all(axis=tuple(range(2, rows.ndim))).any())


def assert_same(found, expected, *, loss_rtol, weight_tolerance):
    """Losses at every step, and all final weights, absolutely or relatively."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=loss_rtol, atol=0)
    assert found.losses[-1] < found.losses[0] - 0.5
    references = dict(expected.model.named_parameters())
    for name, weight in found.model.named_parameters():
        np.testing.assert_allclose(
            weight.detach().cpu(), references[name].detach().cpu(), weight_tolerance, weight_tolerance, err_msg=name
        )


def test_they_differ_by_rounding_alone():
    """In float64 next to nothing is left."""
    found, expected, _ = train_in_both(Setting(num_steps=30, dtype="float64"))
    assert_same(found, expected, loss_rtol=1e-12, weight_tolerance=1e-11)


def test_packed_rows_with_clipped_gradients_agree():
    """Where some gradients are longer than the limit, and some are not."""
    setting = Setting(num_steps=20, packed=True, max_norm=0.6)
    found, expected, norms = train_in_both(setting)
    assert min(norms) < 0.6 < max(norms)
    assert_same(found, expected, loss_rtol=1e-4, weight_tolerance=1e-3)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("device", DEVICES)
def test_a_hundred_steps_agree(device):
    """In float32, over several epochs in buckets that alternate, with warm-up and cosine."""
    found, expected, _ = train_in_both(Setting(num_steps=100, device=device))
    assert_same(found, expected, loss_rtol=1e-4, weight_tolerance=1e-3)
