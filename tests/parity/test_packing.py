"""Packing: rows of several samples, best fit sample by sample, and plans of such rows."""

import functools
import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen
import torch_ref

from . import find, slow, slow_packing
from .inputs import (
    ORDERS,
    arrangements,
    as_arrays,
    bucket_arguments,
    difficulties,
    dyadic_cost,
    few,
    for_plan,
    limits,
    moderate,
    offenders,
    seeds,
    steps_of,
)

PACKINGS = {"jvarlen": "jvarlen.planning.packing", "torch_ref": "torch_ref.packing"}


@st.composite
def packing_arguments(draw):
    """Draw valid arguments of `pack_samples`, for which at least one sample remains."""
    longest = draw(st.sampled_from([4, 12, 40]))
    given_lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=60))
    overlong = draw(st.sampled_from(["error", "drop", "truncate"]))
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(sorted))
    order = draw(st.sampled_from(ORDERS))
    used = given_lengths
    if draw(st.integers(0, 3)) == 0:
        permuted = draw(st.permutations(range(len(given_lengths))))
        order = permuted[: draw(st.integers(1, len(permuted)))]
        used = [given_lengths[i] for i in order]
    needed = {"error": max(used), "drop": min(used), "truncate": 1}[overlong]
    return {
        "lengths": given_lengths,
        "row_lengths": sorted({*sizes[:-1], max(sizes[-1], needed)}),
        "order": order,
        "seed": draw(seeds),
        "epoch": draw(seeds),
        "overlong": overlong,
    }


@st.composite
def plan_options(draw, rows, longest):
    """Draw buckets and options of a plan of rows; the longest bucket has this length if there is one to have."""
    top = max(row.num_tokens for row in rows) if longest is None else longest
    edges = sorted({*draw(st.lists(st.integers(1, top), max_size=3)), top})
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 4)) == 0:
        permuted = draw(st.permutations(range(len(rows))))
        order = permuted[: draw(st.integers(1, len(permuted)))]
    return {
        "buckets": [(draw(st.integers(1, 4)), edge) for edge in edges],
        "microbatches_per_step": draw(st.integers(1, 3)),
        "order": order,
        "difficulty": draw(difficulties([row.num_tokens for row in rows])),
        "seed": draw(seeds),
    } | draw(arrangements(order))


@st.composite
def packed_plans(draw):
    """Draw arguments of `pack_samples`, the rows that come of them, and arguments of a plan of these."""
    arguments = draw(packing_arguments())
    rows = slow_packing.pack_samples(**arguments)
    cut = arguments["overlong"] == "truncate"
    return arguments, rows, draw(plan_options(rows, arguments["row_lengths"][-1] if cut else None))


def pack(package, arguments):
    return package.pack_samples(**as_arrays(arguments))


def rows_of(packing):
    bounds = packing.row_offsets.tolist()
    samples = list(zip(packing.sample_ids.tolist(), packing.sample_lengths.tolist(), strict=True))
    assert bounds[-1] == len(samples)
    return [
        slow_packing.Row(capacity, samples[bounds[r] : bounds[r + 1]])
        for r, capacity in enumerate(packing.capacity.tolist())
    ]


@moderate
@given(arguments=packing_arguments())
def test_rows_match_the_contract(package, arguments):
    """Best fit sample by sample, rows in the order of opening, samples in that of placing; attributes, with dtypes."""
    packing, rows = pack(package, arguments), slow_packing.pack_samples(**arguments)
    assert rows_of(packing) == rows
    assert packing.row_lengths == tuple(arguments["row_lengths"])
    assert packing.num_rows == len(rows)
    assert packing.num_tokens.tolist() == [row.num_tokens for row in rows]
    assert all(row.num_tokens <= row.capacity for row in rows)
    lengths = [[length for _, length in row.samples] for row in rows]
    assert packing.starts.tolist() == [sum(row[:i]) for row in lengths for i in range(len(row))]
    assert packing.fill == pytest.approx(sum(map(sum, lengths)) / sum(row.capacity for row in rows), rel=1e-12)
    used = range(len(arguments["lengths"])) if isinstance(arguments["order"], str) else arguments["order"]
    too_long = sum(arguments["lengths"][i] > arguments["row_lengths"][-1] for i in used)
    assert packing.overlong == arguments["overlong"]
    assert packing.num_dropped == (too_long if arguments["overlong"] == "drop" else 0)
    assert packing.num_truncated == (too_long if arguments["overlong"] == "truncate" else 0)
    names = ("sample_ids", "row_offsets", "sample_lengths", "capacity", "num_tokens", "starts")
    assert all(getattr(packing, name).dtype == np.int64 for name in names)


@moderate
@given(arguments=packing_arguments(), block_size=st.integers(1, 20))
def test_blocks_of_shuffled_samples_are_packed_one_by_one(package, arguments, block_size):
    """Each with the last row of the one before, which is not kept."""
    if arguments["overlong"] == "drop":
        arguments["lengths"] += [1]
    arguments["order"] = package.Order("shuffle", block_size=block_size)
    rows = rows_of(pack(package, arguments | {"overlong": overlong_of(arguments)}))
    arguments |= {"overlong": overlong_of(arguments), "block_size": block_size}
    del arguments["order"]
    assert rows == slow_packing.pack_in_blocks(slow_packing.pack_samples, **arguments)


def overlong_of(arguments):
    """Return the rule of drawn arguments, for all samples in place of those of their order."""
    is_long = max(arguments["lengths"]) > arguments["row_lengths"][-1]
    return "truncate" if is_long and arguments["overlong"] == "error" else arguments["overlong"]


