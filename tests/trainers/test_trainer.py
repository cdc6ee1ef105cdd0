"""The Trainer of transformers on planned batches, in one process and in two, against a plain loop of PyTorch."""

import json
import runpy
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torch_ref
from tests.support import processes

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "torch_trainer.py"


def summed_loss(model, text):
    """The loss of a text alone, unpadded, summed over its targets."""
    logits = model(input_ids=text["input_ids"][None]).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], text["labels"][1:], reduction="sum")


def plain_loop(example):
    """The reports of a loop over the plans' steps, and the samples of each."""
    torch.manual_seed(0)
    texts, model = example["make_texts"](), example["make_model"]()
    plans = example["plan_epochs"](texts)
    optimizer, scheduler = example["make_optimizer"](model, plans)
    reports, ids, tokens = [], [], 0
    for plan in plans:
        for step in range(plan.num_steps):
            ids.append(plan.sample_ids[slice(*plan.step_offsets[step : step + 2])].tolist())
            samples = [texts[i] for i in ids[-1]]
            tokens += sum(len(text["input_ids"]) for text in samples)
            losses = torch.stack([summed_loss(model, text) for text in samples])
            loss = losses.sum() / sum(len(text["labels"]) - 1 for text in samples)
            optimizer.zero_grad()
            loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            reports.append([loss.item(), tokens, rate])
    return reports, ids


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainer_has_the_numbers_of_a_plain_loop_and_resumes_within_an_epoch(tmp_path):
    """Losses to 1e-6, tokens and rates exactly; each sample once an epoch, in another order in the second."""
    pytest.importorskip("transformers")
    assert sum("torch_ref" in line for line in EXAMPLE.read_text().split('"""', 2)[2].splitlines()) <= 8
    expected, ids = plain_loop(runpy.run_path(str(EXAMPLE)))
    losses, tokens, rates = np.transpose(expected)
    middle = len(ids) // 2
    assert sorted(chain(*ids[:middle])) == sorted(chain(*ids[middle:])) == [*range(150)]
    assert ids[:middle] != ids[middle:]
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        processes.run(HERE / "run_trainer.py", num_processes, str(EXAMPLE), str(folder), seconds=400)
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
        for each in said:
            for reports in (each["reports"], each["resumed"]):
                np.testing.assert_allclose([report[0] for report in reports], losses, rtol=0, atol=1e-6)
                assert [report[1] for report in reports] == tokens.tolist()
                assert [report[2] for report in reports] == rates.tolist()
        trained = Counter(i for each in said for i in each["ids"])
        assert trained == dict.fromkeys(range(150), 2)
        assert sorted(i for each in said for i in each["ids_resumed"]) == sorted(chain(*ids[13:]))


@pytest.mark.slow
def test_trainer_has_the_numbers_of_a_plain_loop_with_moments_by_samples(tmp_path):
    """Those of the plans of both epochs, whose last steps are smaller: losses, tokens and rates before scaling."""
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLE))

    def make_optimizer(model, plans):
        optimizer = torch_ref.AdamWByBatchSize(model.parameters(), 1e-2, 10, batch_sizes=plans)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    example["make_optimizer"] = example["make_trainer"].__globals__["make_optimizer"] = make_optimizer
    expected, _ = plain_loop(example)
    trainer = example["make_trainer"](str(tmp_path), save_strategy="no")
    trainer.train()
    np.testing.assert_allclose(example["reports_of"](trainer), expected, rtol=0, atol=1e-6)
    assert expected[-1][0] < expected[0][0] - 0.5


def test_packed_rows_have_the_losses_of_their_samples_alone_in_a_causal_model():
    """Positions that restart keep samples apart; the first label of each is no target."""
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLE))
    texts, model = example["make_texts"]()[:20], example["make_model"]()
    lengths = [len(text["input_ids"]) for text in texts]
    plan = torch_ref.make_plan(lengths, [(2, 64)], packing="best_fit", num_microbatches=2)
    sampler = torch_ref.PlanBatchSampler(plan)
    planned = torch_ref.PlannedDataset(sampler, texts)
    collate = torch_ref.pad_to_bucket(default_collate, plan, pad={"labels": -100}, also=["ids"])
    for batch in DataLoader(planned, batch_sampler=sampler, collate_fn=collate):
        held = batch.pop("ids")
        expected = sum(summed_loss(model, texts[i]) for i in held[held >= 0].tolist())
        loss = model(**batch, num_items_in_batch=1, use_cache=False).loss
        torch.testing.assert_close(loss, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5)
