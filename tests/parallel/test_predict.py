"""Results for every sample: those of a plain loop, one sample at a time, in any shapes and on any devices."""

import gc
import json
import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen import Layout, attend, measure_lengths, no_recompiles, predict
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.parallel import predict as module
from tests import processes, run_predict
from tests.run_predict import NUM_VALUES, PARAMS, SAMPLES, apply_fn, one_by_one

WIDTH = 8


def predicted(fn=apply_fn, params=PARAMS, samples=SAMPLES, **options):
    options = {"max_tokens": 64, "max_shapes": 3, "progress": False} | options
    with jax.enable_x64(True):
        return predict(fn, params, samples, **options)


def assert_close(results, expected):
    assert len(results) == len(expected)
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def alone():
    return one_by_one()


@pytest.mark.parametrize(
    ("layout", "options"),
    [(None, {}), ("data2", {"max_shapes": 1}), (None, {"packing": "best_fit"}), ("data8", {"packing": "best_fit"})],
)
def test_results_are_those_of_one_sample_at_a_time(alone, layout, options):
    assert_close(predicted(layout=layout, **options), alone)
    assert {found["tags"].dtype for found in alone} == {np.dtype(np.int32)}


def sharded(mesh, params, **specs):
    with jax.enable_x64(True):
        return {
            name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs.get(name, ()))))
            for name, leaf in params.items()
        }


@pytest.mark.parametrize(
    ("words", "axis"),
    [
        ("data8.zero3", "data"),
        ("data2.tensor4.zero1", "tensor"),
        ("data2.stage2.tensor2", "stage"),
        ("data4.context2.zero3", "context"),
    ],
)
def test_parameters_may_lie_in_shards_along_any_axis(alone, words, axis):
    placement = Layout.parse(words).on()
    shards = sharded(placement.mesh, PARAMS, table=(None, axis), out=(axis,))
    assert not shards["table"].is_fully_replicated
    assert_close(predicted(params=shards, layout=placement), alone)


def test_axes_of_a_mesh_that_no_layout_names_are_left_to_the_compiler(alone):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "model"))
    shards = sharded(mesh, PARAMS, table=(None, "model"), out=("model",))
    assert_close(predicted(params=shards, layout=Layout().on(mesh, axes={"data": "batch"})), alone)


class Outputs(NamedTuple):
    pooled: jax.Array
    hidden: jax.Array


class Network(nnx.Module):
    def __init__(self, rngs):
        options = {"rngs": rngs, "param_dtype": jnp.float64, "dtype": jnp.float64}
        self.embed = nnx.Embed(NUM_VALUES, WIDTH, **options)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, **options), nnx.Linear(WIDTH, WIDTH, **options)

    def __call__(self, tokens, **of_rows):
        query, key, value = jnp.split(self.qkv(self.embed(tokens))[..., None, :], 3, axis=-1)
        return self.out(attend(query, key, value, causal=False, **of_rows)[:, :, 0])


def pooled(hidden, batch):
    """The last position of each sample."""
    if hasattr(batch, "lengths"):
        return jnp.take_along_axis(hidden, jnp.maximum(batch.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    places = jnp.arange(hidden.shape[1])[:, None] * (
        batch.segment_ids[:, :, None] == 1 + jnp.arange(batch.ids.shape[1])
    )
    return jnp.take_along_axis(hidden, places.max(axis=1)[..., None], axis=1)


def rows_of(batch):
    return {name: getattr(batch, name) for name in ("lengths", "segment_ids") if hasattr(batch, name)}


def nnx_model():
    graph, params = nnx.split(Network(nnx.Rngs(0)))

    def of_batch(params, batch):
        hidden = nnx.merge(graph, params)(batch.tokens, **rows_of(batch))
        return Outputs(pooled(hidden, batch), hidden)

    return of_batch, params, lambda tokens: nnx.merge(graph, params)(tokens)


def haiku_model():
    def forward(tokens):
        table = hk.get_parameter("table", (NUM_VALUES, WIDTH), jnp.float64, hk.initializers.RandomNormal())
        return hk.Linear(WIDTH)(table[tokens])

    transformed = hk.without_apply_rng(hk.transform(forward))
    params = transformed.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))

    def of_batch(params, batch):
        hidden = transformed.apply(params, batch.tokens)
        return Outputs(pooled(hidden, batch), hidden)

    return of_batch, params, lambda tokens: transformed.apply(params, tokens)


def equinox_model():
    key = jax.random.key(0)
    params = eqx.nn.Embedding(NUM_VALUES, WIDTH, key=key), eqx.nn.Linear(WIDTH, WIDTH, key=key)
    arrays, rest = eqx.partition(params, eqx.is_array)

    def hidden_of(arrays, tokens):
        embed, linear = eqx.combine(arrays, rest)
        return jax.vmap(jax.vmap(lambda token: linear(embed(token))))(tokens)

    def of_batch(arrays, batch):
        hidden = hidden_of(arrays, batch.tokens)
        return Outputs(pooled(hidden, batch), hidden)

    return of_batch, arrays, lambda tokens: hidden_of(arrays, tokens)


