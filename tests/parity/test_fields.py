"""Batches of samples with named fields, against rows that are filled one by one."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torch_ref

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, 13, 43)
PAIR_LENGTHS = np.stack([LENGTHS, RNG.integers(2, 13, 43)], axis=1)


@dataclasses.dataclass
class Graph:
    """A sample that is no dict."""

    nodes: np.ndarray
    edges: np.ndarray
    near: np.ndarray
    label: int
    weights: float


def sample_of(number, length):
    """One of a single length."""
    rng = np.random.default_rng(number)
    return {
        "tokens": rng.integers(1, 99, length).astype(np.int32),
        "image": rng.normal(size=(length, 3)).astype(np.float32),
        "mask": rng.random(length) < 0.5,
        "label": number % 7,
        "codes": rng.integers(0, 255, 4).astype(np.uint8),
        "weights": rng.random(length).astype(np.float32),
    }


def graph_of(number, lengths):
    """One of two lengths."""
    num_nodes, num_edges = lengths
    rng = np.random.default_rng(number)
    near = rng.normal(size=(num_nodes, num_nodes, 2)).astype(np.float32)
    return Graph(near[0], rng.integers(1, 9, num_edges).astype(np.int32), near, number % 7, number / 8)


SAMPLES = [sample_of(i, n) for i, n in enumerate(LENGTHS.tolist())]
SQUARE = [
    sample | {"near": np.random.default_rng(n).normal(size=(n, n, 2)).astype(np.float32)}
    for sample, n in zip(SAMPLES, LENGTHS.tolist(), strict=True)
]
GRAPHS = [graph_of(i, pair) for i, pair in enumerate(PAIR_LENGTHS.tolist())]
# Which of the lengths the leading axes of each field have.
AXES = {"tokens": (0,), "image": (0,), "mask": (0,), "label": (), "codes": (), "weights": (0,)}
GRAPH_AXES = {"nodes": (0,), "edges": (1,), "label": (), "weights": ()}
GRAPH_FIELDS = {"nodes": "source", "edges": "target", "label": "row", "weights": "row"}


def padded(package, lengths, buckets, **options):
    return package.make_plan(lengths, buckets, order="shuffle", num_microbatches=2, **options)


def packed(package, lengths, *row, **options):
    return padded(package, lengths, [(4, *row)], packing="best_fit", **options)


# The plan, its samples, the lengths of their axes, and the argument `fields`.
CASES = {
    "padded": (lambda package: padded(package, LENGTHS, [(4, 6), (3, 14)]), SQUARE, AXES | {"near": (0, 0)}, None),
    "cut": (
        lambda package: padded(package, LENGTHS, [(3, 9)], overlong="truncate"),
        SQUARE,
        AXES | {"near": (0, 0)},
        None,
    ),
    "packed": (lambda package: packed(package, LENGTHS, 20), SAMPLES, AXES, None),
    "split": (lambda package: packed(package, LENGTHS, 7, overlong="split"), SAMPLES, AXES, None),
    "wrapped": (lambda package: padded(package, LENGTHS, [(4, 17)], packing="wrapped"), SAMPLES, AXES, None),
    "pairs": (
        lambda package: padded(package, PAIR_LENGTHS, [(4, 8, 12), (3, 14, 14)]),
        GRAPHS,
        GRAPH_AXES | {"near": (0, 0)},
        GRAPH_FIELDS | {"near": "source source"},
    ),
    "packed pairs": (lambda package: packed(package, PAIR_LENGTHS, 20, 18), GRAPHS, GRAPH_AXES, GRAPH_FIELDS),
}


def values_of(sample):
    """The fields of a dict or dataclass, as arrays."""
    return {name: np.asarray(value) for name, value in (sample if isinstance(sample, dict) else vars(sample)).items()}


# The padding values of some fields.
PADDING = {"tokens": -100, "image": np.nan, "mask": True, "label": -1, "codes": 255, "near": 0.5, "edges": -(2**31)}


def say(axes, padding):
    """The argument `fields` for axes and padding values."""
    words = ["source", "target"] if (1,) in axes.values() else ["length"]
    said = {name: " ".join(words[side] for side in of_field) or "row" for name, of_field in axes.items()}
    return said | {name: (said[name], value) for name, value in padding.items() if name in said}


def slow_batch(plan, step, samples, axes, *, repeats, padding=()):
    """What a batch holds, written one sample after the other."""
    padding = dict(padding)
    limits = plan.buckets.shapes[plan.step_bucket[step]][1:]
    is_packed = plan.row_offsets is not None
    sides = ["source_", "target_"] if len(limits) == 2 else [""]
    ids, starts = plan.rows(step), plan.chunks(step)
    ids = ids if is_packed else ids[..., None]
    shape = ids.shape[:2]
    slots = (plan.samples_per_row[plan.step_bucket[step]],) if is_packed else ()
    batch = {"num_sequences": np.float32(plan.num_sequences[step]), "weights": np.zeros((*shape, limits[-1]))}
    batch |= {"ids": np.full((*shape, *slots), -1), "is_real": np.zeros((*shape, *slots), bool)}
    for side, limit in zip(sides, limits, strict=True):
        for name in ("segment_ids", "positions") if is_packed else ("lengths",):
            batch[side + name] = np.zeros((*shape, limit) if is_packed else shape, int)
    for name, of_field in axes.items():
        if name != "weights":
            value = values_of(samples[0])[name]
            around = [limits[side] for side in of_field] or slots
            whole = (*shape, *around, *value.shape[len(of_field) :])
            batch[name] = np.full(whole, padding.get(name, 0), value.dtype)
    for place in np.ndindex(shape):
        is_real = ids[place][0] >= 0
        if not is_real and not repeats:
            continue
        at, begin = place if is_real else (0, 0), [0] * len(sides)
        for slot, i in enumerate(ids[at][ids[at] >= 0].tolist()):
            values = values_of(samples[i])
            first = 0 if starts is None else starts[at][slot]
            whole = [next(len(values[name]) for name in axes if axes[name] == (side,)) for side in range(len(sides))]
            room = [limit - before for limit, before in zip(limits, begin, strict=True)]
            sizes = [min(size - first, limit) for size, limit in zip(whole, room, strict=True)]
            entry = (*place, slot) if is_packed else place
            if is_real:
                batch["ids"][entry], batch["is_real"][entry] = i, True
                weights = np.broadcast_to(values["weights"], whole[-1])[first : first + sizes[-1]]
                batch["weights"][place][begin[-1] : begin[-1] + sizes[-1]] = weights
            for name, of_field in axes.items():
                if len(of_field) == 2:
                    corner = tuple(slice(sizes[side]) for side in of_field)
                    batch[name][place][corner] = values[name][corner]
                elif of_field and name != "weights":
                    (side,) = of_field
                    part = values[name][first : first + sizes[side]]
                    batch[name][place][begin[side] : begin[side] + sizes[side]] = part
                elif name != "weights":
                    batch[name][entry] = values[name]
            for k, side in enumerate(sides):
                if is_packed:
                    batch[f"{side}segment_ids"][place][begin[k] : begin[k] + sizes[k]] = slot + 1
                    batch[f"{side}positions"][place][begin[k] : begin[k] + sizes[k]] = np.arange(sizes[k])
                else:
                    batch[f"{side}lengths"][place] = sizes[k]
                begin[k] += sizes[k]
    return batch


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.shape(found[name]) == np.shape(value), name
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=1e-6, atol=0, err_msg=name)


@pytest.mark.parametrize("padding_rows", ["zeros", "repeat"])
@pytest.mark.parametrize("kind", CASES)
def test_every_field_lies_where_its_sample_does(package, kind, padding_rows):
    """Padded, packed or stacked, on both axes where there are two; with weights and ids."""
    make, samples, axes, fields = CASES[kind]
    plan = make(package)
    batches = list(package.load(plan, samples, fields=fields, padding_rows=padding_rows))
    assert len(batches) == plan.num_steps
    num_padding_rows = 0
    for step, batch in enumerate(batches):
        expected = slow_batch(plan, step, samples, axes, repeats=padding_rows == "repeat")
        num_padding_rows += int((~expected["is_real"].reshape(*expected["weights"].shape[:2], -1)[..., 0]).sum())
        assert_equal(batch, expected)
        for name in axes.keys() - {"label"}:  # a Python number, which has no dtype
            expected_dtype = np.float32 if name == "weights" else values_of(samples[0])[name].dtype
            assert np.asarray(batch[name]).dtype == expected_dtype
    assert num_padding_rows


@pytest.mark.parametrize("kind", CASES)
def test_padding_holds_the_value_that_is_given(package, kind):
    """After samples, in padding rows, around squares, and in stacked fields; 0 in fields without one."""
    make, samples, axes, _ = CASES[kind]
    plan = make(package)
    batches = list(package.load(plan, samples, fields=say(axes, PADDING)))
    for step, batch in enumerate(batches):
        assert_equal(batch, slow_batch(plan, step, samples, axes, repeats=False, padding=PADDING))
    assert any((np.asarray(batch["label"]) == -1).any() for batch in batches)


@pytest.mark.parametrize("axes", ["length", "row", "length length"])
def test_targets_that_losses_ignore_need_a_padding_that_is_said(package, axes):
    """Where −100 is in samples, a padding of 0 would be learned as a target; bytes, floats and what is given may."""
    plan = package.make_plan([3, 5, 2, 4], [(3, 7)], order="dataset")
    shape = {"length": 1, "row": 0, "length length": 2}[axes]
    samples = [{"x": np.ones(n, np.float32), "labels": np.full((n,) * shape, n)} for n in (3, 5, 2, 4)]
    for i in (1, 3):
        samples[i]["labels"][(..., *[-1] * bool(shape))] = -100

    def load(dtype=np.int64, labels=axes):
        cast = [sample | {"labels": sample["labels"].astype(dtype)} for sample in samples]
        return [*package.load(plan, cast, fields={"x": "length", "labels": labels})]

    complete = rf"fields=\{{'x': 'length', 'labels': \('{axes}', -100\)\}}"
    with pytest.raises(ValueError, match=rf"'?labels'? .*-100.*{complete}.*\('{axes}', 0\).*id 1\b"):
        load()
    for dtype in (np.uint8, np.float32):
        load(dtype)
    assert any((np.asarray(batch["labels"]) == 0).any() for batch in load(labels=(axes, 0)))
    learned = [np.asarray(batch["labels"]) != -100 for batch in load(labels=(axes, -100))]
    assert sum(map(np.sum, learned)) == sum(int((sample["labels"] != -100).sum()) for sample in samples)


@pytest.mark.parametrize("kind", ["padded", "cut", "packed", "split", "wrapped"])
def test_positions_in_a_sample_become_positions_in_its_row(package, kind):
    """Wherever the sample begins, in the row and, if it is cut, in itself; padding is the place after the row."""
    make, samples, _, _ = CASES[kind]
    samples = [{"own": np.arange(n, dtype=np.uint8)[:, None], "x": np.ones(n)} for n in LENGTHS.tolist()]
    fields = {"own": "length of length", "x": "length"}
    for batch in package.load(make(package), samples, fields=fields):
        (own, _), x = (
            np.moveaxis(np.broadcast_to(batch["own"], (*batch["own"].shape[:3], 2)), 3, 0),
            np.asarray(batch["x"]),
        )
        np.testing.assert_array_equal(own, np.where(x > 0, np.arange(x.shape[2]), x.shape[2]))
        assert np.asarray(batch["own"]).dtype == (np.int64 if package is torch_ref else np.int32)


@pytest.mark.parametrize("kind", ["pairs", "packed pairs"])
def test_bonds_join_the_atoms_that_they_join_in_their_molecule(package, kind):
    """Along the other length, one a sample, and with a value for none; padding is a place that is none."""
    rng = np.random.default_rng(7)
    samples = [
        {
            "atoms": rng.normal(size=n).astype(np.float32),
            "bonds": rng.integers(0, n, (e, 2)),
            "root": rng.integers(0, n),
            "twin": np.where(rng.random(e) < 0.5, -7, rng.integers(0, n, e)),
        }
        for n, e in PAIR_LENGTHS.tolist()
    ]
    fields = {"atoms": "source", "bonds": "target of source", "root": "row of source", "twin": ("target of source", -7)}
    plan = CASES[kind][0](package)
    num_seen = 0
    for batch in package.load(plan, samples, fields=fields):
        batch = {name: np.asarray(array) for name, array in batch.items()}
        length, num_bonds = batch["atoms"].shape[2], batch["bonds"].shape[2]
        if kind == "pairs":
            segments = np.arange(num_bonds) < batch["target_lengths"][..., None]
        else:
            segments = batch["target_segment_ids"]
        for m, b in np.ndindex(batch["atoms"].shape[:2]):
            atoms = np.append(batch["atoms"][m, b], np.nan)  # the place after the row
            for slot, i in enumerate(np.atleast_1d(batch["ids"][m, b]).tolist()):
                root = np.atleast_1d(batch["root"][m, b])[slot]
                if i < 0:
                    assert root == length
                    continue
                is_own, sample = segments[m, b] == slot + 1, samples[i]
                np.testing.assert_array_equal(atoms[batch["bonds"][m, b][is_own]], sample["atoms"][sample["bonds"]])
                assert atoms[root] == sample["atoms"][sample["root"]]
                twin, is_none = batch["twin"][m, b][is_own], sample["twin"] == -7
                assert ((twin == -7) == is_none).all()
                np.testing.assert_array_equal(atoms[twin[~is_none]], sample["atoms"][sample["twin"][~is_none]])
                num_seen += 1
            assert (batch["bonds"][m, b][segments[m, b] == 0] == length).all()
            assert (batch["twin"][m, b][segments[m, b] == 0] == -7).all()
    assert num_seen == len(samples)


@pytest.mark.parametrize(
    ("packing", "values", "padding", "said"),
    [
        ({}, {1: 5}, None, r"id 1: .*\b5\b"),
        ({}, {2: -1}, None, r"id 2: .*-1"),
        ({}, {2: -1}, -2, r"id 2: .*-1"),
        ({}, {2: 3}, 3, r"id 2: .*\b3\b"),
        ({"overlong": "truncate"}, {1: 4, 3: 4}, None, r"id 1: .*\b4\b.*\b0 to 3\b"),
        ({"packing": "best_fit", "overlong": "split"}, {1: 4}, None, r"id 1: .*\b4\b.*\b0 to 3\b"),
        ({"packing": "wrapped"}, {1: 0}, None, r"id 1: .*\b0\b.*\b1 to 4\b"),
    ],
    ids=str,
)
def test_positions_outside_of_their_sample_are_refused(package, packing, values, padding, said):
    """Or outside of the part that is left of it; a sample of 5 is cut to 4, or into 1 and 4."""
    lengths = [3, 5, 3, 5]
    samples = [{"x": np.ones(n), "at": np.full((n, 1), values.get(i, 1))} for i, n in enumerate(lengths)]
    plan = package.make_plan(lengths, [(2, 4 if packing else 6)], order="dataset", **packing)
    axes = "length of length"
    with pytest.raises(ValueError, match=said):
        list(package.load(plan, samples, fields={"x": "length", "at": axes if padding is None else (axes, padding)}))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("length source", "label.*'length source'"),
        ("length of", "label.*'length of'"),
        ("row of row", "label.*'row of row'"),
        ("row of length of length", "label.*of length of length"),
        (("row",), r"label.*\('row',\)"),
        (("row", "0"), r"label.*\('row', '0'\)"),
        (("row", None), r"label.*None"),
        (("row", 1, 2), r"label.*1, 2"),
        ("row of source", r"label.*'row of source'"),
        (("row", 0.5), r"label.* 0\.5|0\.5.*label"),
        (("row", 2**40), f"label.*{2**40}|{2**40}.*label"),
    ],
    ids=str,
)
def test_what_is_not_said_as_a_field_is_refused(package, said, found):
    """Other words than lengths and "row"; padding that is no number of the field's dtype."""
    plan = package.make_plan(LENGTHS, [(43, 12)])
    samples = [{"tokens": sample["tokens"], "label": np.int32(1)} for sample in SAMPLES]
    with pytest.raises(ValueError, match=found):
        next(iter(package.load(plan, samples, fields={"tokens": "length", "label": said})))