def recurring_cases():
    """Yield lengths, of which many rows used to be the same in every epoch, and the length of these rows."""
    rng = np.random.default_rng(0)
    yield rng.permutation(np.arange(100, 1_100)), 2_048
    yield np.clip(rng.lognormal(8.5, 1, 2_000), 200, 32_768).astype(np.int64), 32_768
    yield np.clip(rng.lognormal(6, 1.2, 50_000), 10, 8_192).astype(np.int64), 8_192


@pytest.mark.parametrize("case", range(3))
def test_every_epoch_packs_other_samples_together(package, case):
    """They used to recur in 100, 93 and 17 % of the rows."""
    lengths, row_length = list(recurring_cases())[case]
    num_rows = package.pack_samples(lengths, row_length).num_rows
    of_epoch = []
    for epoch in range(2):
        plan = package.make_plan(lengths, [(4, row_length)], packing="best_fit", epoch=epoch)
        assert plan.num_rows <= num_rows - (-num_rows // 1000)
        rows = np.split(plan.sample_ids, plan.row_offsets[1:-1])
        of_epoch.append({frozenset(row.tolist()) for row in rows if len(row) > 1})
    assert 20 * len(of_epoch[0] & of_epoch[1]) <= len(of_epoch[0])


def test_auto_blocks_are_the_smallest_that_fill_rows_as_well(package, monkeypatch):
    """In any epoch those of epoch 0; none where only all at once is full enough."""
    monkeypatch.setattr(importlib.import_module(PACKINGS[package.__name__]), "_LEAST_BLOCK", 16)
    rng = np.random.default_rng(1)
    found = []
    for number in (16, 100, 400, 900):
        lengths = rng.integers(5, 60, number)

        def rows(block_size, epoch=0, lengths=lengths):
            order = package.Order("shuffle", block_size=block_size)
            return package.pack_samples(lengths, 100, order=order, seed=2, epoch=epoch)

        most = rows(None).num_rows
        most += -(-most // 1000)
        tried = [size for size in (16, 32, 64, 128, 256, 512) if size < number]
        found.append(next((size for size in tried if rows(size).num_rows <= most), None))
        assert np.array_equal(rows("auto", 3).sample_ids, rows(found[-1], 3).sample_ids)
    assert found[0] is None
    assert any(found)


def test_very_many_samples_choose_their_blocks_by_the_first(package, monkeypatch):
    """So that the choice takes no longer for more of them."""
    module = importlib.import_module(PACKINGS[package.__name__])
    monkeypatch.setattr(module, "_LEAST_BLOCK", 16)
    lengths = np.random.default_rng(2).integers(20, 100, 900)
    sizes = set()
    for most in (17, 100, 900):
        monkeypatch.setattr(module, "_MOST_TRIED", most)
        auto = package.pack_samples(lengths, 100, order="shuffle", epoch=1)
        same = [
            size
            for size in (None, 16, 32, 64, 128, 256, 512)
            if np.array_equal(
                auto.sample_ids,
                package.pack_samples(lengths, 100, order=package.Order(block_size=size), epoch=1).sample_ids,
            )
        ]
        assert len(same) == 1
        sizes.add(same[0])
    assert len(sizes) > 1


@moderate
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    block_size=st.sampled_from(["auto", 1, 5, 20]),
)
def test_blocks_of_split_samples_are_the_same_in_both_packages(lengths, block_size):
    """They count samples, however many chunks these have."""
    with pytest.MonkeyPatch.context() as patch:
        packings = []
        for package in (jvarlen, torch_ref):
            module = importlib.import_module(PACKINGS[package.__name__])
            patch.setattr(module, "_LEAST_BLOCK", 4)
            order = package.Order("shuffle", block_size=block_size)
            options = {"overlong": "split", "seed": 1, "epoch": 1}
            packings.append(package.pack_samples(lengths, [10, 20], order=order, **options))
    for name in ("sample_ids", "row_offsets", "sample_lengths", "capacity", "piece_starts"):
        one, other = (getattr(packing, name) for packing in packings)
        assert (one is None and other is None) or np.array_equal(one, other)


def test_rows_fill_as_by_hand(package):
    """A sample goes where the least space is left, and equals into the row that has waited longest."""
    packing = package.pack_samples([6, 6, 5, 2, 2, 1, 1], 8)
    assert rows_of(packing) == [
        slow_packing.Row(8, [(0, 6), (3, 2)]),
        slow_packing.Row(8, [(1, 6), (4, 2)]),
        slow_packing.Row(8, [(2, 5), (5, 1), (6, 1)]),
    ]
    assert packing.starts.tolist() == [0, 6, 0, 6, 0, 5, 6]
    assert packing.fill == 23 / 24


def test_rows_open_in_the_smallest_length_that_holds_the_sample(package):
    """And take further samples up to it."""
    packing = package.pack_samples([3, 9, 4, 1, 1, 1], [4, 10])
    assert [(row.capacity, [i for i, _ in row.samples]) for row in rows_of(packing)] == [
        (10, [1, 3]),
        (4, [2]),
        (4, [0, 4]),
        (4, [5]),
    ]
    assert package.pack_samples([1, 2], 3).row_lengths == (3,)


def test_large_packings_match_the_contract(package):
    """Thousands of samples of many lengths: long queues, split intervals."""
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.zipf(1.3, 3000) + rng.integers(0, 40, 3000), 700)
    arguments = {
        "lengths": lengths.tolist(),
        "row_lengths": [64, 100, 512],
        "order": "shuffle",
        "seed": 5,
        "overlong": "truncate",
    }
    assert rows_of(pack(package, arguments | {"order": package.Order(block_size=None)})) == slow_packing.pack_samples(
        **arguments
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"row_lengths": []}, r"lengths.*\[\]"),
        ({"row_lengths": [9, 8]}, "9"),
        ({"row_lengths": [0, 8]}, "0"),
        ({"row_lengths": 8.5}, r"8\.5"),
        ({"overlong": "ignore"}, "ignore"),
        ({"order": "random"}, "random"),
        ({"seed": -1}, "seed"),
        ({"lengths": [3, -77]}, "-77"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "row_lengths": [8]}
    with pytest.raises(ValueError, match=named):
        package.pack_samples(**(valid | arguments))