@pytest.mark.parametrize(
    ("make", "packing"), [(nnx_model, None), (nnx_model, "best_fit"), (haiku_model, None), (equinox_model, None)]
)
def test_models_of_any_library_give_trees_of_results(make, packing):
    samples = SAMPLES[:12]
    with jax.enable_x64(True):
        fn, params, whole = make()
        hidden = [np.asarray(whole(sample[None].astype(np.int32))[0]) for sample in samples]
    results = predicted(fn, params, samples, packing=packing)
    assert_close(results, [Outputs(each[-1], each) for each in hidden])


def test_samples_of_named_fields_and_of_two_lengths():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, (30, 2))
    samples = [
        {"first": rng.integers(0, 9, (n, 3)), "second": rng.integers(0, 9, m), "scale": i}
        for i, (n, m) in enumerate(sizes)
    ]

    def scaled(params, batch):
        scale = params * batch["scale"]
        return {
            "first": batch["first"] * scale[:, None, None],
            "second": batch["second"] * scale[:, None],
            "sum": batch["second"].sum(axis=1),
        }

    expected = [
        {"first": first * 2 * i, "second": second * 2 * i, "sum": second.sum()}
        for i, (first, second) in enumerate((sample["first"], sample["second"]) for sample in samples)
    ]
    lengths = measure_lengths(samples, ("first", "second"), progress=False)
    options = {"lengths": lengths, "fields": {"first": "source", "second": "target", "scale": "row"}}
    for axes in (None, {"first": "source", "second": "target", "sum": "row"}):
        results = predict(scaled, 2, samples, max_tokens=64, axes=axes, progress=False, **options)
        for found, wanted in zip(results, expected, strict=True):
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_arrays_of_ones_own_collate_function():
    def collate(step):
        lengths = [[len(sample) for sample in samples] for samples in step.samples]
        rows = [np.pad(each, (0, step.bucket.rows - len(each))) for each in lengths]
        return {"lengths": np.array(rows, np.int32), "room": np.zeros((len(rows), *step.bucket), np.int8)}

    def lengths_of(params, batch):
        return {"length": batch["lengths"], "room": batch["room"]}

    for layout in (None, "data2"):
        results = predicted(lengths_of, (), collate=collate, layout=layout)
        assert [int(found["length"]) for found in results] == [len(found["room"]) for found in results]
        assert [len(found["room"]) for found in results] == [*map(len, SAMPLES)]


def test_a_dataset_that_can_only_be_iterated(alone):
    class Forward:
        def __iter__(self):
            return iter(SAMPLES)

    assert_close(predicted(samples=Forward(), lengths=[*map(len, SAMPLES)]), alone)


def test_padding_rows_may_repeat_a_sample():
    def longest(params, batch):
        return jnp.where(batch.lengths > 0, batch.lengths, 1 / jnp.zeros(()))  # infinite of rows without tokens

    samples = SAMPLES[:5]
    with jax.debug_infs(True):
        results = predicted(longest, (), samples, layout="data8", padding_rows="repeat", axes="row")
    assert [int(length) for length in results] == [*map(len, samples)]


def tokens_of(params, batch):
    return batch.tokens


def test_what_is_too_long_is_listed_dropped_truncated_or_split():
    longest = 12
    with pytest.raises(ValueError, match="limit 12"):
        predicted(tokens_of, (), max_length=longest)
    with pytest.raises(ValueError, match="max_tokens 8 leaves no row"):
        predicted(tokens_of, (), max_tokens=8)
    for packing in (None, "best_fit"):
        cut = predicted(tokens_of, (), max_length=longest, overlong="truncate", packing=packing)
        assert [each.tolist() for each in cut] == [sample[:longest].tolist() for sample in SAMPLES]
        dropped = predicted(tokens_of, (), max_length=longest, overlong="drop", packing=packing)
        kept = [sample.tolist() if len(sample) <= longest else None for sample in SAMPLES]
        assert [None if each is None else each.tolist() for each in dropped] == kept
    rows = predicted(lambda params, batch: batch.lengths, (), max_length=longest, overlong="drop")
    assert rows == [len(sample) if len(sample) <= longest else None for sample in SAMPLES]
    for options in ({"packing": "best_fit", "overlong": "split"}, {"packing": "wrapped"}):
        whole = predicted(tokens_of, (), max_length=longest, **options)
        assert [each.tolist() for each in whole] == [sample.tolist() for sample in SAMPLES]
        with pytest.raises(ValueError, match="axes are of 'length', not 'row': no sample has one result where"):
            predicted(lambda params, batch: batch.ids, (), max_length=longest, axes="row", **options)


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="at least one sample"):
        predicted(samples=[])


