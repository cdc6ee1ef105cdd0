"""Plan sources: every sample of a step is the planned one, of the planned length, or is named in an error."""

import dataclasses

import numpy as np
import pytest

from jvarlen import load, make_plan
from jvarlen._common.workers import portable_error
from jvarlen.data import WeightedTokens
from jvarlen.loading import collate_tokens
from jvarlen.loading.plan_source import PlanSource
from tests.conftest import random_dataset

DATASET = random_dataset(40, 12)
LENGTHS = np.diff(DATASET.offsets)
PLAN = make_plan(LENGTHS, [(4, 6), (2, 12)], order="length", num_microbatches=2)


def changed(**lengths):
    """The samples, some of other lengths: those of `i7=3`, say, are 3 tokens of sample 7, or more than it has."""
    samples = [DATASET[i] for i in range(len(DATASET))]
    for name, length in lengths.items():
        i = int(name[1:])
        samples[i] = np.resize(samples[i], length)
    return samples


def two_of_one_step():
    """A step in the longer bucket, and two of its samples that do not fill their rows."""
    for step in np.flatnonzero(PLAN.step_bucket == 1).tolist():
        ids = PLAN.rows(step)[:, 0]
        if (LENGTHS[ids] < 12).all():
            return step, *ids.tolist()
    raise AssertionError("no such step")


def test_samples_are_compared_one_by_one_and_all_are_named():
    step, first, second = two_of_one_step()
    a, b = LENGTHS[[first, second]].tolist()
    samples = changed(**{f"i{first}": a - 1, f"i{second}": b + 1})  # their sum is as planned
    PlanSource(PLAN, samples)[step]
    with pytest.raises(ValueError, match=f"id {first}: {a - 1} tokens, planned {a}") as raised:
        PlanSource(PLAN, samples, lengths=LENGTHS)[step]
    assert f"id {second}: {b + 1} tokens, planned {b} tokens" in str(raised.value)
    assert raised.value.__notes__ == [f"while reading step {step}"]


def test_adjusted_samples_are_cut_or_fill_less_and_are_counted():
    step, first, second = two_of_one_step()
    a, b = LENGTHS[[first, second]].tolist()
    samples = changed(**{f"i{first}": a - 3, f"i{second}": b + 5})
    source = PlanSource(PLAN, samples, lengths=LENGTHS, on_mismatch="adjust")
    expected = PlanSource(PLAN, DATASET)[step]
    read = source.read(step)
    assert read.num_adjusted == 2
    m, row = np.argwhere(PLAN.rows(step) == first)[0]
    assert read.batch.lengths[m, row] == a - 3
    assert read.batch.weights[m, row].tolist() == [1.0] * (a - 3) + [0.0] * (12 - a + 3)
    expected.lengths[m, row], expected.weights[m, row, a - 3 :], expected.tokens[m, row, a - 3 :] = a - 3, 0, 0
    for leaf, other in zip(read.batch, expected, strict=True):
        assert np.array_equal(leaf, other)
    others = [t for t in range(PLAN.num_steps) if t != step]
    assert sum(source.read(t).num_adjusted for t in others) == 0


@pytest.mark.parametrize("form", ["tokens", "fields"])
@pytest.mark.parametrize("given", [{}, {"lengths": [4, 8, 9]}], ids=["alone", "compared"])
def test_only_samples_that_are_planned_as_too_long_are_cut(form, given):
    """Not one that is longer than another bucket: planned 4 and really 6, its row in that of 4 lacked its end."""
    plan = make_plan([4, 8, 9], [(1, 4), (1, 8)], order="dataset", overlong="truncate")

    def loaded(*sizes, **options):
        samples = [{"tokens": np.arange(n), "row": 0} if form == "fields" else np.arange(n) for n in sizes]
        fields = {"tokens": "length", "row": "row"} if form == "fields" else None
        batches = list(load(plan, samples, fields=fields, **given | options))
        return [(each["lengths"] if form == "fields" else each.lengths).item() for each in batches]

    assert loaded(4, 8, 9) == loaded(4, 8, 11) == [4, 8, 8]
    with pytest.raises(ValueError, match="id 0: 6"):
        loaded(6, 8, 9)
    if given:
        with pytest.raises(ValueError, match="id 1: 10 tokens, planned 8 tokens"):
            loaded(4, 10, 9)
        assert loaded(6, 10, 9, on_mismatch="adjust") == [4, 8, 8]
        assert loaded(6, 8, 9, on_bad_sample="skip", max_bad_fraction=0.5) == [0, 8, 8]


