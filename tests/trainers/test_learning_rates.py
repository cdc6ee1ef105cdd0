"""`VariableBatchSizeLR` in the trainers of others: each step of the optimizer has the rate of its own batch."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import torch_ref

SIZES = [10, 4, 1, 7, 3, 16, 2]
EXPECTED = [0.5 * 0.9**t * size / 4 for t, size in enumerate(SIZES)]


class Recorded(SGD):
    """Keeps the rate of every step it takes."""

    def step(self, closure=None):
        super().step(closure)
        self.rates = [*getattr(self, "rates", []), self.param_groups[0]["lr"]]


def recorded():
    return Recorded([torch.ones(1, requires_grad=True)], lr=0.5)


def scaled(over, **options):
    return torch_ref.VariableBatchSizeLR(over, SIZES, 4, **options)


@pytest.fixture
def accelerator():
    """Makes an `Accelerator` whose scheduler believes that there are several processes."""
    accelerate = pytest.importorskip("accelerate")

    def reset():
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()

    def make(num_processes=2, **options):
        reset()
        made = accelerate.Accelerator(cpu=True, **options)
        accelerate.PartialState._shared_state["num_processes"] = num_processes
        assert accelerate.state.AcceleratorState().num_processes == num_processes
        return made

    yield make
    reset()


def take_steps(accelerator, optimizer, scheduler, num_steps, microbatches=1):
    """The loop of accelerate's own pages; `step()` and `zero_grad()` come after every microbatch."""
    (param,) = optimizer.param_groups[0]["params"]
    for _ in range(num_steps * microbatches):
        with accelerator.accumulate(torch.nn.Identity()):
            accelerator.backward(param.sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


GIVEN = {
    "a scheduler of the optimizer": lambda plain, prepare: prepare(plain, scaled(ExponentialLR(plain, 0.9))),
    "a scheduler of the prepared optimizer": lambda plain, prepare: (
        (prepared := prepare(plain)),
        prepare(scaled(ExponentialLR(prepared, 0.9))),
    ),
    "a prepared scheduler": lambda plain, prepare: (
        (prepared := prepare(plain, ExponentialLR(plain, 0.9)))[0],
        prepare(scaled(prepared[1])),
    ),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [(1, {}), (2, {}), (3, {"gradient_accumulation_steps": 2}), (2, {"step_scheduler_with_optimizer": False})],
)
def test_accelerate_advances_once_a_step_of_the_optimizer(accelerator, given, num_processes, options):
    """However often its wrapper calls `step()`; one step more is refused, unless the sizes repeat."""
    made = accelerator(num_processes, **options)
    plain = recorded()
    optimizer, scheduler = GIVEN[given](plain, made.prepare)
    microbatches = options.get("gradient_accumulation_steps", 1)
    take_steps(made, optimizer, scheduler, len(SIZES), microbatches)
    assert plain.rates == pytest.approx(EXPECTED, rel=1e-12)
    with pytest.raises(ValueError, match="step 7 has no batch size"):
        take_steps(made, optimizer, scheduler, 1, microbatches)
    assert len(plain.rates) == len(SIZES)


@pytest.mark.parametrize("num_steps_before", [2, 5])
def test_accelerate_resumes_with_the_rates_that_are_left(accelerator, num_steps_before, tmp_path):
    """By its own checkpoints, saved after a step or between the steps of the optimizer and of the scheduler."""
    made = accelerator()
    optimizer, scheduler = made.prepare(plain := recorded(), scaled(ExponentialLR(plain, 0.9)))
    take_steps(made, optimizer, scheduler, num_steps_before)
    optimizer.step()
    made.save_state(tmp_path / "between")
    scheduler.step()
    made.save_state(tmp_path / "after")
    for name in ("between", "after"):
        made = accelerator()
        optimizer, scheduler = made.prepare(plain := recorded(), scaled(ExponentialLR(plain, 0.9)))
        made.load_state(tmp_path / name)
        if name == "between":
            scheduler.step()
        take_steps(made, optimizer, scheduler, len(SIZES) - num_steps_before - 1)
        assert plain.rates == pytest.approx(EXPECTED[num_steps_before + 1 :], rel=1e-12)


@pytest.mark.filterwarnings("ignore:Seems like")  # of torch, about the optimizer of any copy
def test_copies_follow_the_optimizer_of_their_own(accelerator):
    made = accelerator()
    optimizer, scheduler = made.prepare(*copy.deepcopy([plain := recorded(), scaled(ExponentialLR(plain, 0.9))]))
    take_steps(made, optimizer, scheduler, len(SIZES))
    assert optimizer.optimizer.rates == pytest.approx(EXPECTED, rel=1e-12)


# In float16 a GradScaler leaves out steps whose gradients overflow.


def scaled_steps(param, overflows, take):
    """Takes a step for each size; those of `overflows` have a gradient that is not finite."""
    for t in range(len(SIZES)):
        param.grad = torch.full_like(param, float("inf") if t in overflows else 1.0)
        take()


def test_a_step_that_a_grad_scaler_leaves_out_uses_its_batch_up():
    """With `grad_scaler=True`; without, the first such step is refused, because it looks like a step too many."""
    optimizer, scaler = recorded(), torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = scaled(optimizer, grad_scaler=True)

    def take():
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    scaled_steps(optimizer.param_groups[0]["params"][0], {1, 4}, take)
    assert optimizer.rates == [0.5 * size / 4 for t, size in enumerate(SIZES) if t not in {1, 4}]
    optimizer, scaler = recorded(), torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = scaled(optimizer)
    with pytest.raises(ValueError, match=r"before the optimizer has taken step 1:.*grad_scaler=True"):
        scaled_steps(optimizer.param_groups[0]["params"][0], {1, 4}, take)


@pytest.mark.parametrize("repeat", [False, True])
def test_a_second_step_of_the_scheduler_is_refused(repeat):
    """Before any step of the optimizer, and after one; neither moves the rate."""
    scheduler = scaled(ExponentialLR(recorded(), 0.9), repeat=repeat)
    for t in range(2):
        with pytest.raises(ValueError, match=rf"before the optimizer has taken step {t}: call it once after each"):
            scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(EXPECTED[t])]
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("fused", [True, False])
def test_accelerate_counts_steps_in_float16_or_refuses(accelerator, fused):
    """A fused optimizer is called for every step; with others, accelerate tells nobody of those it leaves out."""
    made = accelerator()
    param = torch.ones(1, requires_grad=True)
    plain, scaler = AdamW([param], lr=0.5, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = scaled(plain)
    made.scaler = scaler
    optimizer, scheduler = made.prepare(plain, scheduler)
    rates = []

    def take():
        scaler.scale(torch.ones(1))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    if fused:
        scaled_steps(param, {1, 4}, take)
        assert rates == [0.5 * size / 4 for size in SIZES]
    else:
        with pytest.raises(ValueError, match=r"AdamW.*fused=True.*bf16"):
            scaled_steps(param, {0}, take)
        assert param.item() == 1.0


# Lightning


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return {"x": torch.ones(1)}


def lightning_module():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch, _):
            return (self.weight * batch["x"]).sum()

        def configure_optimizers(self):
            self.plain = Recorded(self.parameters(), lr=0.5)
            scheduler = scaled(ExponentialLR(self.plain, 0.9))
            return {"optimizer": self.plain, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_steps_resumes_and_ends(tmp_path):
    """Two microbatches a step, an epoch of seven of them: stopped after one epoch, resumed for the second."""
    lightning = pytest.importorskip("lightning.pytorch")

    def train(max_steps, ckpt_path=None):
        module = lightning_module()
        trainer = lightning.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            accumulate_grad_batches=2,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Samples(), batch_size=1), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
        return module.plain.rates

    assert train(len(SIZES)) == pytest.approx(EXPECTED, rel=1e-12)
    assert train(4) == pytest.approx(EXPECTED[:4], rel=1e-12)
    assert train(len(SIZES), tmp_path / "saved.ckpt") == pytest.approx(EXPECTED[4:], rel=1e-12)
    with pytest.raises(ValueError, match="step 7 has no batch size"):
        train(len(SIZES) + 1)


