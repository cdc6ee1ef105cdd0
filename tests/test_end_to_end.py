"""The parts of the end-to-end benchmark: ways differ in their batches, and in nothing else."""

import dataclasses
import itertools
import json

import numpy as np
import optax
import pytest

from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.hugging_face import hugging_face_tensors
from tests.support.benchmark_modules import imported

torch = pytest.importorskip("torch")
functional = torch.nn.functional

MODEL = {"num_layers": 1, "width": 16, "num_heads": 2}


runs = imported("support.end_to_end_run")
in_jax = imported("support.end_to_end_jax")
in_torch = imported("support.end_to_end_torch")
tables = imported("support.end_to_end_tables")
benchmark = imported("end_to_end")


@pytest.fixture
def data(runs):
    rng = np.random.default_rng(0)
    # Sample i begins with the two digits of i, so that a batch shows which samples it holds.
    train = [
        np.r_[divmod(i, 200), rng.integers(200, 256, n)].astype(np.uint8) for i, n in enumerate([30] + [3, 9, 14] * 30)
    ]
    return runs.Data(train, [rng.integers(0, 256, n, np.uint8) for n in (1, 4, 5, 16, 17, 31, 32, 32)])


@pytest.fixture
def settings(runs, data, tmp_path):
    runs.save_data(tmp_path / "data.npz", data)
    return runs.Settings(
        way="",
        seed=0,
        data=str(tmp_path / "data.npz"),
        weights=str(tmp_path / "weights.npz"),
        model=MODEL,
        longest=32,
        max_tokens=64,
        length_multiple=4,
        learning_rate=0.01,
        horizon=1_000,
        eval_every=100,
        target=1.0,
        limit_s=60.0,
    )


def ids_of(tokens_BxT, lengths_B):
    return [int(row[0]) * 200 + int(row[1]) for row, length in zip(tokens_BxT, lengths_B, strict=True) if length]


def test_the_rate_rises_along_a_line_and_decays_along_a_cosine(settings):
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.05 * 0.01, peak_value=0.01, warmup_steps=100, decay_steps=1_000, end_value=0.05 * 0.01
    )
    counts = np.array([0, 1, 50, 99, 100, 101, 550, 999, 1_000, 5_000])
    np.testing.assert_allclose(settings.schedule(counts), [float(schedule(count)) for count in counts], rtol=1e-5)


def test_an_evaluation_holds_every_sample_once_within_the_budget(runs, data):
    batches = runs.eval_batches(data.held_out, 32)
    held = [
        tokens[row, :length].tolist() for tokens, lengths in batches for row, length in enumerate(lengths) if length
    ]
    assert sorted(held) == sorted(sample.tolist() for sample in data.held_out)
    assert {tokens.shape for tokens, _ in batches} == {(16, 8), (4, 32)}


@pytest.mark.parametrize("name", ["pad_to_longest", "pad_to_powers_of_two"])
def test_a_plain_loop_sees_every_sample_once_an_epoch(in_jax, settings, data, name):
    batches = list(getattr(in_jax, name)(settings, data.train))
    seen = [i for batch in batches for i in ids_of(batch.arrays.tokens, batch.arrays.lengths)]
    assert sorted(seen) == list(range(len(data.train)))
    assert sum(batch.num_tokens for batch in batches) == sum(map(len, data.train))
    assert all(batch.arrays.tokens.shape == batch.shape for batch in batches)
    shapes = {"pad_to_longest": {(2, 32)}, "pad_to_powers_of_two": {(2, 32), (4, 16), (8, 8)}}
    assert {batch.shape for batch in batches} == shapes[name]


