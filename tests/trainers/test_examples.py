"""The examples for trainers, in one process and in two, against a plain loop of PyTorch."""

import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import processes

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
PACKAGES = {"torch_accelerate": "accelerate", "torch_lightning": "lightning"}

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def plain_loop(example):
    """The reports of a loop over the plans' steps: each sample alone, unpadded, then one division."""
    torch.manual_seed(0)
    reviews, model = example["make_reviews"](), example["Classifier"]()
    plans = example["plan_epochs"](reviews)
    optimizer, scheduler = example["make_optimizer"](model, plans)
    reports = []
    for plan in plans:
        for step in range(plan.num_steps):
            samples = [reviews[i] for group in plan.groups(step) for i in plan.rows(group).ravel().tolist() if i >= 0]
            losses = []
            for sample in samples:
                tokens, label = sample["tokens"], torch.tensor([sample["label"]])
                logits = model(tokens[None], torch.tensor([len(tokens)]))
                losses.append(torch.nn.functional.cross_entropy(logits, label))
            loss = torch.stack(losses).sum() / len(samples)
            optimizer.zero_grad()
            loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            reports.append([loss.item(), sum(len(sample["tokens"]) for sample in samples), rate])
    return reports, len(reviews), len(plans)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_sample_once_an_epoch_with_the_numbers_of_a_plain_loop(name, tmp_path):
    """Losses to 1e-6, tokens and rates exactly; the second epoch has another order, that of its plan."""
    pytest.importorskip(PACKAGES[name])
    source = EXAMPLES / f"{name}.py"
    assert sum("torch_ref" in line for line in source.read_text().split('"""', 2)[2].splitlines()) <= 8
    expected, num_samples, num_epochs = plain_loop(runpy.run_path(str(source)))
    losses, tokens, rates = np.transpose(expected)
    middle = len(losses) // 2
    assert np.abs(losses[:middle] - losses[middle:]).max() > 1e-3
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        processes.run(HERE / "run_example.py", num_processes, str(source), str(folder), seconds=240)
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
        for each in said:
            np.testing.assert_allclose([report[0] for report in each["reports"]], losses, rtol=0, atol=1e-6)
            assert [report[1] for report in each["reports"]] == tokens.tolist()
            assert [report[2] for report in each["reports"]] == rates.tolist()
        trained = Counter(i for each in said for i in each["ids"])
        assert trained == dict.fromkeys(range(num_samples), num_epochs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lightning_resumes_within_an_epoch(tmp_path, num_workers):
    """From checkpoints within each epoch and at the end of one; a worker reads ahead before the epoch is set."""
    lightning = pytest.importorskip("lightning")
    example = runpy.run_path(str(EXAMPLES / "torch_lightning.py"))

    class Training(example["Training"]):
        def train_dataloader(self):
            loader = super().train_dataloader()
            options = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
            return type(loader)(
                loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, **options
            )

    def train(every=None, checkpoint=None):
        torch.manual_seed(0)
        reviews = example["make_reviews"]()
        training = Training(reviews, example["plan_epochs"](reviews))
        save = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=every, save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=4,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[save],
        )
        trainer.fit(training, ckpt_path=checkpoint, weights_only=False)
        return training.reports

    whole = train(every=1)
    for step in (5, len(whole) // 2, len(whole) // 2 + 3):
        assert train(checkpoint=tmp_path / f"step={step}.ckpt") == whole[step:]