def test_samples_above_the_longest_row_are_listed(package):
    """By id, value and limit, also where dropping leaves none; one that the order leaves out is not looked at."""
    lengths = [3, 99, 4, 98]
    with pytest.raises(ValueError, match=offenders((1, 99), (3, 98), limit=10)):
        package.pack_samples(lengths, [5, 10], order="length")
    with pytest.raises(ValueError, match=offenders((0, 3), (1, 99), (2, 4), (3, 98), limit=2)):
        package.pack_samples(lengths, 2, overlong="drop")
    assert package.pack_samples(lengths, 10, order=[2, 0]).sample_ids.tolist() == [2, 0]


# Split samples


@st.composite
def split_arguments(draw):
    """Draw arguments of `pack_samples` that split, the rows that come of them, of pieces by number, and the pieces."""
    arguments = draw(packing_arguments()) | {"overlong": "split"}
    order = arguments["order"]
    seed, epoch = arguments["seed"], arguments["epoch"]
    shuffled = slow.random_order(seed, epoch, 0, len(arguments["lengths"]), stream=1)
    ids = shuffled if order == "shuffle" else slow.sample_order(arguments["lengths"], order)
    pieces = slow_packing.split_samples(arguments["lengths"], arguments["row_lengths"][-1], ids)
    return arguments, slow_packing.pack_samples([length for *_, length in pieces], arguments["row_lengths"]), pieces


@moderate
@given(drawn=split_arguments())
def test_pieces_are_packed_like_samples(package, drawn):
    """Each piece once, as long as the longest row or what is left."""
    arguments, rows, pieces = drawn
    packing = pack(package, arguments)
    placed = [pieces[p] for row in rows for p, _ in row.samples]
    assert packing.sample_ids.tolist() == [i for i, _, _ in placed]
    assert packing.sample_lengths.tolist() == [length for _, _, length in placed]
    assert packing.capacity.tolist() == [row.capacity for row in rows]
    assert np.diff(packing.row_offsets).tolist() == [len(row.samples) for row in rows]
    assert (packing.overlong, packing.num_dropped, packing.num_truncated) == ("split", 0, 0)
    if any(start for _, start, _ in pieces):
        assert packing.piece_starts.dtype == np.int64
        assert packing.piece_starts.tolist() == [start for _, start, _ in placed]
    else:
        assert packing.piece_starts is None