def test_weights_are_zero_in_padding(package):
    """Another value would be learned from."""
    plan = package.make_plan(LENGTHS, [(43, 12)])
    fields = {"tokens": "length", "weights": ("length", 1)}
    with pytest.raises(ValueError, match="weights"):
        next(iter(package.load(plan, SAMPLES, fields=fields)))


@pytest.mark.parametrize("plain", ["list", "array"])
def test_a_second_length_can_be_zero(package, plain):
    """An empty list or array has no elements, and its row none on that side."""
    lengths = [(2, 3), (1, 0), (3, 0), (2, 1)]
    samples = [{"nodes": [1] * a, "edges": [[1, 1]] * b} for a, b in lengths]
    if plain == "array":
        samples = [{"nodes": np.ones(a, np.int32), "edges": np.ones((b, 2), np.int32)} for a, b in lengths]
    plan = package.make_plan(lengths, [(1, 8, 4)], packing="best_fit", order="dataset")
    (batch,) = package.load(plan, samples, fields={"nodes": "source", "edges": "target"})
    of_row = np.asarray(batch["ids"])[0, 0]
    assert sorted(of_row[of_row >= 0].tolist()) == [0, 1, 2, 3]
    counted = np.bincount(np.asarray(batch["target_segment_ids"]).ravel(), minlength=5)[1:]
    assert counted.tolist() == [lengths[i][1] for i in of_row[of_row >= 0]]
    assert np.asarray(batch["edges"]).sum() == 8


