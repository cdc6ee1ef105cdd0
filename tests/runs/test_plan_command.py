"""`jvarlen plan` makes the plan by which `jvarlen train` with the same settings trains."""

import json
import sys

import numpy as np
import pytest

from jvarlen import Plan, UserError
from jvarlen.cli import main
from jvarlen.data.tokens import TokenDataset
from jvarlen.planning.cost_model import CostModel

TINY = ["--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1", "--no-progress"]
RNG = np.random.default_rng(0)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files with some samples that are longer than 1,024 bytes, and one of 50,000."""
    monkeypatch.chdir(tmp_path)
    lengths = RNG.lognormal(5, 1.2, 400).astype(int).clip(1, 9_000)
    lengths[7] = 50_000
    texts = [bytes(RNG.integers(97, 123, length, np.uint8)).decode() for length in lengths]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "q": text[:9]}) + "\n" for text in texts))
    (tmp_path / "bad.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "{\n" * 2)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in texts[:90]))
    RNG.integers(0, 3_000, 40_000, np.uint16).tofile(tmp_path / "t.bin")
    CostModel(1e-4, 1e-6, 1e-9).save(tmp_path / "cost.json")
    monkeypatch.setattr("jvarlen.runs.data.stdlib_functions", lambda progress: TokenDataset.from_bytes(SAMPLES))


SAMPLES = [bytes(RNG.integers(97, 123, length, np.uint8)) for length in RNG.integers(1, 3_000, 200)]


def digest_of(printed):
    (digest,) = [line.removeprefix("digest ") for line in printed.splitlines() if line.startswith("digest ")]
    return digest


@pytest.mark.parametrize(
    "options",
    [
        "",
        "a.jsonl --field text",
        "a.jsonl --field q text --template {q}:{text} --loss-on text --max-tokens 700 --order length --seed 3",
        "a.jsonl b.jsonl --weights 1 3 --held-out-fraction 0.1 --overlong drop --num-microbatches 2",
        "[ab].jsonl --packing best_fit --overlong split --max-shapes 3",
        "a.jsonl --packing wrapped",
        "bad.jsonl --on-bad-sample skip",
        "t.bin --decoder.vocab-size 3001 --max-length 256",
        "a.jsonl --packing padded --parallel data2",
        "a.jsonl --packing padded --sequences-per-step 32 --num-microbatches 2",
        "a.jsonl --sequences-per-step 0:8,30%:32 --num-epochs 2",
        "a.jsonl --tokens-per-step 3000 --optimizer.schedule seesaw --optimizer.batch-size-unit tokens --num-epochs 2",
        "a.jsonl --packing padded --max-shapes auto --cost-model cost.json --compile-seconds 0.05 --num-epochs 40",
    ],
)
def test_the_plan_is_that_of_training(options, files, capsys, monkeypatch):
    class Reached(UserError):
        pass

    def stop(prepared, trackers, held):
        nonlocal planned
        planned = prepared.training_plan.plan_of_epoch(0)
        raise Reached("planned")

    planned = None
    monkeypatch.setattr(sys.modules["jvarlen.runs.fit"], "open_run", stop)
    assert main(["plan", *options.split(), "--no-progress"]) == 0
    printed = capsys.readouterr().out
    data = ["--data"] * bool(options)
    assert main(["train", *data, *options.split(), *TINY]) == 2
    assert isinstance(planned, Plan)
    assert digest_of(printed) == planned.digest
    of_training = capsys.readouterr().out
    for said in ("tokens and are", "evaluated on", "not samples are left out"):
        lines = [line for line in printed.splitlines() if said in line]
        assert lines == [line for line in of_training.splitlines() if said in line]
    assert ("tokens and are" in printed) == (planned.num_truncated + planned.num_dropped > 0)
    assert ("2 records that are not samples are left out" in printed) == ("bad" in options)


def test_long_documents_are_split_by_default_or_the_first_line_says_what_is_lost(files, tmp_path, capsys):
    assert main(["plan", "a.jsonl", "--no-progress", "--out", "plan.npz"]) == 0
    plan, printed = Plan.load(tmp_path / "plan.npz"), capsys.readouterr().out
    assert (plan.overlong, plan.num_truncated + plan.num_dropped) == ("split", 0)
    assert "tokens and are" not in printed
    assert main(["plan", "a.jsonl", "--no-progress", "--packing", "padded"]) == 0
    said, *_ = capsys.readouterr().out.split("held_out\n\n")[1].splitlines()
    assert "longer than 1,024 tokens and are cut to that" in said
    assert main(["plan", "a.jsonl", *said[said.index("--packing") : said.index(" trains on")].split()]) == 0
    assert f"digest {plan.digest}" in capsys.readouterr().out


def test_of_a_small_file_one_sample_is_held_out(tmp_path, capsys):
    path = tmp_path / "small.txt"
    path.write_text("".join(f"{'word ' * n}\n" for n in range(1, 6)))
    assert main(["plan", str(path), "--max-tokens", "64"]) == 0
    assert "4 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("longest", "options", "rows"),
    [
        (560, "--max-tokens 1024", "1 ×  1,024"),
        (560, "", "3 ×  1,360"),
        (1_539, "--max-tokens 16384", "5 ×  3,272"),
        (1_539, "--max-tokens 16384 --max-length 4096", "4 ×  4,096"),
        (1_539, "", "4 ×  1,024"),  # which is where samples are cut
    ],
)
def test_packed_rows_hold_several_of_the_longest_samples(longest, options, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": "a" * (length - 1)}) + "\n" for length in range(40, longest + 1)]
    (tmp_path / "chats.jsonl").write_text("".join(lines * 3))
    options = ["--packing", "best_fit", "--no-progress", *options.split()]
    assert main(["plan", "chats.jsonl", *options]) == 0
    printed = capsys.readouterr().out
    assert f" {rows} " in printed
    assert "recur in epoch 1" in printed
