"""Whole runs with stages and tensor parallelism: the numbers of one device, on whatever layouts a run goes on."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

import jvarlen
from jvarlen import cli, fit
from jvarlen._common.pytree import plain_names
from jvarlen.estimates import Cluster
from jvarlen.models import DecoderConfig, from_hugging_face, init_params, make_loss_fn
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, column_linear, layered_loss_fn, row_linear
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.saved_config import load_config
from jvarlen.training.checkpoint import read_params
from jvarlen.training.trainable import select_trained
from tests.runs.test_model_commands import assert_same_leaves
from tests.support import run_fit
from tests.support.settings import changed

NUM_STEPS = 20
MODEL = DecoderConfig(num_layers=2, width=16, num_heads=2)  # with matrices that are large enough for shards
ALL_AXES = "data2.stage2.tensor2.zero1"


class StoppingAfter:
    """A tracker that presses Ctrl-C once a step is logged; the next one is in flight then."""

    def __init__(self, step):
        self._step = step

    def log(self, record):
        if "loss" in record and record["step"] == self._step:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self):
        pass


@pytest.fixture(scope="module")
def config(tmp_path_factory, compilation_cache):
    config = run_fit.make_config(tmp_path_factory.mktemp("runs"), compilation_cache)
    plan = dataclasses.replace(config.plan, max_tokens=64)
    return changed(config, decoder=MODEL, plan=plan, max_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def alone(config):
    return fit(config, run_fit.make_data())


def losses_of(run):
    return [row["loss"] for row in read_metrics(run.run_dir / "metrics.jsonl") if "loss" in row]


def assert_same_training(run, alone):
    assert run.summary.num_steps == NUM_STEPS
    assert run.summary.compilations_after_first_step == 0
    np.testing.assert_allclose(losses_of(run), losses_of(alone), rtol=1e-5)
    np.testing.assert_allclose(run.summary.held_out_after, alone.summary.held_out_after, rtol=1e-5)
    assert jax.tree.structure(run.state) == jax.tree.structure(alone.state)
    for found, expected in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(alone.state.params), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def changing(config, alone):
    """A run that goes from one device, as earlier versions saved it, to ZeRO, to stages and tensor parallelism."""
    data, resume = run_fit.make_data(), None
    stops = ((None, 3), ("data2.context2.zero3", 10))
    for parallel, step in (*stops, (ALL_AXES, None)):
        trackers = {} if step is None else {"stop": StoppingAfter(step)}
        run = fit(changed(config, parallel=parallel, resume=resume), data, trackers=trackers)
        resume = run.run_dir
        if step is not None:
            assert run.summary.interrupted
            assert step < run.summary.num_steps <= step + 2
    return run


@pytest.mark.slow
def test_a_run_that_changes_layouts_is_the_uninterrupted_one(changing, alone):
    assert_same_training(changing, alone)
    assert load_config(changing.run_dir / "config.json").hardware.parallel == ALL_AXES


@pytest.mark.slow
def test_a_run_with_stages_and_tensor_parallelism_is_saved_as_that_of_one_device(changing, alone, tmp_path, capsys):
    saved, expected = (read_params(one.run_dir / "checkpoints")[0] for one in (changing, alone))
    assert {name: leaf.shape for name, leaf in saved.items()} == {name: leaf.shape for name, leaf in expected.items()}

    assert cli.main(["export", str(changing.run_dir), str(tmp_path / "exported")]) == 0
    params = from_hugging_face(tmp_path / "exported")[1]
    for name, leaf in zip(plain_names(params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, saved[name.removesuffix(".value")])
    capsys.readouterr()
    written = []
    for one in (changing, alone):
        options = ["--prompt", "ab", "--max-new-tokens", "8", "--max-shapes", "1", "--no-progress"]
        assert cli.main(["sample", str(one.run_dir), *options]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]


@pytest.mark.slow
def test_a_run_of_some_parameters_is_that_of_one_device_and_resumes_on_another_layout(config):
    some = changed(config, max_steps=6, trainable=("layers.*.attention.*", "layers.1.*"))
    alone, data = fit(some, run_fit.make_data()), run_fit.make_data()
    stopped = fit(changed(some, parallel=ALL_AXES), data, trackers={"stop": StoppingAfter(2)})
    assert stopped.summary.interrupted
    resumed = fit(changed(some, parallel="data4.zero3", resume=stopped.run_dir), data)
    np.testing.assert_allclose(losses_of(resumed), losses_of(alone), rtol=1e-5)
    assert jax.tree.structure(resumed.state) == jax.tree.structure(alone.state)
    before = init_params(load_config(alone.run_dir / "config.json").decoder, some.seed)
    trained = select_trained(before, some.trainable)
    for path, leaf in jax.tree.leaves_with_path(before):
        found, expected = (dict(jax.tree.leaves_with_path(run.state.params))[path] for run in (resumed, alone))
        if path in dict(jax.tree.leaves_with_path(trained)):
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-4)
        else:
            np.testing.assert_array_equal(np.asarray(found), np.asarray(leaf))


def test_microbatches_that_nothing_is_said_of_are_those_of_the_layout_and_then_of_the_run(config):
    plan = dataclasses.replace(config.plan, num_microbatches=None)
    short = changed(config, plan=plan, parallel="data2.stage2", max_steps=1)
    run = fit(short, run_fit.make_data())
    assert load_config(run.run_dir / "config.json").plan.num_microbatches == 4
    resumed = fit(changed(short, parallel=None, resume=run.run_dir, max_steps=2), run_fit.make_data())
    assert resumed.summary.num_steps == 2
    assert load_config(run.run_dir / "config.json").plan.num_microbatches == 4


@pytest.mark.slow
def test_the_chosen_layout_trains_as_one_device(config, alone, tmp_path, capsys):
    """On 8 devices for 4 microbatches, for which data parallelism alone is too wide."""
    cluster = tmp_path / "cluster.json"
    Cluster.named("dgx-h100").save(cluster)
    auto = changed(config, parallel="auto", cluster=str(cluster), devices=8)
    run = fit(auto, run_fit.make_data())
    assert_same_training(run, alone)
    chosen = Layout.parse(load_config(run.run_dir / "config.json").hardware.parallel)
    assert chosen.num_devices == 8 > chosen.data
    said = capsys.readouterr().out
    assert f"{chosen}: " in said
    assert "its data shards do not divide 4 microbatches" in said
    small = dataclasses.replace(Cluster.named("dgx-h100"), devices_per_host=4)
    small.save(cluster)
    with pytest.raises(ValueError, match="the cluster dgx-h100 has 4 devices, and the run 8"):
        fit(auto, run_fit.make_data())
    with pytest.raises(ValueError, match=r"cluster \(.*\) is for parallel=.auto., not data8"):
        changed(auto, parallel="data8")


def own_model():
    """Gated layers, whose gates lie beside what they gate in one kernel."""
    rng = np.random.default_rng(0)
    specs = LayeredParams({"table": P()}, {"in": P(None, None, "tensor"), "out": P("tensor")})
    params = LayeredParams(
        {"table": rng.normal(size=(256, 16)) / 4},
        {"in": rng.normal(size=(2, 16, 2, 32)) / 4, "out": rng.normal(size=(2, 32, 16)) / 4},
    )

    def layer(own, x, batch, axes):
        gates, values = jnp.split(column_linear(x, own["in"].reshape(16, -1), axes=axes), 2, axis=-1)
        return x + row_linear(jax.nn.sigmoid(gates) * values, own["out"], axes=axes)

    def loss(ends, x, batch, axes):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ ends["table"].T, batch.tokens)
        return jnp.sum(losses * batch.weights), jnp.sum(batch.weights)

    model = LayeredModel(
        embed=lambda ends, batch, axes: ends["table"][batch.tokens], layer=layer, loss=loss, specs=specs
    )
    return model, params


@pytest.mark.slow
def test_a_model_of_ones_own_trains_with_tensor_parallelism(config):
    """Its evaluations have a loss of their own, of the whole parameters."""
    model, params = own_model()
    own = {
        "loss_fn": model,
        "params": params,
        "optimizer": optax.adamw(1e-2),
        "eval_loss_fn": layered_loss_fn(model, takes_key=False),
    }
    whole = fit(config, run_fit.make_data(), **own)
    stopped = fit(
        changed(config, parallel="data1.stage2.tensor2"),
        run_fit.make_data(),
        trackers={"stop": StoppingAfter(8)},
        **own,
    )
    assert stopped.summary.interrupted
    further = changed(config, parallel="data2.tensor2.zero1", resume=stopped.run_dir)
    assert_same_training(fit(further, run_fit.make_data(), **own), whole)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("data1.tensor4", r"tensor4 of the layout data1.tensor4 does not divide the model's num_heads \(2\)"),
        ("data1.stage4", "2 layers do not make 4 stages"),
        ("data1.stage2.interleaved.virtual2", "2 layers do not make 2 stages of 2 virtual stages"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_named_before_anything_is_read(config, parallel, message):
    nothing = run_fit.make_data()._replace(train=[])
    with pytest.raises(ValueError, match=message):
        fit(changed(config, parallel=parallel), nothing)


def test_models_of_ones_own_are_compared_with_the_layout_as_well(config):
    model, params = own_model()
    nothing = run_fit.make_data()._replace(train=[])
    for parallel, own, message in (
        ("data1.tensor2", {"loss_fn": layered_loss_fn(model)}, "tensor2 takes a LayeredModel"),
        (
            "data1.tensor2",
            {"loss_fn": model._replace(specs=None)},
            "tensor2 takes a LayeredModel with specs",
        ),
        ("data1.stage2", {"loss_fn": layered_loss_fn(model)}, "stage2 takes a LayeredModel"),
        (
            "data1.tensor8",
            {"params": jax.tree.map(lambda leaf: leaf[..., :12], params)},
            r"do not divide .*'in'.*\(dimension 3: 12\)",
        ),
    ):
        given = {"loss_fn": model, "params": params} | own
        with pytest.raises(ValueError, match=message):
            fit(changed(config, parallel=parallel), nothing, **given)


@pytest.mark.slow
def test_a_run_evaluates_saves_and_exports_the_average_that_its_optimizer_keeps(config, tmp_path):
    optimizer = optax.contrib.schedule_free_adamw(0.05, warmup_steps=2)
    data = run_fit.make_data()
    config = changed(config, parallel=ALL_AXES, max_steps=5, eval_every=2, run_dir=tmp_path / "run")
    run = fit(config, data, optimizer=optimizer)
    assert run.summary.compilations_after_first_step == 0

    state = jax.tree.map(np.asarray, run.state)
    z = jax.tree.map(lambda z, y: z[tuple(map(slice, y.shape))], state.opt_state.z, state.params)
    average = optax.contrib.schedule_free_eval_params(state.opt_state._replace(z=z), state.params)
    is_apart = [np.abs(x - y).max() > 1e-4 for x, y in zip(*map(jax.tree.leaves, (average, state.params)), strict=True)]
    assert any(is_apart)
    for found, expected in zip(jax.tree.leaves(run.params), jax.tree.leaves(average), strict=True):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-7)

    lengths = [len(sample) for sample in data.held_out]
    plan, sums = jvarlen.make_plan(lengths, max_tokens=64, max_shapes=1), jvarlen.MetricSums()
    step = jax.jit(jvarlen.make_eval_step(make_loss_fn(load_config(run.run_dir / "config.json").decoder)))
    for batch in jvarlen.load(plan, data.held_out):
        sums.add(step(average, batch)[1])
    np.testing.assert_allclose(run.summary.held_out_after, sums.loss, rtol=1e-5)

    saved = read_params(run.run_dir / "checkpoints")[0]
    assert cli.main(["export", str(run.run_dir), str(tmp_path / "exported")]) == 0
    exported = jax.tree.leaves(from_hugging_face(tmp_path / "exported")[1])
    for name, found, expected in zip(plain_names(average), exported, jax.tree.leaves(run.params), strict=True):
        np.testing.assert_array_equal(saved[name.removesuffix(".value")], np.asarray(expected))
        np.testing.assert_array_equal(found, np.asarray(expected))

    longer = changed(config, max_steps=7)
    resumed = fit(longer, data, optimizer=optimizer)
    alone = fit(changed(longer, run_dir=tmp_path / "alone"), data, optimizer=optimizer)
    assert resumed.summary.held_out_after == alone.summary.held_out_after
    assert_same_leaves(resumed.params, alone.params)