@few
@given(drawn=split_arguments(), data=st.data())
def test_plans_of_pieces_match_the_contract(package, tmp_path_factory, drawn, data):
    """Rows of pieces are planned like other rows; the digest and the file cover where pieces begin."""
    arguments, rows, pieces = drawn
    options = data.draw(plan_options(rows, arguments["row_lengths"][-1]))
    plan = package.make_plan(pack(package, arguments), **for_plan(package, options))
    steps, rows_of_step, offsets = slow_packing.make_steps(rows, **options)
    ids, starts = ([pieces[p][part] for _, step in steps for p in step] for part in (0, 1))
    is_split = any(start for _, start, _ in pieces)
    assert plan.sample_ids.tolist() == ids
    assert plan.num_tokens.tolist() == [sum(pieces[p][2] for p in step) for _, step in steps]
    assert (plan.piece_starts is not None) == is_split
    in_steps = [(k, [pieces[p][0] for p in step]) for k, step in steps]
    microbatches, piece_starts = options["microbatches_per_step"], starts if is_split else None
    assert plan.digest == slow.digest(in_steps, options["buckets"], microbatches, offsets, piece_starts)
    path = tmp_path_factory.mktemp("pieces") / "plan.npz"
    plan.save(path)
    loaded = package.Plan.load(path)
    assert loaded.digest == plan.digest
    for step, held in enumerate(rows_of_step):
        laid_out = loaded.pieces(step)
        if not is_split:
            assert laid_out is None
            continue
        assert laid_out.shape == loaded.rows(step).shape
        for j, row in enumerate(held):
            in_row = laid_out[j % microbatches, j // microbatches].tolist()
            assert in_row == [pieces[p][1] for p in row] + [-1] * (len(in_row) - len(row))


def test_pieces_need_their_bucket(package):
    """A longer bucket would read on into the next piece."""
    packing = package.pack_samples([9, 4, 40], 10, overlong="split")
    with pytest.raises(ValueError, match=r"\b12\b"):
        package.make_plan(packing, [(2, 12)], order="length")
    assert package.make_plan(packing, [(2, 10)], order="length").num_samples == 6


def test_changed_pieces_are_refused(package, tmp_path):
    """Other starts, fewer, none: the digest covers them."""
    path = tmp_path / "pieces.npz"
    package.make_plan(package.pack_samples([9, 4, 40], 10, overlong="split"), [(2, 10)], order="length").save(path)
    with np.load(path, allow_pickle=False) as archive:
        fields = {name: archive[name] for name in archive.files}
    starts = fields.pop("piece_starts")
    others = [starts + 10, starts[:-1], starts.astype(np.int32)]
    for changed in [fields, *(fields | {"piece_starts": other} for other in others)]:
        np.savez(path, **changed)
        with pytest.raises(ValueError, match=r"pieces\.npz"):
            package.Plan.load(path)


@moderate
@given(drawn=split_arguments(), data=st.data())
def test_pieces_come_in_their_order_on_request(package, drawn, data):
    """Rows and then steps wait for those with earlier pieces, and pieces of one length are numbered as they come."""
    arguments, rows, pieces = drawn
    packed = [[pieces[p][:2] for p, _ in row.samples] for row in rows]
    tokens = [row.num_tokens for row in rows]
    order, seed, microbatches = data.draw(st.sampled_from(ORDERS)), data.draw(seeds), data.draw(st.integers(1, 2))
    buckets = [(data.draw(st.integers(1, 4)), edge) for edge in arguments["row_lengths"]]
    options = {"seed": seed, "microbatches_per_step": microbatches}
    longest_first = data.draw(st.booleans())
    plan = package.make_plan(
        pack(package, arguments),
        buckets,
        **options,
        order=package.Order(order, longest_first=longest_first, chunks_in_order=True),
    )
    if plan.piece_starts is None:
        usual = package.make_plan(
            pack(package, arguments), buckets, **options, order=package.Order(order, longest_first=longest_first)
        )
        assert plan.digest == usual.digest
        return
    is_shuffled = order == "shuffle"
    base = slow.random_order(seed, 0, 0, len(rows)) if is_shuffled else slow.sample_order(tokens, order)
    in_order = [base[place] for place in slow_packing.after_earlier_pieces([packed[r] for r in base])]
    steps = slow.make_steps(tokens, buckets, microbatches_per_step=microbatches, order=in_order)
    of_steps = [[piece for r in held for piece in packed[r]] for _, held in steps]
    steps = [steps[s] for s in slow_packing.after_earlier_pieces(of_steps)]
    if longest_first:
        first = [k for k, _ in steps].index(max(k for k, _ in steps))
        steps[0], steps[first] = steps[first], steps[0]
    assert steps_of(plan) == [(k, [i for r in held for i, _ in packed[r]]) for k, held in steps]
    assert np.diff(plan.row_offsets).tolist() == [len(packed[r]) for _, held in steps for r in held]
    assert plan.num_tokens.tolist() == [sum(tokens[r] for r in held) for _, held in steps]
    placed = list(zip(plan.sample_ids.tolist(), plan.piece_starts.tolist(), strict=True))
    assert sorted(placed) == sorted(piece for row in packed for piece in row)
    started = {}
    for i, start in placed:
        assert start > started.get(i, -1)
        started[i] = start


def test_only_packings_can_keep_chunks_in_order(package):
    """And only where nothing else decides when steps come."""
    packing = package.pack_samples([9, 4, 40], 10, overlong="split")
    exclusive = [{"shuffle_steps": True}, {"new_shape_every": 2}, {"by": "random"}]
    for lengths, options in (([3, 4], {}), *((packing, options) for options in exclusive)):
        with pytest.raises(ValueError, match=r"chunks_in_order|random"):
            package.make_plan(lengths, [(2, 10)], order=package.Order(**{"chunks_in_order": True, **options}))


# Wrapped packing


@st.composite
def wrapped_arguments(draw):
    """Draw lengths, a row length and an order, and the rows that come of them, of pieces (id, start, length)."""
    lengths = draw(st.lists(st.integers(1, draw(st.sampled_from([4, 30]))), min_size=1, max_size=30))
    row_length, order = draw(st.integers(1, 40)), draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 3)) == 0:
        order = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]
    seed, epoch = draw(seeds), draw(seeds)
    if order == "shuffle":
        ids = slow.random_order(seed, epoch, 0, len(lengths), stream=1)
    else:
        ids = slow.sample_order(lengths, order)
    arguments = {"lengths": lengths, "row_lengths": row_length, "order": order, "seed": seed, "epoch": epoch}
    return arguments, slow_packing.wrapped_rows(lengths, row_length, ids)


@moderate
@given(drawn=wrapped_arguments())
def test_wrapped_rows_are_cut_from_the_samples_end_to_end(package, drawn):
    """Token by token."""
    arguments, rows = drawn
    packing = pack(package, arguments | {"method": "wrapped"})
    pieces = [piece for row in rows for piece in row]
    columns = zip(*(getattr(packing, name) for name in ("sample_ids", "piece_starts", "sample_lengths")), strict=True)
    assert list(columns) == pieces
    assert np.diff(packing.row_offsets).tolist() == [len(row) for row in rows]
    assert packing.num_tokens.tolist() == [sum(length for _, _, length in row) for row in rows]
    assert packing.capacity.tolist() == [arguments["row_lengths"]] * len(rows)
    assert (packing.overlong, packing.row_lengths, packing.method) == ("split", (arguments["row_lengths"],), "wrapped")
    for name in ("sample_ids", "row_offsets", "sample_lengths", "capacity", "piece_starts"):
        assert getattr(packing, name).dtype == np.int64