def test_packed_rows_hold_whole_samples(in_jax, settings, data):
    batches = list(in_jax.pack_by_grain(settings, data.train))
    seen = []
    for batch in batches:
        arrays = batch.arrays
        assert arrays.tokens.shape == batch.shape == (2, 32)
        assert batch.num_tokens == arrays.weights.sum()
        for tokens, segment_ids, positions in zip(arrays.tokens, arrays.segment_ids, arrays.positions, strict=True):
            for segment in range(1, segment_ids.max() + 1):
                sample = tokens[segment_ids == segment]
                (i,) = ids_of([sample], [len(sample)])
                assert sample.tolist() == data.train[i].tolist()
                assert positions[segment_ids == segment].tolist() == list(range(len(sample)))
                seen.append(i)
        assert arrays.num_sequences == arrays.segment_ids.max(axis=1).sum()
    assert len(seen) == len(set(seen)) > 0.9 * len(data.train)  # all but what is left over for a last batch


def test_packed_batches_of_pytorch_hold_every_sample_whole_without_padding(in_torch, settings, data):
    (batches,) = in_torch.whole_samples(settings, list(map(len, data.train))).values()
    assert sorted(itertools.chain(*batches)) == list(range(len(data.train)))
    samples = [torch.from_numpy(sample.astype(np.int64)) for sample in data.train]
    for ids in batches:
        (inputs, labels, positions, lengths), shape, num_tokens = in_torch.join_samples([samples[i] for i in ids])
        assert num_tokens == sum(len(data.train[i]) for i in ids) <= settings.max_tokens
        assert shape == inputs.shape == (1, num_tokens)
        assert torch.equal(torch.cat([samples[i] for i in ids]), labels)
        for sample, begun, places in zip(
            (samples[i] for i in ids), inputs[0].split(lengths), positions.split(lengths), strict=True
        ):
            assert begun.tolist() == [256, *sample[:-1].tolist()]
            assert places.tolist() == list(range(len(sample)))


@pytest.mark.slow
def test_all_ways_take_the_same_steps(runs, in_jax, in_torch, settings, data, monkeypatch):
    """Two batches, the same for all: the planned step, the plain one, and PyTorch's come to the same model."""
    for module in (in_jax, in_torch):
        monkeypatch.setattr(module, "MAX_GRADIENT_NORM", 0.1)  # below that of the gradients
    config = DecoderConfig(**MODEL)
    np.savez(settings.weights, **hugging_face_tensors(init_params(config, seed=3), config))
    sample = data.train[0][:16]
    data = runs.Data([sample] * 4, [sample[:length] for length in (1, 4, 5, 16)])
    # Steps without padding, so that the plan's rate is that of the others.
    changed = {"longest": 16, "max_tokens": 32}
    same = dataclasses.replace(settings, learning_rate=0.05, horizon=64, **changed)
    ways = {
        "padded": in_jax.PlannedRun(same, data, runs.Stopwatch(), packing="padded", num_shapes=1),
        "packed": in_jax.PlannedRun(same, data, runs.Stopwatch(), packing="best_fit"),
        "packed, rows split": in_jax.PlannedRun(
            dataclasses.replace(same, num_devices=2), data, runs.Stopwatch(), packing="best_fit"
        ),
        "plain": in_jax.PlainRun(same, data, runs.Stopwatch(), in_jax.pad_to_longest),
        "torch": in_torch.train_on_token_batches(same, data, runs.Stopwatch()),
        "torch packed": in_torch.train_packed(same, data, runs.Stopwatch()),
    }
    trained = []
    for name, way in ways.items():
        before = way.evaluate()
        batches = list(way.batches)
        shape = (1, 32) if name == "torch packed" else (2, 16)
        assert [(batch.shape, batch.num_tokens) for batch in batches] == [(shape, 32)] * 2
        for step, batch in enumerate(batches):
            way.wait(way.step(batch, 32 * step))
        trained.append((way.num_params, before, way.evaluate()))
    assert len({num_params for num_params, _, _ in trained}) == 1
    np.testing.assert_allclose([figures[1:] for figures in trained], [trained[0][1:]] * len(ways), rtol=2e-5)
    assert abs(trained[0][1] - trained[0][2]) > 0.1

    alone = [torch.from_numpy(sample.astype(np.int64)) for sample in data.held_out]
    with torch.no_grad():
        sums = [
            functional.cross_entropy(ways["torch"].model(begun[None, :-1])[0], begun[1:], reduction="sum")
            for begun in (functional.pad(sample, (1, 0), value=256) for sample in alone)
        ]
    assert trained[0][2] == pytest.approx(sum(sums).item() / sum(map(len, alone)) / np.log(2), rel=1e-5)


