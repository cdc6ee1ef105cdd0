"""Results for every sample: those of a plain loop, one sample at a time, in any shapes and on any devices."""

import gc
import json
import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen import UserError, measure_lengths, no_recompiles, predict
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.distributed.placement import place
from jvarlen.inference import predict as module
from jvarlen.planning import Buckets
from tests.inference import run_predict
from tests.inference.run_predict import AXES, BAD, PARAMS, SAMPLES, Failing, apply_fn, one_by_one
from tests.support import processes

WIDTH = 8


def predicted(fn=apply_fn, params=PARAMS, samples=SAMPLES, axes=AXES, **options):
    chosen = {} if "buckets" in options else {"max_tokens": 64, "max_shapes": 3}
    options = {"axes": axes, "progress": False} | chosen | options
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
    [(None, {"packing": "best_fit"}), ("data2", {"max_shapes": 1})],
)
def test_results_are_those_of_one_sample_at_a_time(alone, layout, options):
    assert_close(predicted(layout=layout, **options), alone)
    assert {found["tags"].dtype for found in alone} == {np.dtype(np.int32)}


@pytest.mark.parametrize("options", [{"packing": "best_fit"}, {"max_shapes": 1, "layout": "data2"}])
def test_axes_are_told_by_shapes(alone, options):
    assert_close(predicted(axes=None, **options), alone)


def test_a_result_as_wide_as_a_bucket_is_long_is_no_result_of_positions():
    wide = predicted(lambda params, batch: jnp.full((batch.tokens.shape[0], 16), 3), (), [[1] * 16, [2]], axes=None)
    assert [each.tolist() for each in wide] == [[3] * 16] * 2


def test_a_result_of_each_of_as_many_samples_as_a_row_has_positions_is_of_samples():
    ids = predicted(lambda params, batch: batch.ids, (), [[1]] * 64 + [[1] * 64], axes=None, packing="best_fit")
    assert [int(each) for each in ids] == [*range(65)]


def strided(params, batch):
    return batch.tokens[:, 1::2]


def one_longer(params, batch):
    return jnp.pad(batch.tokens, ((0, 0), (0, 1)))


def of_pairs_of_positions(params, batch):
    return {"tags": batch.tokens, "scores": batch.tokens[:, :, None] * batch.tokens[:, None]}


def of_pairs_of_rows(params, batch):
    return batch.tokens @ batch.tokens.T


@pytest.mark.parametrize("fn", [strided, one_longer, of_pairs_of_positions, of_pairs_of_rows])
@pytest.mark.parametrize(
    "options",
    [
        {"max_shapes": 1},
        {"max_shapes": 3},
        {"max_shapes": 1, "axes": "row"},
        {"max_shapes": 1, "axes": "length"},
        {"packing": "best_fit"},
        {"packing": "wrapped"},
        {"max_shapes": 1, "layout": "data2"},
    ],
    ids=str,
)
def test_results_that_would_hold_padding_are_refused_whatever_the_number_of_buckets(fn, options):
    samples = [np.arange(1, length + 1) for length in (3, 5, 9, 8)]
    with pytest.raises(ValueError, match=r"results have other axes than samples.*others would hold padding"):
        predicted(fn, (), samples, **({"axes": None, "max_tokens": 40, "max_length": 9} | options))


def test_automatic_packing_is_refused():
    with pytest.raises(ValueError, match=r"packing \('auto'\) must be one of 'padded', 'best_fit', 'wrapped'$"):
        predicted(lambda params, batch: batch.tokens, (), [[1], [2, 3]], packing="auto")


@pytest.mark.parametrize("samples", [{"a": [1, 2]}, b"x"], ids=str)
@pytest.mark.parametrize("options", [{}, {"lengths": [1]}], ids=str)
def test_what_is_not_read_by_ids_is_refused(samples, options):
    said = f"samples by their ids, which {type(samples).__name__} lacks: make a list of its samples"
    with pytest.raises(UserError, match=said):
        predicted(lambda params, batch: batch.tokens, (), samples, **options)


@pytest.mark.parametrize("result", ["both", "one longer"])
def test_results_of_pairs_that_would_hold_padding_are_refused(result):
    def fn(params, batch):
        product = batch.source_tokens[:, :, None] * batch.target_tokens[:, None]
        return product if result == "both" else jnp.pad(batch.target_tokens, ((0, 0), (0, 1)))

    pairs = [([1] * n, [2] * m) for n, m in ((3, 3), (2, 3), (3, 1))]
    options = {"axes": None, "max_shapes": 1, "lengths": [(len(one), len(other)) for one, other in pairs]}
    with pytest.raises(ValueError, match="results have other axes than samples"):
        predicted(fn, (), pairs, **options)
    found = predicted(lambda params, batch: batch.target_tokens, (), pairs, **options)
    assert [each.tolist() for each in found] == [other for _, other in pairs]


