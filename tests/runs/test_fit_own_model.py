"""`fit` with a user's loss, parameters and batches: all that a run has, and the same numbers after a resume."""

import collections
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import CompileOptions, FitConfig, Mixture, Plan, fit, make_plan, scale_by_batch_size
from jvarlen.data import WeightedTokens
from jvarlen.data.split import HELD_OUT, Split
from jvarlen.loading import collate_tokens
from jvarlen.parallel import StepLoss
from jvarlen.reports.run_page import read_runs
from jvarlen.reports.run_records import read_metrics, read_run
from jvarlen.runs.plan_config import PlanConfig
from jvarlen.runs.saved_config import load_config
from jvarlen.training.checkpoint import open_checkpoints
from tests.support.settings import changed

pytestmark = pytest.mark.slow

NUM_STEPS = 12


def make_samples(num_samples, seed):
    """Pairs of features [T, 3] and a label."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(length, 3)).astype(np.float32), length % 2) for length in rng.integers(1, 17, num_samples)
    ]


DATA = Split(train=make_samples(60, 0), held_out=make_samples(10, 1))


def collate(step):
    shape_MxB = step.ids.shape
    x = np.zeros((*shape_MxB, step.bucket.length, 3))  # float64, which devices hold as float32
    labels, is_real = np.zeros(shape_MxB, np.int64), np.zeros(shape_MxB, bool)
    for m, microbatch in enumerate(step.samples):
        for b, (features, label) in enumerate(microbatch):
            x[m, b, : len(features)], labels[m, b], is_real[m, b] = features, label, True
    return {"x": x, "labels": labels, "is_real": is_real, "num_sequences": step.num_sequences}


def sums_of(params, scale, microbatch):
    logits_B = jnp.sum(microbatch["x"] @ params["w"], axis=1) * scale + params["b"]
    losses_B = optax.sigmoid_binary_cross_entropy(logits_B, microbatch["labels"])
    correct_B = ((logits_B > 0) == microbatch["labels"]) & microbatch["is_real"]
    return jnp.sum(losses_B * microbatch["is_real"]), jnp.sum(microbatch["is_real"]), {"accuracy": jnp.sum(correct_B)}


def loss_fn(params, microbatch, key, extra):
    keep = jax.random.bernoulli(key, 0.9, microbatch["x"].shape)
    microbatch = microbatch | {"x": microbatch["x"] * keep}
    spread = extra["spread"] * 0.9 + 0.1 * jnp.mean(microbatch["x"] ** 2)
    return *sums_of(params, 1.0, microbatch), {"spread": spread, "calls": extra["calls"] + 1}


def eval_loss_fn(params, microbatch, extra):
    return *sums_of(params, 0.9, microbatch), extra


def own(**changes):
    return {
        "loss_fn": loss_fn,
        "eval_loss_fn": eval_loss_fn,
        "params": {"w": jnp.full(3, 0.1), "b": jnp.zeros(())},
        "extra": {"spread": jnp.ones(()), "calls": jnp.int32(0)},
        "optimizer": optax.chain(optax.adamw(1e-2), scale_by_batch_size(8)),
        "collate": collate,
        "length_fn": lambda sample: len(sample[0]),
    } | changes


def make_config(folder, **changes):
    return changed(
        FitConfig(),
        max_steps=NUM_STEPS,
        num_epochs=20,
        checkpoint_every=4,
        eval_every=5,
        run_dir=folder / "run",
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=64, max_shapes=2, max_length=16, num_microbatches=4),
        **changes,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(make_config(tmp_path_factory.mktemp("whole")), DATA, **own())


def steps_of(run_dir):
    of_time = {"time_s", "step_s", "data_wait_s", "stall_s", "host_memory_bytes", "device_memory_bytes"}
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]
    return [{name: value for name, value in row.items() if name not in of_time} for row in rows]


def named(samples):
    return [{"x": features, "labels": label, "name": "text"} for features, label in samples]


@pytest.mark.parametrize("options", [{"length_fn": "x"}, {}], ids=["by name", "as fields say"])
def test_a_run_on_named_fields_is_the_run_on_what_a_collate_makes_of_them(whole, tmp_path, options):
    fields = {"x": ("length", 0.0), "labels": "row"}
    config = make_config(tmp_path)
    data = Split(train=named(DATA.train), held_out=named(DATA.held_out))
    run = fit(config, data, **own(collate=None, fields=fields, length_fn=None) | options)
    names = ("step", "loss", "accuracy")
    expected, found = ([[row[name] for name in names] for row in steps_of(each.run_dir)] for each in (whole, run))
    assert found == expected
    assert run.summary.held_out_after == whole.summary.held_out_after


def test_fields_are_packed_and_their_mistakes_named_before_a_run_begins(tmp_path):
    def packed_loss(params, microbatch):
        x_BxTxD, segments, weights = microbatch["x"], microbatch["segment_ids"], microbatch["weights"]
        labels_BxT = jnp.take_along_axis(microbatch["labels"], jnp.maximum(segments, 1) - 1, axis=1)
        logits_BxT = x_BxTxD @ params["w"] + params["b"]
        return jnp.sum(optax.sigmoid_binary_cross_entropy(logits_BxT, labels_BxT) * weights), jnp.sum(weights)

    settings = {"loss_fn": packed_loss, "params": own()["params"], "fields": {"x": "length", "labels": "row"}}
    data = Split(train=named(DATA.train), held_out=named(DATA.held_out))
    config = make_config(tmp_path)
    config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, packing="best_fit"), max_steps=4)
    assert fit(config, data, **settings).summary.num_steps == 4
    with pytest.raises(ValueError, match="axes of the field 'labels' must be one of 'row', 'length'"):
        fit(make_config(tmp_path / "other"), data, **settings | {"fields": {"x": "length", "labels": "rows"}})
    with pytest.raises(ValueError, match="give them without collate="):
        fit(make_config(tmp_path / "other"), data, **settings, collate=collate)


def test_loss_weights_of_a_mixture_count_where_fields_are_named(tmp_path):
    """And the held-out samples, which are of no mixture, have weight 1."""

    def mean_weight(params, microbatch):
        is_real = jnp.arange(microbatch["x"].shape[1]) < microbatch["lengths"][:, None]
        return jnp.sum(microbatch["weights"]) + 0 * params, jnp.sum(is_real)

    halves = [
        named([(features[:4], label) for features, label in DATA.train if len(features) >= 4][:n]) for n in (8, 8)
    ]
    data = Split(train=Mixture(halves, [1, 1], loss_weights=[1.0, 0.5]), held_out=halves[0])
    config = make_config(tmp_path)
    config = dataclasses.replace(config, max_steps=1, plan=dataclasses.replace(config.plan, max_tokens=64))
    settings = own(collate=None, length_fn=None, extra=None, eval_loss_fn=None, params=jnp.zeros(()))
    run = fit(config, data, **settings | {"loss_fn": mean_weight, "fields": {"x": "length", "labels": "row"}})
    (step,) = steps_of(run.run_dir)
    assert (step["num_sequences"], step["loss"], run.summary.held_out_after) == (16, 0.75, 1.0)


def test_a_run_of_a_model_of_ones_own_has_all_that_a_run_has(whole, capsys):
    assert {"checkpoints", "config.json", "metrics.jsonl", "plan.npz", "summary.json", "curves.png"} <= {
        path.name for path in whole.run_dir.iterdir()
    }
    steps = steps_of(whole.run_dir)
    assert [row["step"] for row in steps] == list(range(NUM_STEPS))
    assert all(0 <= row["accuracy"] <= 1 for row in steps)
    assert "learning_rate" not in steps[0], "an optimizer of one's own does not tell"
    assert whole.summary.compilations_after_first_step == 0
    assert whole.summary.evaluated_in == "loss"
    assert int(whole.state.step) == NUM_STEPS
    evaluations = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if "evaluation" in row]
    assert [row["step"] for row in evaluations] == [0, 5, 10, NUM_STEPS]
    assert all(row["num_tokens"] == len(DATA.held_out) for row in evaluations)
    assert whole.summary.held_out_after == evaluations[-1]["mean_loss"]
    assert json.loads((whole.run_dir / "summary.json").read_text())["evaluations"] == whole.summary.evaluations
    assert not any("nats_per_token" in row for row in evaluations)
    figures = {name: values for name, (values,) in read_runs([whole.run_dir]).figures}
    assert figures["Last loss"] == f"{steps[-1]['loss']:.3f}"
    assert figures["Evaluation held_out"].endswith(f", then {whole.summary.held_out_after:.3f}")


def test_the_evaluation_is_that_of_its_own_loss(whole):
    batch = {
        "x": np.stack([np.pad(x, ((0, 16 - len(x)), (0, 0))) for x, _ in DATA.held_out]),
        "labels": np.array([label for _, label in DATA.held_out]),
        "is_real": np.ones(len(DATA.held_out), bool),
    }
    loss, weight, _ = sums_of(whole.state.params, 0.9, batch)
    np.testing.assert_allclose(whole.summary.held_out_after, float(loss / weight), rtol=1e-5)


def test_a_resumed_run_has_the_same_steps_keys_and_extra_state(whole, tmp_path):
    first = fit(dataclasses.replace(make_config(tmp_path), max_steps=7), DATA, **own())
    assert first.summary.num_steps == 7
    resumed = fit(make_config(tmp_path), DATA, **own())
    assert steps_of(resumed.run_dir) == steps_of(whole.run_dir)
    for one, other in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        assert bool((one == other).all())


def test_the_losses_on_four_devices_are_those_on_one(whole, tmp_path):
    spread = fit(make_config(tmp_path, devices=4), DATA, **own())
    for name in ("loss", "accuracy"):
        values = ([row[name] for row in steps_of(run.run_dir)] for run in (spread, whole))
        np.testing.assert_allclose(*values, rtol=1e-5)
    np.testing.assert_allclose(spread.state.extra["spread"], whole.state.extra["spread"], rtol=1e-5)
    assert int(spread.state.extra["calls"]) == int(whole.state.extra["calls"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": None}, "loss_fn and params go together"),
        ({"loss_fn": None, "params": None}, "eval_loss_fn and extra go with a loss_fn of your own"),
        ({"extra": None}, "loss_fn takes extra: step.init"),
    ],
)
def test_what_is_missing_is_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(make_config(tmp_path), DATA, **own(**changes))


def test_a_sum_that_has_the_name_of_another_figure_is_refused(tmp_path):
    def clashing(params, microbatch):
        loss, weight, _ = sums_of(params, 1.0, microbatch)
        return loss, weight, {"padding": weight}

    with pytest.raises(ValueError, match="other names than figures of a step: padding"):
        fit(make_config(tmp_path), DATA, **own(loss_fn=clashing, eval_loss_fn=None, extra=None))


def test_a_run_goes_on_from_its_best_checkpoint_and_forgets_what_came_later(tmp_path):
    def growing(params, microbatch, extra):  # the better, the fewer the steps
        weight = jnp.sum(microbatch["is_real"])
        return weight * extra["calls"], weight, {}, extra

    config = make_config(tmp_path, keep_best=1)
    whole = fit(config, DATA, **own(eval_loss_fn=growing))
    with open_checkpoints(whole.run_dir / "checkpoints") as checkpoints:
        assert (checkpoints.best_step, checkpoints.steps) == (5, [5, 10, 12])
    shorter = changed(config, resume_from="best", max_steps=7)
    log = whole.run_dir / "metrics.jsonl"
    intact = log.read_bytes()
    log.write_bytes(b"?" + intact)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        fit(shorter, DATA, **own(eval_loss_fn=growing))
    assert {path.name for path in whole.run_dir.glob("checkpoints/[0-9]*")} == {"5", "10", "12"}
    assert load_config(whole.run_dir / "config.json").max_steps == config.max_steps
    log.write_bytes(intact)
    again = fit(shorter, DATA, **own(eval_loss_fn=growing))
    assert int(again.state.step) == 7
    with open_checkpoints(whole.run_dir / "checkpoints") as checkpoints:
        assert checkpoints.steps == [5, 7]
    assert [row["step"] for row in steps_of(whole.run_dir)] == list(range(7))
    fit(config, DATA, **own(eval_loss_fn=growing))
    assert [row["step"] for row in steps_of(whole.run_dir)] == list(range(NUM_STEPS))


def values(params, microbatch):
    return jnp.sum(params[microbatch.tokens] * microbatch.weights), jnp.sum(microbatch.weights), {"twice": 2.0}


def config_of_pairs_of_samples(folder, **changes):
    """Steps of two samples, in the order of the dataset."""
    return changed(
        FitConfig(),
        run_dir=folder / "run",
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=16, max_shapes=1, order="dataset"),
        **changes,
    )


def test_what_has_no_weight_has_no_loss_and_is_counted(tmp_path):
    samples = [WeightedTokens(np.arange(4), np.full(4, i > 2)) for i in range(6)]
    options = {"num_epochs": 2, "eval_every": 1, "checkpoint_every": 1, "keep_best": 1, "trackers": ("tensorboard",)}
    result = fit(
        config_of_pairs_of_samples(tmp_path, **options),
        Split(samples, samples[:2]),
        loss_fn=values,
        params=jnp.arange(4.0),
        optimizer=optax.sgd(0.0),
    )
    records = read_metrics(result.run_dir / "metrics.jsonl")
    steps = [(row["loss"], row["twice"], row["num_sequences"]) for row in records if "loss" in row]
    assert steps == [(None, None, 2), (1.5, 0.5, 2), (1.5, 0.25, 2)] * 2
    evaluations = [(row["mean_loss"], row["twice"], row["num_tokens"]) for row in records if "evaluation" in row]
    assert evaluations == [(None, None, 0)] * 7
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert (summary["num_without_target"], summary["num_steps_without_weight"]) == (6, 2)
    assert summary["held_out_before"] is summary["held_out_after"] is summary["evaluations"]["held_out"] is None
    for line in (r"num steps without weight +2", r"held out after +–"):
        assert re.search(line, str(result.summary))
    with open_checkpoints(result.run_dir / "checkpoints") as checkpoints:
        assert checkpoints.best_step is None
    figures = dict(read_runs([result.run_dir]).figures)
    assert (figures["Last loss"], figures["Evaluation held_out"]) == (["1.500"], ["not known, then not known"])


@pytest.mark.parametrize(("changes", "said"), [({"max_steps": 2}, "2 steps, the whole run"), ({}, "3 steps, a whole")])
def test_a_whole_epoch_or_run_without_weight_is_an_error(changes, said, tmp_path):
    """The weights of batches of one's own are known when their steps are done."""
    config = config_of_pairs_of_samples(tmp_path, **{"num_epochs": 2} | changes)
    samples = [np.arange(4) for _ in range(6)]
    with pytest.raises(ValueError, match=said):
        fit(
            config,
            Split(samples, samples[:1]),
            loss_fn=lambda params, microbatch: (params * 0.0, jnp.zeros(())),
            params=jnp.ones(()),
            optimizer=optax.sgd(0.0),
            collate=lambda step: {"x": np.zeros(step.ids.shape)},
        )