@pytest.mark.parametrize("is_named", [False, True])
def test_only_samples_of_the_longest_bucket_are_cut(package, is_named):
    """One that is longer than another bucket has not its planned length."""
    plan = package.make_plan([4, 8, 9], [(1, 4), (1, 8)], order="dataset", overlong="truncate")

    def loaded(*sizes):
        samples = [{"tokens": np.arange(n), "row": 0} if is_named else np.arange(n) for n in sizes]
        batches = package.load(plan, samples, fields={"tokens": "length", "row": "row"} if is_named else None)
        return [int((batch["lengths"] if is_named else batch.lengths).sum()) for batch in batches]

    assert loaded(4, 8, 9) == [4, 8, 8]
    with pytest.raises(ValueError, match=r"id 0: 6 \(limit 4\)"):
        loaded(6, 8, 9)


def test_a_single_float_among_integers_is_refused(package):
    """One odd sample does not make all of them floats."""
    samples = [{"x": np.ones(n), "y": 1 if n < 16 else 0.5} for n in range(1, 17)]
    plan = package.make_plan(range(1, 17), [(16, 16)], order="dataset")
    with pytest.raises(ValueError, match=r"id 15: .*\by\b.* float"):
        list(package.load(plan, samples, fields={"x": "length", "y": "row"}))