def test_a_step_without_the_scheduler_is_refused():
    """As in Lightning with its default, a step of the scheduler an epoch; also where a checkpoint comes between."""
    scheduler = scaled(recorded())
    scheduler.optimizer.step()
    resumed = scaled(recorded())
    resumed.load_state_dict(scheduler.state_dict())
    for each in (scheduler, resumed):
        with pytest.raises(ValueError, match=r'taken step 0, and the scheduler was not.*"interval": "step"'):
            each.optimizer.step()
        each.step()
        each.optimizer.step()
        assert each.optimizer.rates[-1] == 0.5


def test_the_optimizer_in_the_wrapper_of_lightning_is_followed():
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    plain = recorded()
    scheduler = scaled(optimizers.LightningOptimizer(plain))
    assert scheduler.optimizer is plain
    with pytest.raises(ValueError, match="an optimizer or a scheduler of torch, got list"):
        scaled([plain])


# transformers' Trainer


@pytest.mark.slow
def test_trainer_logs_the_rates_in_force_resumes_and_ends(tmp_path):
    """Two microbatches a step; the log has the rate of each step, and checkpoints go on with those that are left."""
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return {"loss": (self.weight * x).sum()}

    def train(max_steps, resume=None):
        model = Model()
        plain = Recorded(model.parameters(), lr=0.5)
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_steps=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        optimizers = plain, scaled(ExponentialLR(plain, 0.9))
        trainer = transformers.Trainer(model, options, train_dataset=Samples(), optimizers=optimizers)
        trainer.train(resume_from_checkpoint=resume)
        return plain.rates, [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]

    rates, logged = train(len(SIZES))
    assert rates == logged == pytest.approx(EXPECTED, rel=1e-12)
    rates, _ = train(len(SIZES), str(tmp_path / "checkpoint-4"))
    assert rates == pytest.approx(EXPECTED[4:], rel=1e-12)
    with pytest.raises(ValueError, match="step 7 has no batch size"):
        train(len(SIZES) + 1)