def test_packed_rows_cut_only_samples_that_are_planned_as_too_long():
    plan = make_plan([4, 2, 8, 10], [(1, 6), (1, 8)], packing="best_fit", order="dataset", overlong="truncate")

    def loaded(*sizes):
        return sum(int((batch.segment_ids > 0).sum()) for batch in load(plan, [np.arange(n) for n in sizes]))

    assert loaded(4, 2, 8, 10) == loaded(4, 2, 8, 12) == 22
    for wrong in ((6, 2, 8, 10), (4, 4, 8, 10)):
        with pytest.raises(ValueError, match=r"hold|longer than their bucket"):
            loaded(*wrong)


def test_both_sides_of_a_pair_are_compared_and_adjusted():
    lengths = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)
    pairs = [(DATASET[i], DATASET[len(DATASET) - 1 - i]) for i in range(len(DATASET))]
    plan = make_plan(lengths, [(4, 12, 12)], order="length")
    assert PlanSource(plan, pairs, collate_tokens, lengths=lengths).read(0).num_adjusted == 0
    victim = int(plan.rows(0)[0, 0])
    source, target = lengths[victim].tolist()
    pairs[victim] = (np.resize(pairs[victim][0], source + 2), pairs[victim][1])
    with pytest.raises(ValueError, match=f"id {victim}: {source + 2} and {target} tokens, planned {source} and"):
        PlanSource(plan, pairs, collate_tokens, lengths=lengths)[0]
    read = PlanSource(plan, pairs, collate_tokens, lengths=lengths, on_mismatch="adjust").read(0)
    assert (read.batch.source_lengths[0, 0], read.num_adjusted) == (source, 1)


def test_samples_of_ones_own_collate_are_compared_where_they_have_a_length():
    texts = [DATASET[i].tobytes().decode() for i in range(len(DATASET))]
    assert PlanSource(PLAN, texts, lambda step: step.ids, lengths=LENGTHS).read(0).num_adjusted == 0
    texts[int(PLAN.rows(0)[0, 0])] += "!"
    with pytest.raises(ValueError, match="have other lengths than planned"):
        PlanSource(PLAN, texts, lambda step: step.ids, lengths=LENGTHS)[0]
    with pytest.raises(ValueError, match=r"no tokens alone, but int; id \d+: .*`len\(\)` does not count the tokens"):
        PlanSource(PLAN, list(range(len(DATASET))), lambda step: step.ids, lengths=LENGTHS)[0]


@dataclasses.dataclass
class Labelled:
    tokens: np.ndarray
    label: int = 1


LABELLED = {
    "tuple of ndarray, int": lambda tokens: (tokens, 1),
    "tuple of str, int": lambda tokens: ("text", 1),
    "dict with the keys 'tokens', 'label'": lambda tokens: {"tokens": tokens, "label": 1},
    "Labelled": Labelled,
}


@pytest.mark.parametrize("on_mismatch", ["error", "adjust"])
@pytest.mark.parametrize("kind", LABELLED)
def test_fields_are_not_taken_for_tokens(kind, on_mismatch):
    """`len` of tokens and a label is 2, whatever was planned: cut to 1 token, the label was lost."""
    samples = [LABELLED[kind](DATASET[i]) for i in range(len(DATASET))]
    source = PlanSource(PLAN, samples, lambda step: step, lengths=LENGTHS, on_mismatch=on_mismatch)
    first, second = (int(i) for i in PLAN.rows(0)[0, :2])
    with pytest.raises(ValueError, match=f"id {first}: no .*, but {kind}; id {second}: no .*, but {kind}"):
        source.read(0)
    read = PlanSource(PLAN, samples, lambda step: step).read(0)
    assert read.batch.samples[0][0] is samples[first]


