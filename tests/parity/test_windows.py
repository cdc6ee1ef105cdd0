"""Windows: which part of a sample stays where it is cut, in plans, packings, batches and streams."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torch_ref

from . import assert_same_packing, assert_same_plan, find, in_both
from .inputs import few, moderate, seeds

WINDOWS = ["truncate_start", "truncate_random"]
WAYS = [
    {},
    {"order": "length"},
    {"packing": "best_fit"},
    {"packing": "best_fit", "samples_per_row": 2},
    {"sequences_per_step": 4},
    {"tokens_per_step": 40},
    {"packing": "best_fit", "tokens_per_step": 40},
]
samples = st.lists(st.integers(1, 40), min_size=1, max_size=25)
pairs = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=20)


def begin(overlong, sample, length, limit, seed, epoch, side=0):
    """The first token that stays of a sample, in Python's integers."""
    num_cut = max(int(length) - limit, 0)
    if overlong != "truncate_random":
        return num_cut * (overlong == "truncate_start")
    counter = np.array([0, 0, 0, 3 + side], np.uint64)
    raw = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter).random_raw(sample + 1)[-1]
    return (int(raw) >> 32) * (num_cut + 1) >> 32


def check_starts(plan, lengths, limits, seed, epoch):
    """A plan has the starts of the rule, or none where all samples fit."""
    of_samples = np.reshape(lengths, (len(lengths), -1))
    if (of_samples <= limits).all():
        assert plan.chunk_starts is None
        return
    expected = [
        [begin(plan.overlong, i, of_samples[i, side], limits[side], seed, epoch, side) for side in range(len(limits))]
        for i in plan.sample_ids.tolist()
    ]
    assert plan.chunk_starts.dtype == np.int64
    assert plan.chunk_starts.reshape(len(expected), -1).tolist() == expected


@moderate
@given(lengths=samples, overlong=st.sampled_from(WINDOWS), way=st.sampled_from(WAYS), seed=seeds, data=st.data())
def test_both_cut_alike_by_the_rule(lengths, overlong, way, seed, data):
    """The steps are those of "truncate", and every epoch has its own windows, also after balancing."""
    arguments = {"buckets": [(2, 4), (2, 16)], "num_microbatches": 2, "seed": seed} | way
    other = data.draw(st.integers(0, 2**63 - 1))
    one, two = in_both(lambda package: package.make_plan(lengths, **arguments, overlong=overlong))
    plain, _ = in_both(lambda package: package.make_plan(lengths, **arguments, overlong="truncate"))
    assert_same_plan(one, two)
    for name in ("sample_ids", "group_offsets", "group_tokens", "num_truncated"):
        assert np.array_equal(getattr(one, name), getattr(plain, name))
    assert (one.digest == plain.digest) == (max(lengths) <= 16)
    check_starts(one, lengths, [16], seed, 0)
    check_starts(one.of_epoch(other), lengths, [16], seed, other)
    assert_same_plan(one.of_epoch(other), two.of_epoch(other))
    costs = np.arange(one.num_rows if one.is_packed else len(lengths)) % 7
    balanced = in_both(lambda package: find(package, "balance_plan")(two if package is torch_ref else one, costs))
    assert_same_plan(*balanced)
    check_starts(balanced[0], lengths, [16], seed, 0)


@moderate
@given(lengths=pairs, overlong=st.sampled_from(WINDOWS), seed=seeds, epoch=seeds)
def test_each_side_of_packed_pairs_has_its_window(lengths, overlong, seed, epoch):
    """By a stream of its own; where pairs are not packed, none is cut."""
    drawn = {"overlong": overlong, "seed": seed, "epoch": epoch}
    plans = in_both(lambda package: package.make_plan(lengths, [(2, 12, 9)], packing="best_fit", **drawn))
    assert_same_plan(*plans)
    check_starts(plans[0], lengths, [12, 9], seed, epoch)
    packings = in_both(lambda package: package.pack_samples(lengths, [12, 9], order="shuffle", **drawn))
    assert_same_packing(*packings)
    check_starts(packings[0], lengths, [12, 9], seed, epoch)


def test_pairs_that_are_not_packed_are_not_cut(package):
    """As with "truncate"."""
    with pytest.raises(ValueError, match="truncate_start"):
        package.make_plan([(3, 30)], [(2, 12, 9)], overlong="truncate_start")


def test_windows_of_very_long_samples_are_exact():
    """Where a key times the places takes more than 64 bits."""
    lengths = [2**63 - 1, 2**62 + 5, 2**40 + 1, 2**33, 3]
    plans = in_both(lambda package: package.make_plan(lengths, [(2, 8)], overlong="truncate_random", seed=3))
    assert_same_plan(*plans)
    check_starts(plans[0], lengths, [8], 3, 0)


def test_windows_begin_everywhere_and_apart_from_the_order():
    """Uniformly from the first token to the last place, in every part of the shuffled order."""
    plan, _ = in_both(lambda package: package.make_plan([11] * 6000, [(6, 8)], overlong="truncate_random"))
    counts = np.array([np.bincount(part, minlength=4) for part in np.split(plan.chunk_starts, 2)])
    assert counts.shape == (2, 4)
    assert (np.abs(counts - 750) < 5 * 750**0.5).all()