def padded(step):
    batch = collate_tokens(step)
    return {"tokens": batch.tokens, "weights": batch.weights, "num_sequences": batch.num_sequences}


def values_of_fields(params, microbatch):
    return jnp.sum(params[microbatch["tokens"]] * microbatch["weights"]), jnp.sum(microbatch["weights"])


class Unreadable:
    """Samples, some of which are errors."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


@pytest.mark.parametrize("kind", ["tokens", "fields", "own collate"])
def test_bad_samples_of_any_kind_are_left_out_and_listed(tmp_path, kind, capsys):
    tokens = [np.arange(4) % (i % 3 + 2) for i in range(6)]
    samples = [{"tokens": each} for each in tokens] if kind == "fields" else list(tokens)
    samples[0], samples[5] = OSError("gone"), OSError("gone, too")
    options = {"on_bad_sample": "skip", "max_bad_fraction": 0.5, "num_epochs": 2, "eval_every": 3}
    result = fit(
        config_of_pairs_of_samples(tmp_path, **options),
        Split(Unreadable(samples), Unreadable([samples[1], samples[5]])),
        loss_fn=lambda params, batch: values_of_fields(params, batch if kind != "tokens" else batch._asdict()),
        params=jnp.arange(4.0),
        optimizer=optax.sgd(0.0),
        collate=padded if kind == "own collate" else None,
        fields={"tokens": "length"} if kind == "fields" else None,
    )
    rows = [json.loads(line) for line in (result.run_dir / "bad_samples.jsonl").read_text().splitlines()]
    # The first of three evaluations or more lists the sample, before all steps.
    assert rows.pop(0) == {"step": None, "evaluation": HELD_OUT, "id": 1, "reason": "OSError: gone, too"}
    expected = {0: "OSError: gone", 5: "OSError: gone, too"}
    assert sorted((row["epoch"], row["id"], row["reason"]) for row in rows) == [
        (epoch, i, reason) for epoch in range(2) for i, reason in expected.items()
    ]
    records = read_metrics(result.run_dir / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    in_step = {row["step"]: row["id"] for row in rows}
    assert len(in_step) == 4
    means = {i: each.mean() for i, each in enumerate(tokens)}
    plan_steps = {0: 1, 5: 4}  # the other one of its step, in the order of the dataset
    assert [steps[step]["loss"] for step in sorted(in_step)] == pytest.approx(
        [means[plan_steps[in_step[step]]] for step in sorted(in_step)]
    )
    assert {record["num_sequences"] for record in steps} == {2}
    assert all(record["num_skipped"] == 1 for record in records if "evaluation" in record)
    assert result.summary.held_out_after == pytest.approx(means[1])
    assert (result.summary.num_skipped, result.summary.num_skipped_evaluation) == (4, 1)
    printed = capsys.readouterr().out
    assert "num skipped evaluation" in printed
    assert f"5 bad samples were left out, and are listed in {result.run_dir / 'bad_samples.jsonl'}" in printed


def test_a_bad_sample_ends_a_run_that_does_not_skip_it(tmp_path):
    samples = [np.arange(4), OSError("gone")]
    data = Split(Unreadable(samples), samples[:1])
    with pytest.raises(RuntimeError, match="sample 1 could not be measured"):
        fit(config_of_pairs_of_samples(tmp_path), data, loss_fn=values, params=jnp.arange(4.0))
    config = config_of_pairs_of_samples(tmp_path, on_bad_sample="skip", max_bad_fraction=0.4)
    with pytest.raises(ValueError, match=r"1 bad samples of 2 in epoch 0 are more than max_bad_fraction=0\.4: id 1"):
        fit(config, data, loss_fn=values, params=jnp.arange(4.0))
    with pytest.raises(ValueError, match=r"skip.* not a length_fn of your own"):
        fit(config, data, loss_fn=values, params=jnp.arange(4.0), length_fn=lambda sample: len(sample))


def pairs_of_texts(num_samples, seed):
    """Sources and targets of lengths of their own, some targets empty."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers((2, 0), (13, 10), (num_samples, 2)).tolist()
    return [{"text": rng.integers(1, 9, source), "summary": rng.integers(1, 9, target)} for source, target in sizes]