# What only torch_ref has


@pytest.mark.parametrize("padding_rows", ["omit", "repeat"])
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in ("split", "wrapped")])
def test_collated_microbatches_are_those_of_load(kind, padding_rows):
    """With m = 1, and `num_sequences` of the whole step."""
    make, samples, _, fields = CASES[kind]
    plan = make(torch_ref)
    steps = torch_ref.load(plan, samples, fields=fields, padding_rows=padding_rows.replace("omit", "zeros"))
    expected = [torch_ref.training.train.take_microbatch(batch, m) for batch in steps for m in range(2)]
    sampler = torch_ref.PlanBatchSampler(plan, padding_rows=padding_rows)
    planned = torch_ref.PlannedDataset(sampler, samples, fields=fields)
    found = list(DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate))
    for batch, other in zip(found, expected, strict=True):
        assert batch.pop("num_microbatches") == 2
        assert_equal(batch, {name: value[None] if value.ndim else value for name, value in other.items()})


def test_weights_of_targets_go_into_batches_of_pairs():
    """`WeightedTokens` as the target."""
    plan = torch_ref.make_plan([[1, 2], [2, 3]], [(2, 2, 3)], order="dataset")
    pairs = [([5], torch_ref.WeightedTokens([1, 2], [0.5, 2.0])), ([5, 6], [1, 2, 3])]
    (batch,) = torch_ref.load(plan, pairs)
    assert batch.weights.tolist() == [[[0.5, 2.0, 0.0], [1.0, 1.0, 1.0]]]
    assert batch.source_tokens.tolist() == [[[5, 0], [5, 6]]]