def test_a_function_of_one_shape_needs_the_words_of_its_axes():
    table = np.arange(9)

    def of_one_shape(params, batch):
        return batch.tokens + table

    samples = [[1] * length for length in (3, 9)]
    found = predicted(of_one_shape, (), samples, axes="length", max_shapes=1)
    assert [each.tolist() for each in found] == [[1, 2, 3], [*range(1, 10)]]
    with pytest.raises(ValueError, match="Incompatible shapes") as refused:
        predicted(of_one_shape, (), samples, axes=None, max_shapes=1)
    assert "axes= says them" in refused.value.__notes__[-1]


def sharded(mesh, params, **specs):
    with jax.enable_x64(True):
        return {
            name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs.get(name, ()))))
            for name, leaf in params.items()
        }


@pytest.mark.parametrize(
    ("words", "axis"),
    [("data2.stage2.tensor2", "tensor"), ("data4.context2.zero3", "context")],
)
def test_parameters_may_lie_in_shards_along_any_axis(alone, words, axis):
    placement = place(words)
    shards = sharded(placement.mesh, PARAMS, table=(None, axis), out=(axis,))
    assert not shards["table"].is_fully_replicated
    assert_close(predicted(params=shards, layout=placement), alone)


class Outputs(NamedTuple):
    pooled: jax.Array
    hidden: jax.Array


def test_results_are_trees_as_the_function_gives_them():
    def of_batch(params, batch):
        scores = params["table"][batch.tokens]
        return Outputs(scores[:, 0], scores)

    expected = [PARAMS["table"][sample] for sample in SAMPLES[:6]]
    found = predicted(of_batch, PARAMS, SAMPLES[:6], Outputs("row", "length"))
    assert_close(found, [Outputs(scores[0], scores) for scores in expected])


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
    for axes in ({"first": "source", "second": "target", "sum": "row"}, None):
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

    results = predicted(lengths_of, (), axes=None, collate=collate, layout="data2")
    assert [int(found["length"]) for found in results] == [len(found["room"]) for found in results]
    assert [len(found["room"]) for found in results] == [*map(len, SAMPLES)]


def tokens_of(params, batch):
    return batch.tokens


def test_what_is_too_long_is_listed_dropped_truncated_or_split():
    longest = 12
    with pytest.raises(ValueError, match="limit 12"):
        predicted(tokens_of, (), axes="length", max_length=longest)
    with pytest.raises(ValueError, match="max_tokens 8 leaves no row"):
        predicted(tokens_of, (), axes="length", max_tokens=8)
    for packing in ("padded", "best_fit"):
        cut = predicted(tokens_of, (), axes="length", max_length=longest, overlong="truncate", packing=packing)
        assert [each.tolist() for each in cut] == [sample[:longest].tolist() for sample in SAMPLES]
        ends = predicted(tokens_of, (), axes="length", max_length=longest, overlong="truncate_start", packing=packing)
        assert [each.tolist() for each in ends] == [sample[-longest:].tolist() for sample in SAMPLES]
        dropped = predicted(tokens_of, (), axes="length", max_length=longest, overlong="drop", packing=packing)
        kept = [sample.tolist() if len(sample) <= longest else None for sample in SAMPLES]
        assert [None if each is None else each.tolist() for each in dropped] == kept
    rows = predicted(lambda params, batch: batch.lengths, (), axes="row", max_length=longest, overlong="drop")
    assert rows == [len(sample) if len(sample) <= longest else None for sample in SAMPLES]
    for options in ({"packing": "best_fit", "overlong": "split"}, {"packing": "wrapped"}):
        whole = predicted(tokens_of, (), axes="length", max_length=longest, **options)
        assert [each.tolist() for each in whole] == [sample.tolist() for sample in SAMPLES]
        with pytest.raises(ValueError, match="axes are of 'length', not 'row': no sample has one result where"):
            predicted(lambda params, batch: batch.ids, (), max_length=longest, axes="row", **options)