def pair_loss(params, microbatch):
    """Sums over both sides, to which padding adds nothing, by target tokens."""
    if not isinstance(microbatch, dict):
        tokens = {"text": microbatch.source_tokens, "summary": microbatch.target_tokens}
        microbatch = tokens | {"weights": microbatch.weights}
    source, target = (jnp.sum(microbatch[name].astype(jnp.float32)) for name in PAIR_FIELDS)
    return params["source"] * source + params["target"] * target, jnp.sum(microbatch["weights"])


PAIR_FIELDS = {"text": "source", "summary": "target"}
PAIRS = Split(train=pairs_of_texts(60, 0), held_out=[*pairs_of_texts(9, 1), {"text": np.ones(15, int), "summary": [2]}])
PAIR_TUPLES = Split(*([(each["text"], each["summary"]) for each in of_split] for of_split in PAIRS))


class WithLengths(list):
    """Samples whose two lengths are known."""

    lengths = property(lambda self: np.array([[len(source), len(target)] for source, target in self]))


def fit_pairs(folder, data=PAIRS, plan=None, options=None, **changes):
    own_plan = PlanConfig(**{"max_tokens": 64, "max_shapes": 3, "num_microbatches": 2} | (plan or {}))
    config = changed(dataclasses.replace(make_config(folder), plan=own_plan), **changes)
    params = {"source": jnp.ones(()), "target": jnp.ones(())}
    return fit(config, data, loss_fn=pair_loss, params=params, **(options or {}))


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (PAIRS, {"length_fn": ("text", "summary")}),
        (PAIRS, {"fields": PAIR_FIELDS}),
        (PAIR_TUPLES, {"length_fn": lambda pair: (len(pair[0]), len(pair[1]))}),
        (Split(*map(WithLengths, PAIR_TUPLES)), {}),
    ],
    ids=["names", "fields", "function", "known"],
)
def test_samples_of_two_lengths_are_trained_on_and_evaluated(tmp_path, data, options, packing):
    run = fit_pairs(tmp_path, data, {"packing": packing}, options | {"optimizer": optax.sgd(0.0)}, max_steps=5)
    plan, steps = Plan.load(run.run_dir / "plan.npz"), steps_of(run.run_dir)
    assert plan.is_packed == (packing != "padded")
    assert len(steps) == 5
    for step, row in enumerate(steps[: plan.num_steps]):
        ids = plan.rows(step)
        of_step = [PAIRS.train[i] for i in ids[ids >= 0]]
        tokens = [sum(len(each[name]) for each in of_step) for name in PAIR_FIELDS]
        total = sum(np.sum(each[name]) for each in of_step for name in PAIR_FIELDS)
        assert row["loss"] == pytest.approx(total / tokens[1])
        assert (row["num_tokens"], row["num_sequences"]) == (sum(tokens), len(of_step))
        bucket = row["bucket_rows"], row["bucket_length"], row["bucket_target_length"]
        assert bucket == tuple(plan.buckets.shapes[plan.step_bucket[step]])
    sums = [sum(np.sum(each[name]) for name in PAIR_FIELDS) for each in PAIRS.held_out]
    num_targets = sum(len(each["summary"]) for each in PAIRS.held_out)
    assert run.summary.held_out_before == run.summary.held_out_after == pytest.approx(sum(sums) / num_targets)
    assert run.summary.compilations_after_first_step == 0
    used = collections.Counter(map(tuple, read_run(run.run_dir).buckets.tolist()))
    assert used == {tuple(bucket): num for bucket, num in plan.groups_of_buckets(0, 5).items()}


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"packing": "wrapped"}, r"takes no packing \(wrapped\)"),
        ({"buckets": ((2, 16),)}, "takes no buckets"),
        ({"packing": "best_fit", "row_lengths": (16,)}, "takes no row_lengths"),
        ({"overlong": "truncate"}, r"takes no overlong \(truncate\)"),
        ({"strategy": "quantile"}, "strategy"),
        ({"max_length": 8}, "pairs|12"),
    ],
)
def test_settings_that_two_lengths_do_not_have_are_refused(tmp_path, plan, error):
    with pytest.raises(ValueError, match=error):
        fit_pairs(tmp_path, plan=plan, options={"fields": PAIR_FIELDS})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layout", [None, "data2.zero1"])
