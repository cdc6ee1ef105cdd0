"""Samples of named fields: every value in its place, in every form of a batch, against a plain loop."""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import (
    Mixture,
    Plan,
    compile_buckets,
    load,
    make_plan,
    make_train_step,
    measure_lengths,
    no_recompiles,
    predict,
    stream_batches,
)
from jvarlen.data import WeightedTokens
from jvarlen.loading.collate import collate_tokens
from tests.loading import run_fields
from tests.support import processes

DTYPES = ["int32", "int64", "uint8", "bool", "float64", "float16", "bfloat16", "int16"]


class Tuple(NamedTuple):
    tokens: np.ndarray
    label: int


class Pair(NamedTuple):
    source: np.ndarray
    target: np.ndarray


@dataclasses.dataclass
class Record:
    tokens: np.ndarray
    label: int


def plan_of(form, lengths, overlong="error", epoch=0):
    most = 6 if overlong != "error" else 9
    options = {"num_microbatches": 2, "epoch": epoch}
    if form == "padded":
        return make_plan(lengths, [(2, 4), (3, most)], overlong=overlong, **options)
    if form in ("best_fit", "wrapped"):
        return make_plan(
            lengths, [(2, most)], packing=form, overlong=overlong if form == "best_fit" else "error", **options
        )
    if form == "pairs":
        return make_plan(lengths, [(2, 4, 9), (3, 9, 9)], **options)
    return make_plan(lengths, [(2, 14, 12)], packing="best_fit", **options)


def expected_batch(plan, step, samples, axes, padding_rows):
    """By a loop over the rows of a step; `axes` are the lengths of the first axes of each field."""
    bucket = plan.buckets.shapes[plan.step_bucket[step]]
    words = ["length"] if len(bucket.lengths) == 1 else ["source", "target"]
    prefix = {"length": "", "source": "source_", "target": "target_"}
    own = plan.local_rows(step)
    most = plan.samples_per_row[plan.step_bucket[step]]
    ids = own.ids if plan.is_packed else own.ids[..., None]
    shape = ids.shape[:2]
    length_of = dict(zip(words, bucket.lengths, strict=True))
    of_samples = (*shape, most) if plan.is_packed else shape
    batch = {"ids": np.full((*shape, most), -1), "num_sequences": plan.num_sequences[step]}
    batch["weights"] = np.zeros((*shape, bucket.lengths[-1]), np.float32)
    for word, length in length_of.items():
        names = ["segment_ids", "positions"] if plan.is_packed else ["lengths"]
        for name in names:
            batch[prefix[word] + name] = np.zeros((*shape, length) if plan.is_packed else shape, int)
    for name, words_of_axes in axes.items():
        value = np.asarray(samples[0][name])
        leading = (*shape, *(length_of[word] for word in words_of_axes)) if words_of_axes else of_samples
        if name != "weights":
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            batch[name] = np.zeros((*leading, *value.shape[len(words_of_axes) :]), dtype)
    for m, b in np.ndindex(shape):
        is_real = ids[m, b, 0] >= 0
        if not is_real and padding_rows == "zeros":
            continue
        at = (m, b) if is_real else (0, 0)
        used = dict.fromkeys(words, 0)
        for p, i in enumerate(ids[at][ids[at] >= 0].tolist()):
            begin, end = (0, None) if own.starts is None else (own.starts[at][p], own.stops[at][p])
            part = {}
            for name, words_of_axes in axes.items():
                value = np.asarray(samples[i][name])
                ends = [end if end is not None else length_of[word] for word in words_of_axes]
                part[name] = value[tuple(slice(begin, stop) for stop in ends)]
            size = {word: len(next(part[name] for name in axes if axes[name] == [word])) for word in words}
            if is_real:
                batch["ids"][m, b, p] = i
            for word in words:
                there = slice(used[word], used[word] + size[word])
                if plan.is_packed:
                    batch[f"{prefix[word]}segment_ids"][m, b, there] = p + 1
                    batch[f"{prefix[word]}positions"][m, b, there] = np.arange(size[word])
                else:
                    batch[f"{prefix[word]}lengths"][m, b] = size[word]
            for name, words_of_axes in axes.items():
                there = tuple(slice(used[word], used[word] + size[word]) for word in words_of_axes)
                if name == "weights":
                    target = slice(used[words[-1]], used[words[-1]] + size[words[-1]])
                    batch["weights"][m, b, target] = part[name] if is_real else 0
                elif words_of_axes:
                    batch[name][m, b][there] = part[name]
                else:
                    batch[name][(m, b, p) if plan.is_packed else (m, b)] = part[name]
            if "weights" not in axes and is_real:
                target = slice(used[words[-1]], used[words[-1]] + size[words[-1]])
                batch["weights"][m, b, target] = 1
            used = {word: used[word] + size[word] for word in words}
    if not plan.is_packed:
        batch["ids"] = batch["ids"][..., 0]
    return batch | {"is_real": batch["ids"] >= 0}