@few
@given(
    drawn=wrapped_arguments(), num_rows=st.integers(1, 3), num_microbatches=st.integers(1, 2), in_order=st.booleans()
)
def test_plans_of_wrapped_rows_match_the_contract(
    package, tmp_path_factory, drawn, num_rows, num_microbatches, in_order
):
    """Rows keep the order of the samples, unless that is a shuffle; chunks in order do in any."""
    arguments, rows = drawn
    order = np.array(arguments["order"]) if isinstance(arguments["order"], list) else arguments["order"]
    buckets, rates = [(num_rows, arguments["row_lengths"])], {name: arguments[name] for name in ("seed", "epoch")}
    plan = package.make_plan(
        arguments["lengths"],
        buckets,
        packing="wrapped",
        order=package.Order(order, chunks_in_order=in_order),
        microbatches_per_step=num_microbatches,
        **rates,
    )
    of_rows = "shuffle" if arguments["order"] == "shuffle" and not in_order else "dataset"
    packed = [slow_packing.Row(0, [(r, length) for _, _, length in row]) for r, row in enumerate(rows)]
    steps = slow.make_steps(
        [row.num_tokens for row in packed],
        buckets,
        order=of_rows,
        microbatches_per_step=num_microbatches,
        **rates,
    )
    placed = [piece for _, held in steps for r in held for piece in rows[r]]
    offsets = np.cumsum([0] + [len(rows[r]) for _, held in steps for r in held]).tolist()
    in_steps = [(k, [i for r in held for i, _, _ in rows[r]]) for k, held in steps]
    assert plan.digest == slow.digest(in_steps, buckets, num_microbatches, offsets, [start for _, start, _ in placed])
    assert plan.num_sequences.tolist() == [len(ids) for _, ids in in_steps]
    assert plan.num_tokens.sum() == sum(length for _, _, length in placed)
    row_length = arguments["row_lengths"]
    num_whole = (np.cumsum(sorted(arguments["lengths"])) <= row_length).sum()
    assert plan.samples_per_row == (min(num_whole + 2, row_length),)  # in any epoch, and the parts of two others
    path = tmp_path_factory.mktemp("wrapped") / "plan.npz"
    plan.save(path)
    loaded = package.Plan.load(path)
    ends = loaded.piece_stops if package.__name__ == "jvarlen" else loaded.piece_ends
    for (i, start, length), end in zip(placed, ends.tolist(), strict=True):
        assert min(end, arguments["lengths"][i]) == start + length


def test_wrapped_rows_are_full_and_others_in_every_epoch(package):
    """1,000 samples of 600 take 586 rows of 1,024, and by best fit one each."""
    lengths = [600] * 1000
    assert package.pack_samples(lengths, 1024, method="wrapped").num_rows == 586
    assert package.pack_samples(lengths, 1024).num_rows == 1000
    options = {"max_tokens": 8192, "max_length": 1024, "packing": "wrapped"}
    plan, other = (package.make_plan(lengths, **options, epoch=epoch) for epoch in (0, 1))
    assert plan.buckets == ((8, 1024),)
    assert plan.num_rows == other.num_rows == 586
    assert plan.digest != other.digest
    in_order = package.make_plan(lengths, **options, order="dataset")
    assert (np.diff(in_order.sample_ids) >= 0).all()
    assert in_order.padding < 0.011
    assert "packing splits samples, and chunks count as samples" in plan.report()
    assert "overlong" not in plan.report()  # which goes with best fit alone


def test_wrapped_rows_are_as_long_as_said(package):
    """The only bucket, the only given length, `max_length` whatever the samples have, or the longest sample."""
    lengths = [5, 12, 3, 9]
    for options, longest in (
        ({"max_tokens": 64, "max_length": 20}, 20),
        ({"max_tokens": 64, "strategy": [16]}, 16),
        ({"max_tokens": 64, "length_multiple": 8}, 16),
        ({"max_tokens": 64}, 12),
        ({"buckets": [(2, 7)]}, 7),
    ):
        plan = package.make_plan(lengths, packing="wrapped", **options)
        assert [length for _, length in plan.buckets] == [longest]
        assert plan.num_rows == -(-sum(lengths) // longest)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lengths": [[3, 4]]}, "samples"),
        ({"row_lengths": [4, 8]}, r"\[4, 8\]"),
        ({"overlong": "split"}, "overlong='split'"),
        ({"order": {"by": "shuffle", "block_size": 4}}, "block_size=4"),
        ({"method": "first_fit"}, "first_fit"),
    ],
)
def test_what_wrapped_packing_excludes_is_named(package, options, named):
    """What it is not for, it refuses."""
    order = {"order": package.Order(**options["order"])} if "order" in options else {}
    with pytest.raises(ValueError, match=named):
        package.pack_samples(**{"lengths": [3, 4], "row_lengths": 8, "method": "wrapped"} | options | order)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buckets": [(1, 4), (1, 8)]}, "8"),
        ({"max_tokens": 64, "strategy": [4, 8]}, r"\[4, 8\]"),
        ({"max_tokens": 64, "strategy": "quantile"}, "quantile"),
        ({"max_tokens": 64, "overlong": "truncate"}, "overlong='truncate'"),
        ({"max_tokens": 64, "max_length": 10, "length_multiple": 8}, "max_length.*10"),
        ({"max_tokens": 5}, "max_length"),
        ({"max_tokens": 64, "difficulty": [1, 2, 3]}, "difficulty"),
        ({"max_tokens": 64, "order": {"by": "shuffle", "block_size": 4}}, "block_size=4"),
    ],
)
def test_what_a_plan_of_wrapped_rows_excludes_is_named(package, options, named):
    """Each in one line."""
    order = {"order": package.Order(**options["order"])} if "order" in options else {}
    with pytest.raises(ValueError, match=named):
        package.make_plan([3, 4, 6], packing="wrapped", **options | order)


def test_parts_of_samples_cannot_be_left_out(package):
    """Rows of a packing can be left out, but not those that hold the rest of others."""
    packing = package.pack_samples([9, 4, 40], 10, method="wrapped")
    assert package.make_plan(packing, [(2, 10)], order=[5, 4, 3, 2, 1, 0]).num_tokens.sum() == 53
    with pytest.raises(ValueError, match="wrapped rows"):
        package.make_plan(packing, [(2, 10)], order=[0, 1])
    with pytest.raises(ValueError, match=r"one .*length"):
        package.make_plan(packing, [(2, 5), (2, 10)])


# Lengths of rows