@pytest.mark.parametrize("overlong", WINDOWS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_plan_keeps_its_windows_in_its_file(tmp_path, overlong, way):
    """Saved by one package and loaded by the other; edited starts are refused."""
    lengths = np.arange(1, 33)
    plans = in_both(lambda package: package.make_plan(lengths, [(2, 16)], overlong=overlong, **way))
    paths = [tmp_path / "one.npz", tmp_path / "other.npz"]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    loaded = in_both(lambda package: package.Plan.load(paths[package is not torch_ref]))
    assert_same_plan(*loaded)
    assert loaded[0].digest == plans[0].digest
    assert np.array_equal(loaded[0].chunk_starts, plans[0].chunk_starts)
    with np.load(tmp_path / "one.npz") as file:
        fields = dict(file)
    assert np.array_equal(fields["piece_starts"], plans[0].chunk_starts)
    np.savez(tmp_path / "edited.npz", **fields | {"piece_starts": fields["piece_starts"] * 0})
    for package in in_both(lambda package: package):
        with pytest.raises(ValueError, match="edited"):
            package.Plan.load(tmp_path / "edited.npz")


def test_the_digest_has_a_prefix_for_cut_samples(package):
    """Padded, packed and in groups."""
    for way, kind in (({}, b""), ({"packing": "best_fit"}, b"packed-")):
        plan = package.make_plan([3, 9, 30], [(2, 8)], overlong="truncate_start", order="dataset", **way)
        fields = [
            np.array([1, 1, plan.num_steps, 3]),
            np.array(plan.buckets.shapes),
            plan.step_bucket,
            plan.step_offsets,
        ]
        if plan.row_offsets is not None:
            fields += [np.array(len(plan.row_offsets) - 1), plan.row_offsets]
        content = b"".join(field.tobytes() for field in [*fields, plan.chunk_starts])
        ids = hashlib.sha256(plan.sample_ids.tobytes()).digest()
        assert plan.digest == hashlib.sha256(b"jvarlen-cut-" + kind + b"plan-1\0" + content + ids).hexdigest()
    grouped = package.make_plan([3, 9, 30], [(2, 4), (2, 8)], overlong="truncate_start", sequences_per_step=3)
    prefix = b"jvarlen-groups-cut-plan-1\0" + np.array([1, 2, 1, 2, 3]).tobytes()
    fields = [np.array(grouped.buckets.shapes), grouped.group_bucket, grouped.step_groups, grouped.group_offsets]
    content = b"".join(field.tobytes() for field in [*fields, grouped.chunk_starts])
    ids = hashlib.sha256(grouped.sample_ids.tobytes()).digest()
    assert grouped.digest == hashlib.sha256(prefix + content + ids).hexdigest()


def rows_of(batch):
    """The tokens and weights of each sample of a padded or packed batch, by id."""
    tokens, weights, ids = (np.asarray(each) for each in (batch.tokens, batch.weights, batch.ids))
    found = {}
    for place in np.argwhere(ids >= 0).tolist():
        row = tuple(place[:2])
        if ids.ndim == 3:
            is_own = np.asarray(batch.segment_ids)[row] == place[2] + 1
        else:
            is_own = np.arange(tokens.shape[2]) < np.asarray(batch.lengths)[row]
        found[int(ids[tuple(place)])] = tokens[row][is_own].tolist(), weights[row][is_own].tolist()
    return found


def batches_of(package, plan, dataset):
    """The batches of all groups; of torch_ref also by its sampler."""
    loaded = list(package.load(plan, dataset))
    loaded = list(itertools.chain.from_iterable(getattr(batch, "groups", [batch]) for batch in loaded))
    if package is torch_ref:
        sampler = torch_ref.PlanBatchSampler(plan)
        planned = torch_ref.PlannedDataset(sampler, dataset)
        loaded += list(DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate))
    return loaded