def point(bits, seconds, tokens):
    parts = {"planning": 1.0, "compile": 2.0, "data": 0.5, "steps": seconds - 3.5}
    counts = {"num_tokens": tokens, "num_positions": 2 * tokens, "num_steps": tokens // 10}
    return {"bits_per_byte": bits, "seconds": parts, "num_shapes": 3, "num_compiled": 4} | counts


def test_seconds_to_the_target_lie_between_two_evaluations(tables):
    points = [point(8.0, 3.0, 0), point(5.0, 13.0, 1_000), point(3.0, 23.0, 2_000)]
    found = tables.reached({"points": points}, 3.5)
    assert (found.is_target, found.total_s, found.num_tokens, found.padding) == (True, 20.5, 1_750, 0.5)
    assert found.tokens_per_s == 1_750 / 17.5  # without 2 s of compiling and 1 s of planning
    missed = tables.reached({"points": points}, 2.5)
    assert (missed.is_target, missed.bits_per_byte, missed.total_s) == (False, 3.0, 23.0)


def test_ratios_are_over_the_best_way_that_reached_the_target(runs, tables):
    def run(*seconds, tokens=1_000, bits=3.0):
        return [{"points": [point(8.0, 3.5, 0), point(bits, s, tokens)]} for s in seconds]

    of_ways = {
        "jvarlen": run(12.0, 20.0, 8.0, tokens=1_100),
        "jvarlen_cached": run(9.0),
        "powers": run(50.0, 30.0),
        "grain": run(5.0, 6.0, bits=4.0),  # never there
        "token_batches": run(10.0, 10.0, tokens=1_000),
        "packed": run(12.0, 14.0, tokens=500),
    }
    steady = [runs.Turns(1024, {"packed": [10.0, 12.0], "padded": [15.0, 15.0], "torch packed": [10.0, 10.0]})]
    rows = [row[1:] for row in tables.goal_rows(of_ways, 3.0, steady)]
    assert rows == [
        ["Flax and Optax, powers of two", "0.30", "≤ 0.6"],
        ["PyTorch, token batches", "1.20", "≤ 1.2"],
        ["PyTorch, token batches", "0.90", "≤ 1.0"],
        ["PyTorch, packed, attention sample by sample", "1.10 (1.00–1.20)", "≤ 1.0"],
        ["PyTorch, packed, attention sample by sample", "1.50 (1.50–1.50)", "≤ 1.1"],
        ["PyTorch, token batches", "1.10 (1.10–1.10)", "≤ 1.1"],
    ]
    nothing = tables.goal_rows({"jvarlen": of_ways["jvarlen"]}, 3.0, [])
    assert [row[1:3] for row in nothing] == [["–", "–"]] * 4


def test_the_model_is_that_of_make_train(benchmark):
    assert DecoderConfig(**benchmark.FULL["model"]) == DecoderConfig()


def test_what_was_chosen_for_every_way_took_the_fewest_seconds(benchmark, tables):
    tuned = json.loads(benchmark.TUNED.read_text())
    assert tuned["ways"].keys() <= {benchmark.tuned_as(way) for way in tables.WAYS}
    for name, way in tuned["ways"].items():
        seconds = {
            (pilot["max_tokens"], pilot["learning_rate"]): pilot["seconds"]
            for pilot in way["pilots"]
            if pilot["seconds"] is not None
        }
        assert seconds or name == "longest", "only rows of the longest take longer than a pilot lasts"
        if seconds:
            assert (way["max_tokens"], way["learning_rate"]) == min(seconds, key=seconds.__getitem__), name