@moderate
@given(data=st.data(), limited=st.booleans())
def test_row_lengths_are_added_one_by_one(package, data, limited):
    """Each time that with which the plan of the rows costs least."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=20, longest=12))
    del arguments["strategy"]
    if limited:
        arguments |= data.draw(limits(20))
        arguments["compile_seconds"] = data.draw(st.sampled_from([None, 0.0, 1.5]))
    chosen = find(package, "choose_row_lengths")(**as_arrays(arguments))
    assert isinstance(chosen, tuple)
    assert all(isinstance(length, int) for length in chosen)
    assert list(chosen) == slow_packing.choose_row_lengths(**arguments)


@few
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), max_cost=st.sampled_from([None, 9.0]))
def test_row_lengths_by_a_cost_model_leave_out_attention(lengths, max_cost):
    """Its pairs are the same in any rows; only where it limits a microbatch does a row count as one sample."""
    chosen = []
    for package in (jvarlen, torch_ref):
        choose = functools.partial(find(package, "choose_row_lengths"), lengths, 180, max_shapes=3, compile_seconds=0.3)
        model = package.CostModel(constant=0.25, linear=2.0**-7, quadratic=2.0**-9)
        chosen.append(choose(cost=model, max_cost=max_cost))
        if max_cost is None:
            chosen.append(choose(cost=lambda rows, length: 0.25 + rows * length * 2.0**-7))
    assert len(set(chosen)) == 1


def test_row_lengths_of_very_many_lengths_are_those_of_every_kth(package):
    """Counted down from the longest, the same in both packages."""
    lengths = np.arange(11, 10_013)
    chosen = find(package, "choose_row_lengths")(lengths, 40_000, max_shapes=3, cost=lambda rows, length: rows * length)
    assert set(chosen) <= set(range(10_012, 10, -3))
    assert chosen == torch_ref.choose_row_lengths(
        lengths, 40_000, max_shapes=3, cost=lambda rows, length: rows * length
    )


@few
@given(data=st.data())
def test_row_lengths_for_split_samples_are_those_for_their_pieces(package, data):
    """Without a longest row nothing is split."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=20, longest=12))
    del arguments["strategy"], arguments["overlong"]
    lengths, limit = arguments["lengths"], arguments["max_length"]
    of_pieces = lengths
    if limit is not None:
        of_pieces = [length for _, _, length in slow_packing.split_samples(lengths, limit, range(len(lengths)))]
    chosen = find(package, "choose_row_lengths")(**as_arrays(arguments), overlong="split")
    assert chosen == find(package, "choose_row_lengths")(**as_arrays(arguments | {"lengths": of_pieces}))


def test_row_lengths_follow_the_limits(package):
    """The same refusals as for buckets."""
    with pytest.raises(ValueError, match=offenders((1, 60), limit=50)):
        find(package, "choose_row_lengths")([4, 60], 50)
    with pytest.raises(ValueError, match="max_cost"):
        find(package, "choose_row_lengths")([4, 60], 100, max_cost=3.0)
    with pytest.raises(ValueError, match=offenders((1, 60), limit=7)):
        find(package, "choose_row_lengths")([4, 60], 100, max_length=7, overlong="error")
    assert find(package, "choose_row_lengths")([4, 60], 100, max_length=7, overlong="drop") == (4,)
    assert find(package, "choose_row_lengths")([4, 60], 100, max_length=7, max_shapes=1, overlong="truncate") == (7,)


# Plans


@moderate
@given(drawn=packed_plans())
def test_packed_plans_match_the_contract(package, tmp_path_factory, drawn):
    """Rows are planned as samples would be, then replaced by their samples: digest, rows, counts, and the file."""
    arguments, rows, options = drawn
    packing = pack(package, arguments)
    plan = package.make_plan(packing, **for_plan(package, options))
    steps, rows_of_step, offsets = slow_packing.make_steps(rows, **options)
    buckets, num_microbatches = options["buckets"], options["microbatches_per_step"]
    assert steps_of(plan) == steps
    assert plan.row_offsets.dtype == np.int64
    assert plan.row_offsets.tolist() == offsets
    assert plan.digest == slow.digest(steps, buckets, num_microbatches, offsets)
    assert plan.num_rows == len(offsets) - 1 == sum(map(len, rows_of_step))
    assert plan.num_samples == offsets[-1]
    for step, held in enumerate(rows_of_step):
        most = max(map(len, held))
        padded = [[*row, *[-1] * (most - len(row))] for row in held]
        placed = plan.rows(step)
        slots = slow.step_rows(range(len(held)), buckets[steps[step][0]][0], num_microbatches)
        assert placed.dtype == np.int64
        assert placed.tolist() == [[padded[j] if j >= 0 else [-1] * most for j in slot] for slot in slots]
    length_of = {i: length for row in rows for i, length in row.samples}
    tokens = [sum(length_of[i] for i in ids) for _, ids in steps]
    positions = sum(buckets[k][0] * buckets[k][1] * num_microbatches for k, _ in steps)
    assert plan.num_sequences.tolist() == [len(ids) for _, ids in steps]
    assert plan.num_tokens.tolist() == tokens
    assert plan.padding == pytest.approx(1 - sum(tokens) / positions, abs=1e-12)
    for name in ("overlong", "num_dropped", "num_truncated"):
        assert getattr(plan, name) == getattr(packing, name)
    assert isinstance(plan.report(), str)
    path = tmp_path_factory.mktemp("packed") / "plan.npz"
    plan.save(path)
    with np.load(path, allow_pickle=False) as archive:
        assert archive["format_version"] == 2
        assert archive["row_offsets"].tolist() == offsets
        assert archive["samples_per_row"].tolist() == list(plan.samples_per_row)
        counts = tokens, plan.num_dropped, plan.num_truncated
        assert str(archive["checksum"]) == slow.checksum(plan.digest, *counts, plan.overlong, plan.samples_per_row)
    loaded = package.Plan.load(path)
    assert loaded.digest == plan.digest
    for step in range(plan.num_steps):
        assert np.array_equal(loaded.rows(step), plan.rows(step))
    for name in ("row_offsets", "sample_ids", "num_tokens", "num_sequences"):
        assert np.array_equal(getattr(loaded, name), getattr(plan, name))
    for name in ("num_rows", "num_samples", "overlong", "num_dropped", "num_truncated", "padding"):
        assert getattr(loaded, name) == getattr(plan, name)


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
def test_a_plan_packs_its_samples_on_request(package, order):
    """As `pack_samples` and the plan of its rows: one row length, with a cost several; anew in a shuffled epoch."""
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    by = np.arange(299, 9, -1) if order == "subset" else order
    options = {"seed": 3, "epoch": 2}
    of_packing = by if order in ("shuffle", "subset") else "dataset"
    of_rows = "dataset" if order == "subset" else by
    cost = {"cost": dyadic_cost, "max_shapes": 2}
    for fields in ({"max_length": 50}, {"strategy": [32, 64]}, cost | {"max_length": 64, "length_multiple": 16}):
        overlong = "split" if fields.get("max_length") == 50 else "error"
        sizes = fields.get("strategy") or find(package, "choose_row_lengths")(
            lengths, 256, overlong=overlong, **({"max_shapes": 1} if "cost" not in fields else {}) | fields
        )
        packing = package.pack_samples(lengths, sizes, order=of_packing, overlong=overlong, **options)
        rows = package.pack_samples(lengths, sizes, order=of_packing, overlong=overlong, seed=3)
        limits = {name: value for name, value in fields.items() if name not in ("max_length", "strategy")}
        buckets = package.make_buckets(rows.num_tokens, 256, strategy=sizes, **limits)
        expected = package.make_plan(packing, buckets, order=of_rows, **options)
        packed = {"order": by, "packing": "best_fit", "overlong": overlong, **options}
        assert package.make_plan(lengths, max_tokens=256, **fields, **packed).digest == expected.digest
        assert package.make_plan(lengths, buckets, **packed).digest == expected.digest