def test_a_loss_of_whole_steps_is_trained_evaluated_and_logged(tmp_path, layout):
    """The variance of a step's values, whose mean over its tokens is part of it."""
    rng = np.random.default_rng(4)
    samples = [rng.integers(0, 50, length) for length in rng.integers(1, 16, 120)]

    def sums(params, batch):
        values, is_real = params[batch.tokens], jnp.arange(batch.tokens.shape[1]) < batch.lengths[..., None]
        return {"n": jnp.sum(is_real), "x": jnp.sum(values, where=is_real), "xx": jnp.sum(values**2, where=is_real)}

    def loss(sums):
        mean = sums["x"] / sums["n"]
        return sums["xx"] / sums["n"] - mean**2, {"mean": mean}

    table = rng.normal(size=50).astype(np.float32)
    config = changed(make_config(tmp_path), max_steps=None, num_epochs=1)
    options = {"loss_fn": StepLoss(sums, loss), "params": jnp.asarray(table), "optimizer": optax.sgd(0.0)}
    result = fit(config, Split(samples, samples[:9]), layout=layout, **options)
    plan = Plan.load(result.run_dir / "plan.npz")
    records = read_metrics(result.run_dir / "metrics.jsonl")
    steps = [(row["loss"], row["mean"], row["num_tokens"]) for row in records if "loss" in row]
    assert len(steps) == plan.num_steps > 2
    for number, (variance, mean, num_tokens) in enumerate(steps):
        ids = plan.rows(number)
        values = table[np.concatenate([samples[i] for i in ids[ids >= 0]])]
        np.testing.assert_allclose((variance, mean), (values.var(), values.mean()), rtol=1e-4, atol=1e-6)
        assert num_tokens == len(values)
    held_out = make_plan(np.array(list(map(len, samples[:9]))), plan.buckets, num_microbatches=4, order="length")
    of_steps = (ids[ids >= 0] for ids in map(held_out.rows, range(held_out.num_steps)))
    expected = [table[np.concatenate([samples[i] for i in ids])].var() for ids in of_steps]
    np.testing.assert_allclose(result.summary.held_out_after, np.mean(expected), rtol=1e-4)
