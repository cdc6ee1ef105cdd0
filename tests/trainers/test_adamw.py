"""`AdamWByBatchSize` in the trainers of others: each step of the optimizer has the moments of its own batch."""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as portable
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import torch_ref

from .test_learning_rates import SIZES, accelerator  # noqa: F401

NUM_STEPS = len(SIZES)


class Model(nn.Module):
    """Its gradient is the sample, whatever the weight is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return {"loss": (self.weight * x).sum()}


class Samples(torch.utils.data.Dataset):
    """Two microbatches of a step are equal."""

    def __len__(self):
        return 2 * NUM_STEPS

    def __getitem__(self, index):
        return {"x": torch.tensor([1.0, -0.5], dtype=torch.float64) * (1 + index // 2)}


def optimizer_of(model, batch_sizes=SIZES):
    optimizer = torch_ref.AdamWByBatchSize(model.parameters(), 0.1, 4, batch_sizes=batch_sizes)
    return optimizer, ExponentialLR(optimizer, 0.9)


def take_steps(model, optimizer, scheduler, steps):
    """A loop of one's own."""
    for step in steps:
        model.weight.grad = Samples()[2 * step]["x"]
        optimizer.step()
        scheduler.step()
    return model.weight.detach().numpy()


@pytest.fixture(scope="module")
def expected():
    """The weight after as many steps."""
    weights = []
    for num_steps in range(NUM_STEPS + 1):
        model = Model()
        weights.append(take_steps(model, *optimizer_of(model), range(num_steps)).tolist())
    return weights


def assert_weights(model, expected):
    assert model.weight.detach().numpy().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("by_loop", [False, True])
def test_accelerate_takes_planned_steps_and_resumes(accelerator, expected, tmp_path, by_loop):  # noqa: F811
    """By its own checkpoints; sizes are planned, or set in the groups of its wrapper."""

    def make():
        made, model = accelerator(1, gradient_accumulation_steps=2), Model()
        return made, model, *made.prepare(*optimizer_of(model, None if by_loop else SIZES))

    def train(made, model, optimizer, scheduler, indices):
        for index in indices:
            with made.accumulate(nn.Identity()):
                made.backward(model(**Samples()[index])["loss"])
                if by_loop and made.sync_gradients:
                    for group in optimizer.param_groups:
                        group["batch_size"] = SIZES[index // 2]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    made, model, optimizer, scheduler = make()
    train(made, model, optimizer, scheduler, range(8))
    assert_weights(model, expected[4])
    made.save_state(tmp_path)
    weight = model.weight.detach()
    made, model, optimizer, scheduler = make()
    made.load_state(tmp_path)
    with torch.no_grad():
        model.weight.copy_(weight)
    train(made, model, optimizer, scheduler, range(8, 2 * NUM_STEPS))
    assert_weights(model, expected[-1])
    with pytest.raises(ValueError, match=f"step {NUM_STEPS} has no batch size"):
        optimizer.step()


@pytest.mark.slow
def test_trainer_takes_planned_steps_resumes_and_ends(expected, tmp_path):
    """Two microbatches a step, from a checkpoint of its own."""
    transformers = pytest.importorskip("transformers")

    def train(max_steps, resume=None):
        model = Model()
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_grad_norm=0,
            save_steps=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, options, train_dataset=Samples(), optimizers=optimizer_of(model))
        trainer.get_train_dataloader = lambda: DataLoader(Samples(), batch_size=1)
        trainer.train(resume_from_checkpoint=resume)
        return model

    assert_weights(train(NUM_STEPS), expected[-1])
    assert_weights(train(NUM_STEPS, str(tmp_path / "checkpoint-4")), expected[-1])
    with pytest.raises(ValueError, match=f"step {NUM_STEPS} has no batch size"):
        train(NUM_STEPS + 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_planned_steps_and_resumes(expected, tmp_path):
    """Which calls `step` with a closure."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(batch["x"])["loss"]

        def configure_optimizers(self):
            optimizer, scheduler = optimizer_of(self.model)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train(max_steps, ckpt_path=None):
        module = Module()
        trainer = lightning.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            accumulate_grad_batches=2,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)],
        )
        samples = Samples() if ckpt_path is None else torch.utils.data.Subset(Samples(), range(8, 2 * NUM_STEPS))
        trainer.fit(module, DataLoader(samples, batch_size=1), ckpt_path=ckpt_path)
        return module.model

    assert_weights(train(NUM_STEPS), expected[-1])
    assert_weights(train(NUM_STEPS, tmp_path / "step=4.ckpt"), expected[-1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("batch_sizes", [SIZES, None])
def test_checkpoints_of_torch_distributed_prepare_states_without_a_step(expected, tmp_path, steps_before, batch_sizes):
    """They take one with gradients of 0 where there is no state yet: the place stays, before and after loading."""

    def with_sizes(optimizer, steps):
        for step in steps:
            if batch_sizes is None:
                optimizer.param_groups[0]["batch_size"] = SIZES[step]
            yield step

    model = Model()
    optimizer, scheduler = optimizer_of(model, batch_sizes)
    take_steps(model, optimizer, scheduler, with_sizes(optimizer, range(steps_before)))
    states = {"optimizer": portable.get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(states, checkpoint_id=tmp_path)
    assert optimizer.param_groups[0]["num_steps"] == steps_before
    weight = model.weight.detach().clone()

    model = Model()
    optimizer, scheduler = optimizer_of(model, batch_sizes)
    states = {"optimizer": portable.get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(states, checkpoint_id=tmp_path)
    portable.set_optimizer_state_dict(model, optimizer, states["optimizer"])
    with torch.no_grad():
        model.weight.copy_(weight)
    for _ in range(steps_before):
        scheduler.last_epoch += 1
    take_steps(model, optimizer, scheduler, with_sizes(optimizer, range(steps_before, NUM_STEPS)))
    assert_weights(model, expected[-1])