def test_what_cannot_be_packed_by_a_plan_is_refused(package):
    """Another word, rows, pairs, and what gives samples an order that rows would lose."""
    for lengths, options, named in (
        ([3, 4], {"packing": "worst_fit"}, "worst_fit"),
        (package.pack_samples([3, 4], 8), {}, "best_fit"),
        ([[3, 4]], {"packing": "wrapped"}, r"one length|several lengths"),
        ([[3, 4]], {"buckets": [(1, 4, 8), (1, 8, 8)]}, r"one bucket|two lengths"),
        ([3, 4], {"difficulty": [1, 2]}, "difficulty"),
        ([3, 4], {"order": package.Order("length", block_size=2)}, "block_size"),
        ([3, 4], {"order": "length", "pacing": package.linear_pacing(3)}, "pacing"),
    ):
        with pytest.raises(ValueError, match=named):
            package.make_plan(lengths, **{"buckets": [(1, 8)], "packing": "best_fit"} | options)


def test_the_side_of_pairs_that_fills_up_first_is_as_long_as_the_mean_pair_needs(package):
    """Within `max_tokens` and `max_length`, rounded up."""
    choose, pairs = find(package, "choose_row_lengths"), [[3, 9], [3, 4], [8, 8], [2, 4]]
    assert choose(pairs, 32) == (8, 13)  # 25 target tokens for 16 source tokens: 12.5 beside 8
    assert choose(pairs, 32, length_multiple=4) == (8, 16)
    assert choose(pairs, 20) == choose(pairs, 32, max_length=9) == (8, 9)
    assert choose([[4, 0], [2, 0]], 32) == (4, 1)


@pytest.mark.parametrize(("is_correlated", "before", "after"), [(True, 0.18, 0.03), (False, 0.34, 0.05)])
def test_a_plan_packs_pairs_into_rows_of_good_lengths(package, is_correlated, before, after):
    """Padding of rows of the longest sides, and of the chosen ones; the same again from a file, in other epochs."""
    rng = np.random.default_rng(0)
    source = np.clip(np.rint(rng.lognormal(3.0, 0.6, 1000)), 1, 200)
    target = source * rng.lognormal(0.05, 0.25, 1000) if is_correlated else rng.lognormal(4.0, 0.9, 1000)
    pairs = np.stack([source, np.clip(np.rint(target), 1, 1000)], axis=1).astype(int)
    longest = pairs.max(axis=0).tolist()
    rows = package.pack_samples(pairs, longest)
    assert 1 - pairs.sum() / (rows.num_rows * sum(longest)) > before
    plan = package.make_plan(pairs, max_tokens=4096, packing="best_fit", epoch=1)
    (bucket,) = plan.buckets
    assert 1 - pairs.sum() / (plan.num_rows * sum(bucket[1:])) < after
    assert bucket[0] * sum(bucket[1:]) <= 4096
    assert plan.samples_per_row == ((np.cumsum(np.sort(pairs, axis=0), axis=0) <= bucket[1:]).sum(axis=0).min(),)
    assert np.diff(plan.row_offsets).max() <= plan.samples_per_row[0]
    assert np.sort(plan.sample_ids).tolist() == list(range(1000))
    again = package.make_plan(pairs, [bucket], packing="best_fit", epoch=1)
    assert again.digest == plan.digest
    packed = package.pack_samples(pairs, bucket[1:], order="shuffle", epoch=1)
    assert package.make_plan(packed, [bucket], epoch=1).digest == plan.digest