def test_results_of_unclear_axes_need_axes():
    def square(params, batch):
        return {"whole": batch.tokens, "sum": batch.tokens.sum(), "pairs": batch.tokens[:, None] - batch.tokens[:, :1]}

    with pytest.raises(ValueError, match=r"axes= tells which: in buckets .* \['pairs'\].*; \['sum'\] \[\] and \[\]"):
        predicted(square, ())

    def positions(params, batch):  # as wide as the longest bucket, by chance
        return jnp.broadcast_to(batch.lengths[:, None], (*batch.lengths.shape, max(map(len, SAMPLES))))

    assert {each.shape for each in predicted(positions, (), max_shapes=1)} == {(max(map(len, SAMPLES)),)}
    assert [*map(len, predicted(positions, (), max_shapes=1, axes="length"))] == [*map(len, SAMPLES)]
    with pytest.raises(ValueError, match=r"the result .*of axes 'length' is \[\d+, 23\] in .*×.*, and not"):
        predicted(positions, (), axes="length")


def test_rows_as_long_as_they_have_samples_are_no_positions():
    samples = [sample[:1] for sample in SAMPLES] + [np.arange(9)]

    def both(params, batch):
        assert batch.ids.shape[1] == 9
        return {"ids": batch.ids, "tokens": batch.tokens}

    results = predicted(both, (), samples, packing="best_fit")
    assert [int(result["ids"]) for result in results] == [*range(len(samples))]
    assert [result["tokens"].tolist() for result in results] == [sample.tolist() for sample in samples]


@pytest.mark.parametrize(
    ("axes", "message"),
    [("source", "axes are of 'row', 'length', not 'source'"), ({"other": "row"}, "words in the tree of the results")],
)
def test_axes_are_words_in_the_tree_of_the_results(axes, message):
    with pytest.raises(ValueError, match=message):
        predicted(axes=axes)


@pytest.mark.parametrize("layout", ["stage2.context2.data2"])
def test_devices_of_stages_and_context_compute_rows_of_their_own(alone, layout):
    assert_close(predicted(layout=layout), alone)
    assert_close(predicted(layout=layout, packing="best_fit"), alone)


def test_a_second_call_compiles_nothing_and_takes_other_parameters(alone):
    def own(params, batch):
        return apply_fn(params, batch)

    for options in ({}, {"layout": "data2"}):
        predicted(own, **options)
        with no_recompiles():
            assert_close(predicted(own, **options), alone)
            doubled = predicted(own, {"table": PARAMS["table"], "out": 2 * PARAMS["out"]}, **options)
        np.testing.assert_allclose(doubled[0]["scores"], 2 * alone[0]["scores"], rtol=1e-12)
    with no_recompiles("count") as count:
        predict(own, PARAMS, SAMPLES, max_tokens=64, max_shapes=1, progress=False)  # in float32
    assert count.functions[-1:] == ["own"]


def test_programs_end_with_their_function():
    def own(params, batch):
        return batch.tokens

    predicted(own, ())
    before = len(module._kept)
    del own
    gc.collect()
    assert len(module._kept) < before


def test_results_are_fetched_while_the_next_step_runs(monkeypatch):
    seen = []
    run, add = CompiledBuckets.__call__, module._Results.add
    monkeypatch.setattr(CompiledBuckets, "__call__", lambda *args: (seen.append("run"), run(*args))[1])
    monkeypatch.setattr(
        module._Results, "add", lambda self, step, results: (seen.append(step), add(self, step, results))
    )
    predicted(tokens_of, ())
    num_steps = seen.count("run")
    assert num_steps > 3
    assert seen == ["run", *(each for step in range(num_steps - 1) for each in ("run", step)), num_steps - 1]


def test_an_interrupt_ends_it_after_a_step_and_leaves_no_thread():
    class Interrupting(list):
        def __getitem__(self, i):
            if i == len(self) // 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(i)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            predicted(tokens_of, (), Interrupting(SAMPLES), lengths=[*map(len, SAMPLES)], max_tokens=32)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.multiprocess
def test_each_of_several_processes_has_all_results(alone):
    printed = processes.run(Path(__file__).parents[1] / "run_predict.py", 2, num_devices=2)
    for text in printed:
        of_process = json.loads(text.splitlines()[-1])
        for results in of_process["results"]:
            for found, expected in zip(results, alone, strict=True):
                for name, values in expected.items():
                    np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
        assert of_process["written"] == run_predict.written()
        assert of_process["interrupted"] == ["KeyboardInterrupt", ""]