def test_lengths_that_cannot_be_those_of_the_plan_are_refused():
    with pytest.raises(ValueError, match="the plan holds sample 39, and lengths are of 39 samples"):
        load(PLAN, DATASET, lengths=LENGTHS[1:])
    with pytest.raises(ValueError, match="lengths are of 39 samples, the dataset holds 40"):
        PlanSource(PLAN, DATASET, lengths=LENGTHS[1:])
    with pytest.raises(ValueError, match="needs the lengths"):
        PlanSource(PLAN, DATASET, on_mismatch="adjust")
    with pytest.raises(ValueError, match="on_mismatch"):
        PlanSource(PLAN, DATASET, lengths=LENGTHS, on_mismatch="pad")


class OneWay(str):
    """Pickles, and does not unpickle."""

    def __reduce__(self):
        return int, (str(self),)


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (OSError(5, "disk on fire"), "OSError(5, 'disk on fire')"),
        (OSError(OneWay("disk")), "RuntimeError(\"OSError('disk')\")"),
    ],
    ids=["same", "no pickle"],
)
def test_a_portable_error_keeps_notes_and_traceback(error, arrives):
    error.add_note("while reading sample 7")
    portable = portable_error(error)
    assert repr(portable) == arrives
    note, told = portable.__notes__
    assert note == "while reading sample 7"
    assert told.startswith("In a worker process:\n")
    assert "disk" in told


def answered(length, first):
    """A sample that is learned from some token on."""
    return WeightedTokens(np.arange(length), np.arange(length) >= first)


@pytest.mark.parametrize(("layout", "expected"), [("padded", 3), ("packed", 3), ("split", 4), ("pairs", 1)])
def test_samples_without_a_target_are_counted_as_they_are_cut(layout, expected):
    samples = [np.arange(5), answered(5, 3), answered(8, 3), answered(8, 4), answered(3, 3), answered(9, 8)]
    lengths, collate = np.array(list(map(len, samples))), collate_tokens
    if layout == "padded":
        plan, collate = make_plan(lengths, [(2, 4)], order="dataset", overlong="truncate"), collate_tokens
    elif layout == "packed":
        plan = make_plan(lengths, [(2, 4)], packing="best_fit", overlong="truncate", order="dataset")
    elif layout == "split":  # four chunks have none: one of the fourth sample, the fifth, and two of the last
        plan = make_plan(lengths, [(2, 4)], packing="best_fit", overlong="split", order="dataset")
    else:
        samples, collate = [(np.arange(2), sample) for sample in samples], collate_tokens
        plan = make_plan(np.stack([[2] * 6, lengths], axis=1), [(2, 3, 9)], order="dataset")
    read = [PlanSource(plan, samples, collate).read(step) for step in range(plan.num_steps)]
    assert sum(step.num_without_target for step in read) == expected
    assert sum(step.batch.num_sequences for step in read) == (12 if layout == "split" else 6)


class Bad:
    """The samples, but under some ids something else, or an error."""

    def __init__(self, samples, bad):
        self.samples, self.bad, self.num_calls = samples, bad, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        found = self.bad.get(index, self.samples[index])
        if isinstance(found, BaseException):
            raise found
        return found


class AtOnce(Bad):
    """Reads several samples at once, too."""

    def __getitems__(self, indices):
        self.num_calls += 1
        return [self[i] for i in indices]