@pytest.mark.parametrize("nothing", [[], {}, np.zeros((0, 3))])
def test_predict_of_nothing_gives_nothing(nothing):
    assert predicted(samples=nothing) == predicted(samples=nothing, lengths=[]) == []
    assert predicted(samples=iter(nothing), lengths=[]) == []
    with pytest.raises(ValueError, match="lengths are empty"):
        predicted(lengths=[])
    with pytest.raises(ValueError, match="must be integers of at least 1"):
        predicted(samples=nothing, max_tokens=0)


@pytest.mark.parametrize("nothing", [{}, None, ()])
def test_a_function_without_results_is_refused(nothing):
    with pytest.raises(ValueError, match="the function returns no array"):
        predicted(lambda params, batch: nothing, (), axes=None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "best_fit"},
        {"packing": "best_fit", "layout": "data2", "max_tokens": 128},
        {"layout": "data8", "padding_rows": "repeat"},
        {"packing": "wrapped", "max_length": 12, "axes": {"scores": "length"}},
    ],
    ids=str,
)
def test_a_bad_sample_leaves_a_gap_and_moves_no_result_of_another(alone, options, capsys):
    fn = apply_fn
    if "max_length" in options:

        def fn(params, batch):
            return {"scores": apply_fn(params, batch)["scores"]}

    expected = [{name: each[name] for name in options.get("axes", each)} for each in alone]
    for bad in BAD:
        expected[bad] = None
    assert_close(predicted(fn, samples=Failing(SAMPLES), on_bad_sample="skip", progress=True, **options), expected)
    assert "bad samples have the result None: id 7: OSError: [Errno 5] disk on fire; id 11:" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="sample 7 could not be measured"):
        predicted(fn, samples=Failing(SAMPLES), **options)


def test_only_bad_samples_leave_only_gaps():
    found = predicted(tokens_of, (), [np.zeros(0, int)] * 3, None, on_bad_sample="skip")
    assert found == [None, None, None]
    with pytest.raises(ValueError, match=r'on_bad_sample="skip" is for batches that the library collates'):
        predicted(tokens_of, (), on_bad_sample="skip", collate=lambda step: {})


def test_results_of_other_axes_than_said_are_named():
    with pytest.raises(ValueError, match=r"the result \['sum'\] of axes 'length' is \[\d+, 8\] in .*×.*, "):
        predicted(axes="length")
    with pytest.raises(ValueError, match=r"the result \['scores'\] of axes 'row' is .*; the result \['tags'\] of axes"):
        predicted(axes="row")


def test_results_that_only_planned_buckets_tell_apart_are_named():
    with pytest.raises(ValueError, match=r"the result of axes 'row' is \[1, 10\] in .*, by its bucket and"):
        predicted(lambda params, batch: batch.tokens[:, :10], (), axes=None, samples=[[1] * 3] + [[1] * 60] * 9)


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

    predicted(own, layout="data2")
    with no_recompiles():
        assert_close(predicted(own, layout="data2"), alone)
        doubled = predicted(own, {"table": PARAMS["table"], "out": 2 * PARAMS["out"]}, layout="data2")
    np.testing.assert_allclose(doubled[0]["scores"], 2 * alone[0]["scores"], rtol=1e-12)
    with no_recompiles("count") as count:
        predict(own, PARAMS, SAMPLES, max_tokens=64, axes=AXES, max_shapes=1, progress=False)  # in float32
    assert count.functions[-1:] == ["own"]


def samples_of(num_samples, longest, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 50, length) for length in rng.integers(1, longest + 1, num_samples)]


GIVEN = [(1, 8), (4, 8), (2, 24), (3, 24)]  # several numbers of rows for one length


@pytest.mark.parametrize("layout", [None, "data4"])
@pytest.mark.parametrize("of", ["pairs", "Buckets"])
def test_given_shapes_compile_once_whatever_the_samples(alone, layout, of):
    def own(params, batch):
        return apply_fn(params, batch)

    buckets = GIVEN if of == "pairs" else Buckets(tuple(GIVEN), num_microbatches=7)
    options = {"buckets": buckets, "layout": layout}
    predicted(own, samples=samples_of(1, 3, 0), **options)  # of which all shapes are compiled
    with no_recompiles():
        assert_close(predicted(own, **options), alone)
        for num_samples in (1, 2, 9, 40):
            samples = samples_of(num_samples, 24, num_samples)
            found = predicted(own, samples=samples, **options)
            assert [each["tags"].shape for each in found] == [sample.shape for sample in samples]