KINDS = {
    "bfloat16": (lambda n: torch.ones(n, 2, dtype=torch.bfloat16), torch.bfloat16),
    "integers": (lambda n: list(range(n)), torch.int64),
    "floats": (lambda n: [0.5] * n, torch.float32),
    "wide": (lambda n: np.arange(n, dtype=np.uint16), torch.int64),
    "double": (lambda n: np.ones((n, 1)), torch.float64),
    "read-only": (lambda n: np.broadcast_to(np.float16(1), (n, 3)), torch.float16),
    "flag": (lambda n: n > 4, torch.bool),
    "whole and half": (lambda n: n if n == 9 else n / 2, torch.float32),
    "score": (lambda n: n / 4, torch.float32),
    "double score": (lambda n: np.float64(n / 4), torch.float64),
    "narrower": (lambda n: np.arange(n, dtype=np.int16 if n == 9 else np.int8), torch.int16),
    "tensors and arrays": (lambda n: torch.arange(n) if n == 9 else np.arange(n), torch.int64),
}


GOOD = [{"tokens": np.ones(n, np.int64), "label": n} for n in (2, 4, 3)]
AS_ROW = {"tokens": "length", "label": "row"}


def changed(number, **fields):
    """The samples with one that is another."""
    return [sample | fields if i == number else sample for i, sample in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("samples", "fields", "said"),
    [
        (
            changed(0, label=[1]),
            AS_ROW,
            r"id 0: label is int64 \[1\], expected int64 \[\]",
        ),
        (changed(1, label=True), AS_ROW, r"id 1: label is bool \[\], expected int64 \[\]"),
        (changed(1, tokens=np.ones(3, np.int64)), None, r"hold 8 tokens, planned were 9.*id 1: 3"),
        (changed(1, tokens=np.ones(5, np.int64)), None, r"longer.*id 1: 5 \(limit 4\)"),
        (GOOD, {"tokens": "length", "gone": "row"}, r"missing: id 0: \['gone'\]"),
        ([sample | {"text": "a"} for sample in GOOD], None, r"leave others out, with fields=.*text: no array"),
        ([sample | {"ids": 1} for sample in GOOD], None, r"batches have ids of their own"),
        ([{"tokens": np.ones(3)}] * 3, None, r"no sizes vary.*give fields=.*tokens: float64 \[3\]"),
        ([s | {"x": np.ones(n)} for s, n in zip(GOOD, (1, 4, 3), strict=True)], None, r"2 sizes vary.*give fields="),
        (
            [s | {"x": np.ones(n)} for s, n in zip(GOOD, (1, 4, 3), strict=True)],
            {"tokens": "length", "x": "length"},
            r"differ in length: id 0: 1 of x, 2 of others",
        ),
        (GOOD, {"tokens": "long"}, r"fields\['tokens'\] must be 'length' or 'length length' or 'row'.*'long'"),
        (GOOD, {"tokens": "length row"}, r"fields\['tokens'\]"),
        (GOOD, {"label": "row"}, r"no field of label has the axis 'length'"),
        (GOOD, {"tokens": "length", "lengths": "row"}, r"lengths of their own"),
        ([s | {"weights": -1.0} for s in GOOD], None, r"weights must be finite and at least 0: id 0: -1"),
        ([s | {"weights": np.ones(2)} for s in GOOD], None, r"differ in length: id 1: 2 of weights, 4 of others"),
        (changed(1, weights=0.5), AS_ROW | {"weights": "row"}, r"no field weights, which fields= names: id 0, 2"),
        (GOOD, {"tokens": "length", "label": "length"}, r"id 0: label is int64 \[\], expected int64 \[length\]"),
        ([[1, 2], {"tokens": [1]}, [1, 2, 3]], None, r"id 1: tokens is no array of numbers"),
        ([GOOD[0], [1] * 4, GOOD[2]], {"tokens": "length"}, r"missing: id 1: \['tokens'\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_samples_and_fields_that_do_not_fit_are_named(samples, fields, said):
    """By id, field, what was found and what was expected."""
    plan = torch_ref.make_plan([2, 4, 3], [(3, 4)], order="dataset")
    with pytest.raises(ValueError, match=said):
        list(torch_ref.load(plan, samples, fields=fields))


def test_what_plans_cannot_hold_is_refused():
    """Two axes in packed rows; two lengths that nothing tells apart; words for padding rows."""
    plan = torch_ref.make_plan(LENGTHS, [(2, 14)], packing="best_fit")
    with pytest.raises(ValueError, match=r"packed rows cannot hold.*: near$"):
        list(torch_ref.load(plan, SQUARE))
    with pytest.raises(ValueError, match=r"packed rows cannot hold.*: near$"):
        torch_ref.load(plan, SQUARE, fields={"tokens": "length", "near": "length length"})
    pairs = torch_ref.make_plan(PAIR_LENGTHS, [(2, 14, 14)])
    with pytest.raises(ValueError, match=r"samples have two: give fields=.*'source'.*nodes: float32"):
        list(torch_ref.load(pairs, GRAPHS))
    with pytest.raises(ValueError, match="'target'"):
        torch_ref.load(pairs, GRAPHS, fields={"nodes": "source"})
    with pytest.raises(ValueError, match=r"padding_rows.*'omit'"):
        torch_ref.load(plan, SAMPLES, padding_rows="omit")


def test_a_step_trains_on_fields_and_moves_with_them():
    """One label a row: the gradient is that of the real rows alone, whatever fills the others."""
    plan = torch_ref.make_plan(LENGTHS, [(4, 14)], num_microbatches=2)
    model = torch.nn.Linear(3, 7).double()

    def loss_fn(model, microbatch):
        logits_BxK = model(microbatch["image"].double().sum(1))
        losses_B = torch.nn.functional.cross_entropy(logits_BxK, microbatch["label"], reduction="none")
        return (losses_B * microbatch["is_real"]).sum(), microbatch["is_real"].sum()

    gradients, step = [], int(np.argmin(plan.num_sequences))
    assert plan.num_sequences[step] < 8
    for padding_rows in ("zeros", "repeat"):
        batch = next(iter(torch_ref.load(plan, SAMPLES, padding_rows=padding_rows, start_step=step)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        metrics = torch_ref.train_step(model, optimizer, torch_ref.to_device(batch, "cpu"), loss_fn=loss_fn)
        assert metrics["num_sequences"] == metrics["weight"] == plan.num_sequences[step]
        gradients.append(model.weight.grad)
    torch.testing.assert_close(*gradients)
    held = [SAMPLES[i] for i in plan.sample_ids[plan.step_offsets[step] : plan.step_offsets[step + 1]]]
    logits = model(torch.tensor(np.array([sample["image"].sum(0) for sample in held])).double())
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([sample["label"] for sample in held]))
    expected = torch.autograd.grad(loss, model.weight)[0]
    torch.testing.assert_close(gradients[0], expected, rtol=1e-6, atol=1e-6)
    assert torch_ref.to_device(batch, "meta")["image"].device.type == "meta"


def test_floats_that_would_become_infinite_are_refused():
    plan = torch_ref.make_plan(LENGTHS, [(43, 12)])
    samples = [sample | {"label": 1e39 if i == 4 else 0.5} for i, sample in enumerate(SAMPLES)]
    with pytest.raises(ValueError, match=r"id 4: label is float64 \[\], expected float32 \[\]"):
        next(iter(torch_ref.load(plan, samples)))