SAMPLES = [DATASET[i] for i in range(len(DATASET))]
PAIRS = [(DATASET[i], DATASET[len(DATASET) - 1 - i]) for i in range(len(DATASET))]
PAIR_LENGTHS = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)
BAD = {
    2: (OSError(5, "disk on fire"), "OSError: [Errno 5] disk on fire"),
    11: (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UnicodeDecodeError: "),
    17: (StopIteration(), "RuntimeError: the dataset raised StopIteration"),
    19: (np.zeros(0, int), "no token"),
    23: (np.zeros(13, int), "13 tokens, planned"),
    24: (np.full(LENGTHS[24], 2**40), "tokens must fit int32"),
    29: (np.zeros(LENGTHS[29]), "1-D float64"),
    31: ({"tokens": SAMPLES[31]}, "no tokens alone, but dict with the keys 'tokens'"),
    37: (None, "no tokens alone, but NoneType"),
}
BAD_PAIRS = {
    2: (OSError(5, "disk on fire"), "OSError"),
    9: ((SAMPLES[9], SAMPLES[9][:0]), "tokens, planned"),
    13: ((SAMPLES[13], np.full(LENGTHS[-14], 0.5)), "no 1-D array of integer tokens, but 1-D float64"),
}
KINDS = {
    "padded": (PLAN, SAMPLES, LENGTHS, collate_tokens, BAD),
    "packed": (
        make_plan(LENGTHS, [(4, 12)], packing="best_fit", num_microbatches=2, order="length"),
        *(SAMPLES, LENGTHS, collate_tokens, BAD),
    ),
    "pairs": (
        make_plan(PAIR_LENGTHS, [(4, 12, 12)], num_microbatches=2, order="length"),
        *(PAIRS, PAIR_LENGTHS, collate_tokens, BAD_PAIRS),
    ),
    "packed pairs": (
        make_plan(PAIR_LENGTHS, [(4, 16, 16)], packing="best_fit", num_microbatches=2, order="length"),
        *(PAIRS, PAIR_LENGTHS, collate_tokens, BAD_PAIRS),
    ),
    "split": (
        make_plan(LENGTHS, [(4, 8)], packing="best_fit", overlong="split", num_microbatches=2, order="length"),
        *(SAMPLES, LENGTHS, collate_tokens, BAD),
    ),
    "wrapped": (
        make_plan(LENGTHS, [(4, 8)], packing="wrapped", num_microbatches=2, order="length"),
        *(SAMPLES, LENGTHS, collate_tokens, BAD),
    ),
}


@pytest.mark.parametrize("dataset_type", [Bad, AtOnce])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_samples_leave_padding_in_steps_as_planned(kind, dataset_type):
    plan, samples, lengths, collate, of_kind = KINDS[kind]
    dataset = dataset_type(samples, {i: sample for i, (sample, _) in of_kind.items()})
    source = PlanSource(plan, dataset, collate, lengths=lengths, on_bad_sample="skip")
    expected = PlanSource(plan, samples, collate, lengths=lengths)
    skipped = {}
    for step in range(plan.num_steps):
        read, whole = source.read(step), expected.read(step).batch
        told = {read.ids.item(place): reason for place, reason in read.bad.items()}
        assert all(of_kind[i][1] in reason and "\n" not in reason for i, reason in told.items()), told
        skipped |= told
        assert read.num_samples == len(read.ids) - len(read.bad)
        for leaf, other in zip(read.batch, whole, strict=True):
            assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert read.batch.num_sequences == whole.num_sequences == plan.num_sequences[step]
        ids = read.ids[~np.isin(np.arange(len(read.ids)), [*read.bad])]
        assert read.batch.ids[read.batch.is_real].tolist() == ids.tolist()
        assert (read.batch.ids[~read.batch.is_real] == -1).all()
        # Every token of the others is there, in the order of the plan, with its weight.
        is_bad = np.isin(plan.rows(step), list(of_kind))
        for m, rows in enumerate(np.where(is_bad, -1, plan.rows(step))):
            tokens = getattr(read.batch, "tokens", getattr(read.batch, "target_tokens", None))[m]
            kept = samples_in(plan, step, m, rows, samples)
            assert tokens[read.batch.weights[m] > 0].tolist() == kept
    assert skipped.keys() == of_kind.keys()


def samples_in(plan, step, m, rows, samples):
    """The tokens, of pairs those of targets, of what these rows of a step hold."""
    _, starts, _, stops = plan.local_rows(step)
    flat = []
    for place, i in np.ndenumerate(rows):
        if i >= 0:
            sample = samples[i][1] if isinstance(samples[i], tuple) else samples[i]
            flat += sample[slice(None) if starts is None else slice(starts[m][place], stops[m][place])].tolist()
    return flat


@pytest.mark.parametrize("change", [-3, -1, 1, 3])
def test_a_sample_of_another_length_does_not_shift_those_that_are_wrapped_after_it(change):
    """Rows that would be as full as planned, of other tokens."""
    plan = make_plan([6] * 8, [(2, 8)], packing="wrapped", order="dataset")
    samples = [np.arange(6)] * 8
    assert PlanSource(plan, samples, collate_tokens)[0].tokens[0, :, :6].tolist() == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5, 0, 1],
    ]
    two = make_plan([6] * 8, [(1, 8)], packing="wrapped", order="dataset", num_microbatches=2)
    for m in range(2):  # each of two processes
        rows = PlanSource(two, samples, collate_tokens, shard=(m, 2))[0].tokens
        assert rows.tolist() == PlanSource(two, samples, collate_tokens)[0].tokens[[m]].tolist()
    samples[0] = np.arange(6 + change)
    with pytest.raises(ValueError, match=r"not the|longer than their bucket"):
        PlanSource(plan, samples, collate_tokens)[0]