@pytest.mark.parametrize("layout", [None, "data4"])
@pytest.mark.parametrize(
    ("packing", "overlong", "buckets"),
    [("best_fit", "error", GIVEN), ("best_fit", "split", [(2, 8), (1, 12)]), ("wrapped", "error", [(1, 24), (3, 24)])],
)
def test_given_shapes_of_packed_rows_stay_with_the_most_samples_of_a_row(alone, layout, packing, overlong, buckets):
    def own(params, batch):
        found = apply_fn(params, batch)
        return found if (packing, overlong) == ("best_fit", "error") else {"tags": found["tags"]}

    axes = AXES if (packing, overlong) == ("best_fit", "error") else {"tags": "length"}
    options = {"buckets": buckets, "samples_per_row": 7, "packing": packing, "overlong": overlong, "layout": layout}
    predicted(own, samples=samples_of(1, 3, 0), axes=axes, **options)
    with no_recompiles():
        assert_close(predicted(own, axes=axes, **options), [{name: each[name] for name in axes} for each in alone])
        for num_samples in (1, 2, 9, 40):
            samples = samples_of(num_samples, 24, num_samples)
            found = predicted(own, samples=samples, axes=axes, **options)
            assert [each["tags"].shape for each in found] == [sample.shape for sample in samples]


def test_samples_of_the_same_lengths_compile_nothing_in_any_order():
    def own(params, batch):
        return apply_fn(params, batch)

    for packing in ("padded", "best_fit", "wrapped"):
        options = {"packing": packing, "axes": "length" if packing == "wrapped" else AXES}
        fn = (lambda params, batch: batch.tokens) if packing == "wrapped" else own
        predicted(fn, **options)
        with no_recompiles():
            predicted(fn, samples=SAMPLES[::-1], **options)


def test_samples_that_fit_no_given_shape_are_listed():
    options = {"buckets": GIVEN}
    with pytest.raises(UserError, match=r"id 0: 25, id 2: 30 \(limit 24\)"):
        predicted(samples=[[1] * length for length in (25, 3, 30)], **options)
    found = predicted(samples=[[1] * length for length in (25, 3)], **options, overlong="drop")
    assert [each is None for each in found] == [True, False]
    with pytest.raises(UserError, match="max_tokens: buckets are given, so there are none to choose"):
        predicted(**options | {"max_tokens": 64})
    with pytest.raises(UserError, match="give buckets, or max_tokens to choose them by"):
        predict(apply_fn, PARAMS, SAMPLES)


def test_programs_end_with_their_function():
    def own(params, batch):
        return batch.tokens

    predicted(own, (), axes="length")
    before = len(module._kept)
    del own
    gc.collect()
    assert len(module._kept) < before


def test_results_are_fetched_while_the_next_step_runs(monkeypatch):
    seen = []
    run, add = CompiledBuckets.__call__, module.Results.add
    monkeypatch.setattr(CompiledBuckets, "__call__", lambda *args: (seen.append("run"), run(*args))[1])
    monkeypatch.setattr(
        module.Results, "add", lambda self, step, results: (seen.append(step), add(self, step, results))
    )
    predicted(tokens_of, (), axes="length")
    num_steps = seen.count("run")
    assert num_steps > 3
    assert seen == ["run", *(each for step in range(num_steps - 1) for each in ("run", step)), num_steps - 1]


def test_an_interrupt_ends_it_after_a_step_and_leaves_no_thread():
    class Interrupting(list):
        def __getitem__(self, i):
            if i == len(self) // 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(i)

    threads = threading.enumerate()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            predicted(tokens_of, (), Interrupting(SAMPLES), "length", lengths=[*map(len, SAMPLES)], max_tokens=32)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "read-ahead" not in [thread.name for thread in threading.enumerate() if thread not in threads]


@pytest.mark.multiprocess
def test_each_of_several_processes_has_all_results(alone):
    printed = processes.run(Path(__file__).with_name("run_predict.py"), 2, num_devices=2)
    for text in printed:
        of_process = json.loads(text.splitlines()[-1])
        for found, expected in zip(of_process["results"], alone, strict=True):
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
        gaps = [None if i in BAD else found["tags"] for i, found in enumerate(of_process["results"])]
        assert [found and found["tags"] for found in of_process["without_bad"]] == gaps
        assert of_process["written"] == run_predict.written()
        assert of_process["interrupted"] == ["KeyboardInterrupt", ""]


def test_keywords_that_predict_does_not_have_are_told_with_those_of_a_budget():
    with pytest.raises(TypeError, match=r"^predict has no keyword max_shape \(do you mean max_shapes\?\); .* axes, "):
        predicted(tokens_of, (), max_shape=1)