def assert_batch(found, expected):
    assert isinstance(found, dict)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == np.shape(array), name
        np.testing.assert_array_equal(np.asarray(found[name]).astype(np.float64), np.asarray(array, np.float64), name)


@st.composite
def datasets(draw, num_lengths, axes_of_fields, num_samples=24):
    """Samples of fields of any axes, shapes and dtypes, the lengths, and the axes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = rng.integers(1, 10, (num_samples, num_lengths))
    words = ["length"] if num_lengths == 1 else ["source", "target"]
    axes = {f"of_{word}": [word] for word in words}
    axes |= {f"field_{i}": draw(st.sampled_from(axes_of_fields)) for i in range(draw(st.integers(0, 3)))}
    if draw(st.booleans()):
        axes["weights"] = draw(st.sampled_from([[], words[-1:]]))
    shapes = {name: draw(st.lists(st.integers(1, 3), max_size=2)) if name != "weights" else [] for name in axes}
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in axes}

    def value(name, size_of):
        shape = [*(size_of[word] for word in axes[name]), *shapes[name]]
        values = rng.integers(0, 2 if dtypes[name] == "bool" else 100, shape)
        return values.astype(jnp.dtype(dtypes[name] if name != "weights" else "float64"))

    samples = [{name: value(name, dict(zip(words, sizes, strict=True))) for name in axes} for sizes in lengths.tolist()]
    return samples, lengths[:, 0] if num_lengths == 1 else lengths, axes


@pytest.mark.parametrize(
    ("form", "overlong"),
    [
        ("padded", "error"),
        ("padded", "truncate"),
        ("best_fit", "error"),
        ("best_fit", "split"),
        ("best_fit", "truncate"),
        ("wrapped", "error"),
        ("pairs", "error"),
        ("packed pairs", "error"),
    ],
)
@settings(max_examples=6)
@given(data=st.data())
def test_every_value_of_every_field_has_its_place(form, overlong, data):
    num_lengths = 2 if "pairs" in form else 1
    words = ["length"] if num_lengths == 1 else ["source", "target"]
    choices = [[], *([word] for word in words)]
    if form in ("padded", "pairs"):
        choices += [[one, other] for one in words for other in words]
    samples, lengths, axes = data.draw(datasets(num_lengths, choices))
    fields = data.draw(st.sampled_from([None, {name: " ".join(of_axes) or "row" for name, of_axes in axes.items()}]))
    given_lengths = data.draw(st.booleans()) or fields is None  # few samples may all have one length
    padding_rows = data.draw(st.sampled_from(["zeros", "repeat"]))
    plan = plan_of(form, lengths, overlong)
    loader = load(plan, samples, fields=fields, lengths=lengths if given_lengths else None, padding_rows=padding_rows)
    for step, batch in enumerate(loader):
        spec = loader.specs[plan.buckets.shapes[plan.step_bucket[step]]]
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), spec
        )
        assert_batch(batch, expected_batch(plan, step, samples, axes, padding_rows))


LENGTHS = np.random.default_rng(1).integers(1, 9, 30)
SAMPLES = [
    {"tokens": np.arange(length) + 1, "near": np.full((length, length), i), "label": i % 3, "text": "words"}
    for i, length in enumerate(LENGTHS.tolist())
]
FIELDS = {"tokens": "length", "near": "length length", "label": "row"}
AXES = {"tokens": ["length"], "near": ["length"] * 2, "label": []}
PLAN = plan_of("padded", LENGTHS)


@pytest.mark.parametrize("kind", [Record, Tuple])
def test_dataclasses_named_tuples_lists_and_scalars_are_samples(kind):
    records = [kind(list(range(1, length + 1)), i % 3) for i, length in enumerate(LENGTHS.tolist())]
    axes = {"tokens": ["length"], "label": []}
    assert measure_lengths(records, "tokens", progress=False).tolist() == LENGTHS.tolist()
    for step, batch in enumerate(load(PLAN, records)):
        assert_batch(batch, expected_batch(PLAN, step, SAMPLES, axes, "zeros"))


def test_a_named_tuple_of_two_arrays_is_a_pair_unless_its_fields_are_given():
    lengths = np.random.default_rng(2).integers(1, 9, (30, 2))
    pairs = [Pair(np.ones(n, int), np.ones(m, int)) for n, m in lengths.tolist()]
    plan = plan_of("pairs", lengths)
    assert next(load(plan, pairs)).source_tokens.ndim == 3
    named = next(load(plan, pairs, fields={"source": "source", "target": "target"}))
    assert named["source"].ndim == 3


def test_an_iterator_of_samples_loses_none_to_the_look_at_its_fields():
    plan = make_plan(LENGTHS, [(4, 9)], order="dataset")
    for step, batch in enumerate(load(plan, iter(SAMPLES), fields=FIELDS)):
        assert_batch(batch, expected_batch(plan, step, SAMPLES, AXES, "zeros"))


def test_streams_have_fields():
    stream = stream_batches(LENGTHS.tolist(), [(3, 4), (2, 9)])
    samples = [{name: sample[name] for name in FIELDS} for sample in SAMPLES]
    batches = list(load(stream, samples))
    assert sum(int(batch["is_real"].sum()) for batch in batches) == len(SAMPLES)
    for batch in batches:
        for i, row in zip(
            batch["ids"].ravel().tolist(), batch["near"].reshape(-1, *batch["near"].shape[2:]), strict=True
        ):
            assert int(row.sum()) == (0 if i < 0 else i * LENGTHS[i] ** 2)
    with pytest.raises(
        ValueError, match="a stream has no step that shows what fields the samples have: compile for Batch"
    ):
        print(load(stream_batches([3], [(1, 4)]), samples, fields=FIELDS).specs)


@pytest.mark.parametrize("form", ["padded", "best_fit"])
def test_samples_of_other_lengths_are_cut_in_every_field(form):
    fields = FIELDS if form == "padded" else {name: FIELDS[name] for name in ("tokens", "label")}
    plan = plan_of(form, LENGTHS)
    longer = dict(SAMPLES[3])
    longer |= {"tokens": np.arange(LENGTHS[3] + 4) + 1, "near": np.full([LENGTHS[3] + 4] * 2, 3)}
    changed = [longer if i == 3 else sample for i, sample in enumerate(SAMPLES)]
    loader = load(plan, changed, fields=fields, lengths=LENGTHS, on_mismatch="adjust")
    axes = {name: AXES[name] for name in fields}
    for step, batch in enumerate(loader):
        assert_batch(batch, expected_batch(plan, step, SAMPLES, axes, "zeros"))
    assert loader.num_adjusted == 1
    message = f"id 3: {LENGTHS[3] + 4} tokens, planned {LENGTHS[3]} tokens"
    with pytest.raises(ValueError, match=message):
        list(load(plan, changed, fields=fields, lengths=LENGTHS))
    with pytest.raises(ValueError, match=rf"longer than their bucket.* id 3: {LENGTHS[3] + 4} \(limit 9\)"):
        list(load(plan, changed, fields=fields))


def test_samples_without_weight_are_counted():
    samples = [{"tokens": sample["tokens"], "weights": float(i % 4 > 0)} for i, sample in enumerate(SAMPLES)]
    loader = load(PLAN, samples)
    weights = sum(float(batch["weights"].sum()) for batch in loader)
    assert weights == sum(LENGTHS[np.arange(30) % 4 > 0])
    assert loader.num_without_target == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"label": 0.5},
            "id 5: the field 'label' must be int32 (), as in other samples, not float64 (); give it in all samples as "
            "floats, or in all as integers",
        ),
        ({"label": [1, 2]}, "id 5: the field 'label' must be int32 (), as in other samples, not int64 (2,)"),
        (
            {"tokens": WeightedTokens([1] * LENGTHS[5], [1] * LENGTHS[5])},
            "id 5: give the tokens of WeightedTokens as a field, and their weights as the field 'weights'",
        ),
        ({"label": "a"}, "id 5: the field 'label' must be int32 (), as in other samples, not <U1 ()"),
        ({"label": 2**40}, "id 5: label must fit int32, and reach from"),
        (
            {"tokens": np.zeros(LENGTHS[5])},
            "id 5: the field 'tokens' must be int32 (any), as in other samples, not float64",
        ),
        ({"near": np.zeros((LENGTHS[5], 1), int)}, f"id 5: different lengths: near has [1], tokens [{LENGTHS[5]}]"),
        ({"near": None}, "id 5: the field 'near' must be int32 (any, any), as in other samples, not object ()"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_sample_that_is_not_as_others_is_named(change, said):
    samples = [sample | (change if i == 5 else {}) for i, sample in enumerate(SAMPLES)]
    loader = load(PLAN, samples, fields=FIELDS)
    with pytest.raises(ValueError, match=re.escape(said)):
        list(loader)


def without(*names):
    return [{name: value for name, value in sample.items() if name not in names} for sample in SAMPLES]


def with_field(name, make):
    return [sample | {name: make(len(sample["tokens"]))} for sample in without("text")]


@pytest.mark.parametrize(
    ("samples", "options", "said"),
    [
        (SAMPLES, {}, "the field 'text' holds text, no numbers: give fields={name: axes, …} without it"),
        (with_field("ids", np.arange), {}, "arrays of the names 'ids', so no field can: rename them, or give"),
        (with_field("lengths", np.arange), {"fields": {"lengths": "length"}}, "arrays of the names 'lengths'"),
        (with_field("more", lambda length: np.zeros(length + 1)), {}, "which length 'more' have is unclear: give"),
        (with_field("more", lambda length: np.zeros((2, length))), {}, "the field 'more' has (2, "),
        (without("text", "tokens", "near"), {}, "samples of one length alone do not show which axes"),
        (SAMPLES, {"fields": {"label": "row"}}, "no field has the axis 'length': found label ()"),
        (SAMPLES, {"fields": {"near": "length", "label": "row"}}, "the field 'near' has ("),
        (SAMPLES, {"fields": {"tokens": "source"}}, "axes of the field 'tokens' must be one of 'row', 'length', "),
        (SAMPLES, {"fields": {"token": "length"}}, "samples have no field 'token', but 'tokens', 'near', "),
        ([s["tokens"] for s in SAMPLES], {"fields": FIELDS}, "fields= are those of mappings, dataclasses or named"),
        (with_field("weights", lambda length: np.zeros((length, 2))), {}, "weights are those of the loss: one a"),
        (SAMPLES, {"fields": FIELDS | {"weights": "length length"}}, "samples have no field 'weights', but"),
        (with_field("weights", lambda _: 1), {"fields": FIELDS | {"weights": "length length"}}, "not 'length length'"),
        (with_field("weights", lambda _: "heavy"), {"fields": FIELDS}, "'weights' holds text, no numbers: rename it"),
        (with_field("more", lambda n: WeightedTokens([1] * n, [1] * n)), {}, "WeightedTokens: give the tokens of"),
        (SAMPLES, {"fields": ["tokens"]}, "fields= must map names to axes, such as {'tokens': 'length'}, not be ["),
        (SAMPLES, {"fields": {0: "length"}}, "fields= must map names to axes, such as {'tokens': 'length'}, not be {"),
        (SAMPLES, {"fields": FIELDS, "collate": collate_tokens}, "give them without collate="),
    ],
)  # fmt: skip
def test_fields_that_are_unclear_are_listed(samples, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load(PLAN, samples, **options)


def test_loss_weights_of_fields_are_checked():
    samples = with_field("weights", lambda length: np.full(length, -1.0 if length == 3 else 1.0))
    with pytest.raises(ValueError, match=r"id \d+: loss weights must be finite and at least 0"):
        list(load(PLAN, samples))


@pytest.mark.parametrize("fields", [None, {"tokens": "length", "label": "row"}], ids=["found", "named"])
def test_loss_weights_of_a_mixture_of_named_tuples_count(fields):
    halves = [[Tuple(np.arange(n), 1) for n in LENGTHS[part].tolist()] for part in (slice(15), slice(15, 30))]
    mixture = Mixture(halves, loss_weights=[1.0, 0.5])
    plan = make_plan(LENGTHS, [(30, 9)], order="dataset")
    (batch,) = load(plan, mixture, fields=fields, lengths=LENGTHS)
    assert (batch["weights"][0].sum(axis=1) == LENGTHS * np.repeat([1.0, 0.5], 15)).all()
    assert predict(
        lambda _, batch: batch["weights"].sum(axis=1), 0, mixture, max_tokens=64, lengths=LENGTHS, fields=fields,
        progress=False,
    ) == (LENGTHS * np.repeat([1.0, 0.5], 15)).tolist()  # fmt: skip


def test_weights_of_samples_that_are_cut_are_cut():
    samples = with_field("weights", lambda length: np.arange(length + 2) / 4)
    longer = [sample | {"tokens": np.arange(len(sample["tokens"]) + 2)} for sample in samples]
    loader = load(PLAN, longer, fields={"tokens": "length"}, lengths=LENGTHS, on_mismatch="adjust")
    assert sum(float(batch["weights"].sum()) for batch in loader) == sum(n * (n - 1) / 8 for n in LENGTHS.tolist())


def test_pair_features_cannot_be_packed():
    with pytest.raises(ValueError, match="'near' cannot be packed, having two axes of lengths: plan without packing"):
        load(plan_of("best_fit", LENGTHS), SAMPLES, fields=FIELDS)


def test_two_lengths_are_told_by_lengths_or_by_the_user():
    lengths = np.random.default_rng(2).integers(1, 9, (30, 2))
    samples = [{"nodes": np.zeros((n, 3)), "edges": np.zeros((e, 2), int)} for n, e in lengths.tolist()]
    plan = plan_of("pairs", lengths)
    for options in ({"lengths": lengths}, {"fields": {"nodes": "source", "edges": "target"}}):
        batch = next(load(plan, samples, **options))
        assert batch["nodes"].shape[2] != 2 == batch["edges"].shape[3]
    with pytest.raises(
        ValueError, match=r"give lengths=, which decide the axes of fields, or give fields=.*found nodes \("
    ):
        load(plan, samples)
    same = [{"nodes": np.zeros((n, 3)), "edges": np.zeros((n, 2), int)} for n, _ in lengths.tolist()]
    with pytest.raises(ValueError, match="which length 'nodes', 'edges' have is unclear"):
        load(make_plan(lengths[:, [0, 0]], [(2, 9, 9)]), same, lengths=lengths[:, [0, 0]])


@pytest.mark.parametrize("form", ["padded", "best_fit"])
def test_a_step_compiled_for_the_loader_trains_on_fields(form):
    fields = FIELDS if form == "padded" else {name: FIELDS[name] for name in ("tokens", "label")}
    plan = plan_of(form, LENGTHS)

    def loss_fn(table, microbatch):
        real = microbatch["is_real"].astype(jnp.float32)
        return (table[microbatch["label"]] * real).sum(), real.sum()

    step = make_train_step(loss_fn, optax.sgd(0.1))
    state = step.init(np.arange(3.0))
    batches = load(plan, SAMPLES, fields=fields)
    compiled = compile_buckets(step, state, batches, progress=False)
    with no_recompiles():
        for batch, planned in zip(batches, plan.num_sequences.tolist(), strict=True):
            state, metrics = compiled(state, batch)
            assert float(metrics.weight_sum) == planned


def test_a_step_compiled_for_one_plan_trains_on_plans_of_all_epochs_from_files(tmp_path):
    """Whose rows have other numbers of samples."""
    lengths = [4, 4, 2, 2, 2, 6, 1]
    samples = [{"tokens": np.arange(length), "label": length} for length in lengths]
    plans = [make_plan(lengths, [(2, 6)], packing="wrapped", epoch=epoch) for epoch in range(3)]
    for epoch, plan in enumerate(plans):
        plan.save(tmp_path / f"{epoch}.npz")
    assert {np.diff(plan.row_offsets).max() for plan in plans} == {3, 4}
    batches = load(lambda epoch: Plan.load(tmp_path / f"{epoch}.npz"), samples, num_epochs=3)
    shapes = load(plans[0], samples).shapes
    step = compile_buckets(
        lambda state, batch: (state + batch["is_real"].sum(), {}), jnp.int32(0), shapes, progress=False
    )
    total = jnp.int32(0)
    with no_recompiles():
        for batch in batches:
            total, _ = step(total, batch)
    assert total == sum(plan.num_samples for plan in plans)


@pytest.mark.multiprocess
def test_processes_have_the_fields_of_their_own_rows_and_agree_on_them():
    printed = processes.run(Path(__file__).with_name("run_fields.py"), 2)
    for rank, (own, rows, refused) in enumerate(json.loads(text.splitlines()[-1]) for text in printed):
        expected = list(run_fields.batches())
        assert expected[-1]["is_real"].tolist() == [[True, False, False], [False, False, False]]
        assert (expected[-1]["near"][1, :, :1, :1] == 6).all()  # what padding rows repeat is of the other process
        for found, batch in zip(own, expected, strict=True):
            of_process = {
                name: (array[rank : rank + 1] if array.ndim else array).tolist() for name, array in batch.items()
            }
            assert found == of_process
        for found, batch in zip(rows, expected, strict=True):  # of the six rows, in their order, the half of a process
            in_order = {name: batch[name].swapaxes(0, 1).reshape(6, *batch[name].shape[2:]) for name in ("near", "ids")}
            half = slice(3 * rank, 3 * rank + 3)
            assert found == {"x": in_order["near"][half].tolist(), "rows": in_order["ids"][half].tolist()}
        assert refused[0] == "UserError"
        assert "processes differ in the fields of samples" in refused[1]


def test_samples_of_any_length_tell_the_axes_of_fields():
    """Given the lengths, also where the first and last steps of a bucket hold one length alone."""
    lengths = np.array([4, 4, 4, 4, 1, 4, 4, 4])
    samples = [{"x": np.ones((length, 2), np.float32), "y": 1.0} for length in lengths]
    plan = make_plan(lengths, [(1, 4)], order="dataset")
    batch = next(load(plan, samples, lengths=lengths))
    assert batch["x"].shape == (1, 1, 4, 2)
    assert batch["y"].shape == (1, 1)


WRONG_SHAPES = [
    lambda sample: {"near": np.zeros([len(sample["tokens"]) + 1] * 2, int)},
    lambda sample: {"tokens": np.zeros(len(sample["tokens"]) + 1, int)},
    lambda sample: {"tokens": sample["tokens"][:, None]},
    lambda sample: {"label": np.zeros(4, int)},
]


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
@pytest.mark.parametrize("bad", [int(LENGTHS.argmax())])
def test_a_sample_of_other_shapes_is_skipped_where_fields_are_given(bad, wrong):
    samples = without("text")
    samples[bad] = samples[bad] | wrong(samples[bad])
    options = {"lengths": LENGTHS, "on_bad_sample": "skip", "max_bad_fraction": 0.1}
    with pytest.raises(ValueError, match=r"which length .* have is unclear: give fields="):
        load(PLAN, samples, **options)
    loader = load(PLAN, samples, fields=FIELDS, **options)
    found = np.concatenate([np.asarray(batch["ids"]).ravel() for batch in loader])
    assert sorted(found[found >= 0].tolist()) == [i for i in range(len(samples)) if i != bad]
    assert [skipped.id for skipped in loader.skipped] == [bad]


def test_a_padding_that_nobody_said_is_no_fault_of_samples():
    """Which would be left out as bad ones; positions of others are a fault."""
    options = {"lengths": LENGTHS, "on_bad_sample": "skip", "max_bad_fraction": 0.1}
    samples = [{"x": np.ones(n), "at": np.zeros(n, int)} for n in LENGTHS.tolist()]
    samples[3]["at"][0] = -100
    with pytest.raises(ValueError, match=r"'at': \('length', -100\).*id 3"):
        list(load(PLAN, samples, fields={"x": "length", "at": "length"}, **options))
    loader = load(PLAN, samples, fields={"x": "length", "at": "length of length"}, **options)
    assert len(list(loader)) == PLAN.num_steps
    assert [skipped.id for skipped in loader.skipped] == [3]


@pytest.mark.parametrize("num_lengths", [1, 2])
def test_the_only_row_of_a_field_is_not_its_length(num_lengths):
    """As tokenizers return it, where all samples are equally long; what has another field of the length has it."""
    names = ["input_ids", "labels"][:num_lengths]
    fields = dict(zip(names, [["length"], ["source", "target"]][num_lengths - 1], strict=True))
    samples = [{name: np.arange(4)[None] for name in names}] * 3
    plan = make_plan(np.ones((3, num_lengths), int).squeeze(), [(3, *[8] * num_lengths)])
    with pytest.raises(ValueError, match=r"all samples have length 1 in the plan.*only row, input_ids\[0\], and plan"):
        load(plan, samples, fields=fields)
    (batch,) = load(
        plan, [sample | {"labels": [7]} for sample in samples], fields=fields | {"labels": [*fields.values()][-1]}
    )
    assert batch["input_ids"].shape == (1, 3, 8, 4)


def test_a_resume_finds_the_fields_that_the_first_run_found():
    """Also where the first sample to come has another type than those that tell the fields."""
    lengths = [1, 4, 3, 2, 4, 1]
    samples = [{"x": np.ones(n, np.float64 if i == 2 else np.int64)} for i, n in enumerate(lengths)]
    plan = make_plan(lengths, [(1, 4)], order="dataset")
    specs = [load(plan, samples, lengths=lengths, start_step=start).specs for start in range(plan.num_steps)]
    assert all(spec == specs[0] for spec in specs)


@pytest.mark.parametrize("kind", [float, np.array, lambda value: np.full((5, 40), value)])
def test_floats_that_would_become_infinite_are_refused(kind):
    samples = [{"tokens": np.ones(n), "more": kind(0.5)} for n in LENGTHS.tolist()]
    samples[4] = samples[4] | {"more": kind(np.inf)}
    assert np.isinf(np.concatenate([np.ravel(batch["more"]) for batch in load(PLAN, samples)])).any()
    samples[4] = samples[4] | {"more": kind(-1e39)}
    with pytest.raises(ValueError, match=r"id 4: .*overflow"):
        list(load(PLAN, samples))
    samples[4] = samples[4] | {"more": kind(0.5), "tokens": np.full(LENGTHS[4], 1e39)}
    with pytest.raises(ValueError, match=r"id 4: .*overflow"):
        list(load(PLAN, samples))


def test_tensors_of_types_that_numpy_lacks_are_refused_by_name():
    torch = pytest.importorskip("torch")
    samples = with_field("more", lambda length: torch.ones(length, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"'more', torch\.bfloat16: give ten"):
        list(load(PLAN, samples))