def test_a_packed_row_keeps_the_rest_of_its_samples():
    plan, samples, lengths, collate, _ = KINDS["packed"]
    step, m, row = next(
        (step, m, row)
        for step in range(plan.num_steps)
        for m, row in np.argwhere((plan.rows(step) >= 0).sum(axis=2) > 2).tolist()
    )
    first, *others = (i for i in plan.rows(step)[m, row].tolist() if i >= 0)
    batch = PlanSource(plan, Bad(samples, {first: OSError()}), collate, lengths=lengths, on_bad_sample="skip")[step]
    segments = [n for n, i in enumerate(others, 1) for _ in range(lengths[i])]
    assert batch.segment_ids[m, row].tolist() == [*segments, *[0] * (12 - len(segments))]
    dataset = Bad(samples, dict.fromkeys([first, *others], OSError()))
    read = PlanSource(plan, dataset, collate, lengths=lengths, on_bad_sample="skip").read(step)
    assert not read.batch.segment_ids[m, -1].any()  # the empty row is the last one, as in any step
    assert read.num_samples == plan.num_sequences[step] - len([first, *others])


def test_a_collate_function_of_ones_own_gets_the_samples_that_are_left():
    victims = PLAN.rows(0)[0, :2].tolist()
    dataset = Bad([text.tobytes().decode() for text in SAMPLES], dict.fromkeys(victims, OSError("gone")))
    read = PlanSource(PLAN, dataset, lambda step: step, on_bad_sample="skip").read(0)
    rows, planned = read.batch.ids[0].tolist(), PLAN.rows(0)[0].tolist()
    assert rows == [*planned[2:], -1, -1]  # padding rows are the last ones, as in any step
    assert read.batch.samples[0] == [dataset.samples[i] for i in planned[2:]]
    assert (read.batch.num_tokens, read.num_samples) == (None, PLAN.num_sequences[0] - 2)


def broken_collate(step):
    raise ValueError("of no sample alone")


def test_what_no_sample_alone_is_to_blame_for_is_an_error():
    options = {"lengths": LENGTHS, "on_bad_sample": "skip"}
    with pytest.raises(ValueError, match="of no sample alone"):
        PlanSource(PLAN, SAMPLES, broken_collate, **options)[0]
    first = int(PLAN.rows(0)[0, 0])
    for dataset_type in (Bad, AtOnce):
        with pytest.raises(MemoryError):
            PlanSource(PLAN, dataset_type(SAMPLES, {first: MemoryError()}), **options)[0]


def test_lengths_tell_which_samples_are_bad_where_the_library_collates():
    with pytest.raises(ValueError, match='on_bad_sample="skip" needs the lengths that the plan was made for, lengths='):
        PlanSource(PLAN, SAMPLES, on_bad_sample="skip")
    with pytest.raises(ValueError, match="on_bad_sample"):
        PlanSource(PLAN, SAMPLES, lengths=LENGTHS, on_bad_sample="warn")