@pytest.mark.parametrize("overlong", ["truncate", *WINDOWS])
@pytest.mark.parametrize("way", [{}, {"packing": "best_fit"}, {"tokens_per_step": 40}], ids=str)
def test_batches_hold_the_windows(package, overlong, way):
    """Tokens and weights are the slices of the plan; a prompt that is too long keeps its answer."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, 24)
    tokens = [generator.integers(1, 99, length) for length in lengths]
    weights = [generator.random(length).astype(np.float32) for length in lengths]
    of_data = find(package, "WeightedTokens")
    dataset = [of_data(*sample) for sample in zip(tokens, weights, strict=True)]
    plan = package.make_plan(lengths, [(2, 8), (2, 16)], overlong=overlong, seed=5, num_microbatches=2, **way)
    found = {}
    for batch in batches_of(package, plan, dataset):
        found |= (rows := rows_of(batch))
        for i, row in rows.items():
            first = begin(overlong, i, int(lengths[i]), 16, 5, 0)
            part = slice(first, first + 16)
            assert row == (tokens[i][part].tolist(), weights[i][part].tolist())
    assert len(found) == 24


def test_a_prompt_that_is_too_long_keeps_its_answer(package):
    """Prompt 10, answer 4, limit 8: weight 4 is left with "truncate_start", none with "truncate"."""
    sample = find(package, "WeightedTokens")(np.arange(14), [0] * 10 + [1] * 4)
    left = {}
    for overlong in ("truncate", "truncate_start"):
        (batch,) = package.load(package.make_plan([14], [(1, 8)], overlong=overlong), [sample])
        left[overlong] = float(np.asarray(batch.weights).sum())
    assert left == {"truncate": 0, "truncate_start": 4}


def test_fields_and_squares_are_cut_at_the_same_tokens(package):
    """Along every axis of the length."""
    generator = np.random.default_rng(1)
    lengths = [12, 3, 9]
    dataset = [
        {"tokens": generator.integers(1, 9, n), "bias": generator.random((n, n)), "kind": np.int64(n)} for n in lengths
    ]
    axes = {"tokens": "length", "bias": "length length", "kind": "row"}
    plan = package.make_plan(lengths, [(3, 6)], overlong="truncate_random", order="dataset")
    (batch,) = package.load(plan, dataset, fields=axes)
    for row, (sample, start) in enumerate(zip(dataset, plan.chunk_starts.tolist(), strict=True)):
        part, size = slice(start, start + 6), min(lengths[row], 6)
        assert np.asarray(batch["tokens"])[0, row, :size].tolist() == sample["tokens"][part].tolist()
        square = np.asarray(batch["bias"])[0, row]
        assert np.allclose(square[:size, :size], sample["bias"][part, part], atol=1e-6)
        assert square.sum() == pytest.approx(sample["bias"][part, part].sum(), abs=1e-5)
        assert np.asarray(batch["kind"])[0, row] == lengths[row]


def test_pairs_in_batches_hold_the_windows_of_both_sides(package):
    """In packed rows."""
    generator = np.random.default_rng(2)
    lengths = np.stack([generator.integers(1, 30, 12), generator.integers(0, 30, 12)], axis=1)
    dataset = [tuple(generator.integers(1, 99, n) for n in both) for both in lengths]
    plan = package.make_plan(lengths, [(2, 16, 12)], packing="best_fit", overlong="truncate_random", seed=7)
    seen = 0
    for batch in package.load(plan, dataset):
        ids = np.asarray(batch.ids)
        for m, row, place in np.argwhere(ids >= 0).tolist():
            i = int(ids[m, row, place])
            for side, word in enumerate(("source", "target")):
                is_own = np.asarray(getattr(batch, f"{word}_segment_ids"))[m, row] == place + 1
                first = begin("truncate_random", i, int(lengths[i, side]), (16, 12)[side], 7, 0, side)
                expected = dataset[i][side][first : first + (16, 12)[side]]
                assert np.asarray(getattr(batch, f"{word}_tokens"))[m, row][is_own].tolist() == expected.tolist()
            seen += 1
    assert seen == 12


def test_a_sample_that_has_become_longer_does_not_lose_its_end_unseen(package):
    """The end of another length is elsewhere, so that it does not fit its bucket."""
    plan = package.make_plan([14], [(1, 8)], overlong="truncate_start")
    with pytest.raises(ValueError, match="id 0"):
        list(package.load(plan, [np.arange(20)]))


@few
@given(
    lengths=samples,
    overlong=st.sampled_from(WINDOWS),
    buffer=st.one_of(st.none(), st.integers(1, 9)),
    seed=seeds,
    data=st.data(),
)
def test_streams_cut_by_the_same_rule(lengths, overlong, buffer, seed, data):
    """Step by step in both packages, and after a resume."""
    arguments = {"buckets": [(2, 4), (2, 16)], "overlong": overlong, "shuffle_buffer": buffer, "seed": seed, "epoch": 1}
    num_taken = data.draw(st.integers(0, 3))

    def read(package):
        whole = list(package.stream_batches(lengths, **arguments))
        first = package.stream_batches(lengths, **arguments)
        taken = list(itertools.islice(first, num_taken))
        resumed = list(package.stream_batches(lengths, state=first.state()))
        for steps in (whole, [*taken, *resumed]):
            for step in steps:
                is_sample = step.ids >= 0
                ids = step.ids[is_sample].tolist()
                starts = [begin(overlong, i, lengths[i], 16, seed, 1) for i in ids]
                assert step.lengths[is_sample].tolist() == [min(lengths[i], 16) for i in ids]
                if step.starts is None:
                    assert all(lengths[i] <= 16 for i in ids)
                else:
                    assert step.starts[is_sample].tolist() == starts
                    assert (step.starts[~is_sample] == -1).all()
        assert len(whole) == len(taken) + len(resumed)
        return [step.ids.tolist() for step in whole]

    one, other = in_both(read)
    assert one == other