@pytest.mark.parametrize(
    ("pairs", "options", "named"),
    [
        ([[30, 2], [3, 40], [50, 60]], {"max_tokens": 100}, r"50.*60"),
        ([[30, 2], [3, 40]], {"max_tokens": 60}, r"30.*40"),
        ([[30, 2], [3, 40]], {"max_tokens": 100, "max_length": 32}, "40"),
        ([[30, 2]], {"max_tokens": 100, "cost": dyadic_cost}, r"not (chosen )?by cost$"),
        ([[30, 2]], {"max_tokens": 100, "pair_size": "product"}, r"not (chosen )?by pair_size$"),
        ([[30, 2]], {"max_tokens": 100, "strategy": [32, 64]}, r"not (chosen )?by strategy$"),
    ],
)
def test_what_rows_of_pairs_cannot_be_is_told(package, pairs, options, named):
    """Sides, limits, fields that pairs have no use for."""
    with pytest.raises(ValueError, match=named):
        package.make_plan(pairs, packing="best_fit", **options)


def test_a_plan_is_independent_of_the_packing_of_the_same_seed(package):
    """Of four rows, two to a step, two given ones meet in a third of the seeds: within 3.3 standard deviations."""
    num_seeds, lengths = 600, [6] * 4 + [2] * 4
    num_met = 0
    for seed in range(num_seeds):
        packing = package.pack_samples(lengths, 8, order="shuffle", seed=seed)
        step = package.make_plan(packing, [(2, 8)], order="shuffle", seed=seed).rows(0)
        # Samples 0 to 3 are in a row each, whichever that is.
        num_met += np.isin([0, 1], step).sum() != 1
    assert abs(num_met / num_seeds - 1 / 3) < 3.3 * (2 / 9 / num_seeds) ** 0.5


def test_a_plan_of_single_samples_is_not_a_packed_one(package):
    """Unpacked plans have no row offsets; one sample a row packed is another digest."""
    lengths, buckets = [5, 5, 5], [(2, 8)]
    plain = package.make_plan(lengths, buckets, order="length")
    packed = package.make_plan(package.pack_samples(lengths, 8), buckets, order="length")
    assert plain.row_offsets is None
    assert plain.num_rows == plain.num_samples == 3
    assert packed.row_offsets.tolist() == [0, 1, 2, 3]
    assert steps_of(packed) == steps_of(plain)
    assert packed.digest != plain.digest
    assert packed.rows(0).shape == (1, 2, 1)


def test_rows_that_no_bucket_holds_are_refused(package):
    """By row and tokens; and the rules that a packing has settled are not set again."""
    packing = package.pack_samples([9, 4, 4, 7], 10)
    assert packing.num_tokens.tolist() == [9, 7, 8]
    with pytest.raises(ValueError, match=offenders((0, 9), (2, 8), limit=7)):
        package.make_plan(packing, [(2, 7)], order="length")
    for rule in ("drop", "truncate"):
        with pytest.raises(ValueError, match="overlong"):
            package.make_plan(packing, [(2, 10)], order="length", overlong=rule)
    cut = package.pack_samples([9, 4, 40], 10, overlong="truncate")
    with pytest.raises(ValueError, match=r"\b12\b"):
        package.make_plan(cut, [(2, 12)], order="length")
    assert package.make_plan(cut, [(2, 10)], order="length").num_truncated == 1
    with pytest.raises(ValueError, match="difficulty"):
        package.make_plan(packing, [(2, 10)], order="length", difficulty=[1, 2, 3, 4])


# How many samples a row has room for


@moderate
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), epoch=st.integers(0, 3))
def test_a_row_has_room_for_as_many_samples_as_the_shortest_that_fit_it(package, lengths, epoch):
    """Whatever the order, pieces among them; of two lengths, the fewer."""
    packing = package.pack_samples(lengths, [6, 9], overlong="split", order="shuffle", epoch=epoch)
    plan = package.make_plan(packing, [(2, 4), (1, 9)])
    pieces = sorted(min(9, length - start) for length in lengths for start in range(0, length, 9))

    def room(sizes, limit):
        return max(n for n in range(len(sizes) + 1) if sum(sorted(sizes)[:n]) <= limit)

    assert plan.samples_per_row == tuple(max(1, room(pieces, limit)) for _, limit in plan.buckets)
    for step in range(plan.num_steps):
        assert plan.rows(step).shape[2] <= plan.samples_per_row[plan.step_bucket[step]]
    pairs = np.stack([lengths, lengths[::-1]], axis=1)
    joint = package.make_plan(package.pack_samples(pairs, [20, 15]), [(1, 20, 15)])
    assert joint.samples_per_row == (min(room(lengths, 20), room(lengths, 15)),)


@moderate
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), row_length=st.integers(1, 20), epoch=seeds)
def test_a_wrapped_row_has_room_for_the_parts_of_two_samples_as_well(package, lengths, row_length, epoch):
    """Whatever the epoch cuts, but for rows of fewer tokens."""
    plan = package.make_plan(lengths, [(2, row_length)], packing="wrapped", epoch=epoch)
    assert plan.samples_per_row == (min((np.cumsum(sorted(lengths)) <= row_length).sum() + 2, row_length),)
    assert np.diff(plan.row_offsets).max() <= plan.samples_per_row[0]


def test_a_row_has_room_for_as_many_samples_in_epochs_that_take_some_of_them_only(package):
    """Those that another epoch may take count, but for those too long for any."""
    lengths, options = [5, 4, 3, 1, 1, 2, 9], {"packing": "best_fit", "overlong": "drop"}
    plans = [package.make_plan(lengths, [(1, 6)], order=order, **options) for order in ("shuffle", [0, 1], [3, 4, 5])]
    assert [plan.samples_per_row for plan in plans] == [(3,)] * 3
    assert package.make_plan(lengths[:4], [(1, 6)], order=[0, 1], packing="best_fit").samples_per_row == (2,)
    assert package.make_plan(lengths[:6], [(1, 3), (1, 6)]).samples_per_row == (1, 1)