def test_samples_of_another_length_are_adjusted_before_they_are_bad():
    step, first, second = two_of_one_step()
    samples = changed(**{f"i{first}": LENGTHS[first] - 1, f"i{second}": 0})
    read = PlanSource(PLAN, samples, lengths=LENGTHS, on_mismatch="adjust", on_bad_sample="skip").read(step)
    assert (read.num_adjusted, [read.ids.item(i) for i in read.bad], [*read.bad.values()]) == (
        1,
        [second],
        ["no token"],
    )


@pytest.mark.parametrize("on_bad_sample", ["error", "skip"])
def test_a_dataset_reads_the_samples_of_a_step_at_once(on_bad_sample):
    dataset = AtOnce(SAMPLES, {})
    source = PlanSource(PLAN, dataset, lengths=LENGTHS, on_bad_sample=on_bad_sample)
    for step in range(PLAN.num_steps):
        assert_equal_leaves(source[step], PlanSource(PLAN, SAMPLES)[step])
    assert dataset.num_calls == PLAN.num_steps


def assert_equal_leaves(batch, other):
    for leaf, of_other in zip(batch, other, strict=True):
        assert np.array_equal(leaf, of_other)


def test_an_error_of_the_dataset_keeps_its_cause():
    class Wrapping(AtOnce):
        def __getitem__(self, index):
            try:
                return [][index]
            except IndexError as error:
                raise OSError("gone") from error

    with pytest.raises(OSError, match="gone") as raised:
        PlanSource(PLAN, Wrapping(SAMPLES, {}))[0]
    assert isinstance(raised.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ("truncate_start", {20: range(12, 20), 14: range(6, 14), 10: range(2, 10), 5: range(5)}),
        ("truncate_random", {20: range(3, 11), 14: range(3, 11), 10: range(2, 10), 5: range(5)}),
    ],
)
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_adjusted_samples_are_cut_by_the_rule_of_the_plan(overlong, expected, packing):
    plan = make_plan([14], [(1, 8)], overlong=overlong, packing=packing)
    if overlong == "truncate_random":
        plan = dataclasses.replace(plan, chunk_starts=np.array([3]))
    for length, kept in expected.items():
        dataset = [np.arange(length)]
        batch = PlanSource(plan, dataset, lengths=[14], on_mismatch="adjust")[0]
        assert batch.tokens[0, 0, : len(kept)].tolist() == list(kept)
        assert batch.tokens[0, 0, len(kept) :].sum() == 0
        if length != 14:
            with pytest.raises(ValueError, match="id 0"):
                PlanSource(plan, dataset, lengths=[14])[0]


@pytest.mark.parametrize(("planned", "longest"), [(10, 8), (5, 12)])
@pytest.mark.parametrize("form", ["padded", "best_fit"])
def test_positions_in_a_sample_are_moved_where_its_beginning_is_cut_off(form, planned, longest):
    """By brute force: each token names the next but one, by its place in the whole sample."""
    plan = make_plan([planned, 3], [(1, longest)], overlong="truncate_start", packing=form, num_microbatches=2)
    named, tokens = {"tokens": "length", "heads": ("length of length", -1)}, np.arange(12)
    samples = [{"tokens": tokens, "heads": np.where(tokens < 10, tokens + 2, -1)}]
    samples.append({"tokens": tokens[:3], "heads": [-1] * 3})
    source = PlanSource(plan, samples, lengths=[planned, 3], on_mismatch="adjust", fields=named)
    found = 0
    for batch in map(source.__getitem__, range(len(source))):
        for tokens, heads in zip(*(batch[name].reshape(-1, batch["tokens"].shape[2]) for name in named), strict=True):
            (places,) = np.nonzero(heads >= 0)
            assert (tokens[heads[places]] == tokens[places] + 2).all()
            found += len(places)
    assert found == min(planned, 8) - 2

    samples[0]["heads"] = np.full(12, 11 - min(planned, 8))  # the last that is cut off, 1 before the rest: not −1, none
    with pytest.raises(ValueError, match="id 0: the field 'heads' holds the positions"):
        [source[step] for step in range(len(source))]
