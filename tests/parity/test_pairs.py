"""Pairs of source and target: their buckets against all chains and nested sets, and their plans."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import assert_same_plan, in_both, slow_pairs
from .inputs import ORDERS, arrangements, difficulties, for_plan, many, moderate, seeds, steps_of


def exact_cost(rows, source, *targets):
    """Seconds without rounding errors, so that equal totals are equal."""
    return 0.5 + rows * (source + 3 * sum(targets)) / 4


SIZES = ["sum", "larger", "product"]


def pairs(longest, max_size, size, num_lengths=2):
    """Draw two lengths, or more; all but the first may be 0 where that counts something."""
    others = [st.integers(1 if size == "product" else 0, longest)] * (num_lengths - 1)
    return st.lists(st.tuples(st.integers(1, longest), *others), min_size=1, max_size=max_size)


@st.composite
def pair_bucket_arguments(draw):
    """Draw arguments of `make_buckets` that all sets of edges can be tried for; some fit nothing."""
    size, num_lengths = draw(st.sampled_from(SIZES)), draw(st.sampled_from([2, 2, 3, 4]))
    multiples = st.sampled_from([1, 1, 2, 4])
    multiple = draw(st.one_of(multiples, st.tuples(*[multiples] * num_lengths)))
    offset = 0
    if draw(st.booleans()):
        bounds = [multiple] * num_lengths if isinstance(multiple, int) else multiple
        offset = tuple(draw(st.integers(0, bound - 1)) for bound in bounds)
    seconds = {"cost": exact_cost, "compile_seconds": draw(st.sampled_from([0.0, 4.0]))}
    return (seconds if draw(st.booleans()) else {}) | {
        "lengths": draw(pairs(9, 9 if num_lengths == 2 else 7, size, num_lengths)),
        "max_tokens": draw(st.integers(8, 60 if size != "product" else 30 * 3**num_lengths)),
        "size": size,
        "max_shapes": draw(st.integers(1, 5)),
        "max_candidates": draw(st.integers(1, 4 if num_lengths == 2 else 2)),
        "num_microbatches": draw(st.integers(1, 3)),
        "row_multiple": draw(st.integers(1, 3)),
        "length_multiple": multiple,
        "length_offset": offset,
        "max_sequences": draw(st.sampled_from([1, 2, 5, 1000])),
    }


@st.composite
def pair_plan_arguments(draw):
    """Draw valid arguments of `make_plan` for pairs, for which at least one sample remains."""
    size, num_lengths = draw(st.sampled_from(SIZES)), draw(st.sampled_from([2, 2, 3, 5]))
    given_lengths = draw(pairs(12, 30, size, num_lengths))
    shapes = set(draw(st.lists(st.tuples(*[st.integers(1, 12)] * num_lengths), max_size=4)))
    overlong = draw(st.sampled_from(["error", "drop"]))
    shapes.add((12,) * num_lengths if overlong == "error" else tuple(max(1, length) for length in given_lengths[0]))
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 4)) == 0:
        order = [0, *draw(st.permutations(range(1, len(given_lengths))))]
    return {
        "lengths": given_lengths,
        "buckets": [(draw(st.integers(1, 3)), *shape) for shape in sorted(shapes)],
        "num_microbatches": draw(st.integers(1, 3)),
        "order": order,
        "difficulty": draw(difficulties([slow_pairs.choose_count(size)(*pair) for pair in given_lengths])),
        "size": size,
        "seed": draw(seeds),
        "overlong": overlong,
    } | draw(arrangements(order))


def make_plan(package, arguments):
    return package.make_plan(**for_plan(package, arguments) | {"lengths": np.array(arguments["lengths"])})


@many
@given(arguments=pair_bucket_arguments())
def test_pair_buckets_are_the_best_of_all_sets(package, arguments):
    """The least cost over chains and nested sets; ties as the contract settles them; refused where nothing fits."""
    expected = slow_pairs.choose_pair_buckets(**arguments)
    call = arguments | {"lengths": np.array(arguments["lengths"])}
    if expected is None:
        with pytest.raises(ValueError, match=rf"\b{arguments['max_tokens']}\b"):
            package.make_buckets(**call)
        return
    buckets = package.make_buckets(**call)
    assert [tuple(map(int, bucket)) for bucket in buckets.shapes] == expected


@pytest.mark.parametrize(("size", "rows"), [("sum", 4), ("larger", 6), ("product", 3)])
def test_the_budget_counts_what_size_says(package, size, rows):
    """Six of each pair, four or eight; a plan knows it from its buckets, or is told."""
    lengths = [[2, 4]] * 23
    buckets = package.make_buckets(lengths, 24, size=size)
    assert buckets.shapes == ((rows, 2, 4),)
    counted = 24 // rows
    plans = (
        package.make_plan(lengths, buckets),
        package.make_plan(lengths, buckets.shapes, size=size),
        package.make_plan(lengths, max_tokens=24, size=size),
    )
    for plan in plans:
        assert plan.size == size
        assert plan.num_tokens.sum() == 23 * counted
        assert plan.padding == 1 - 23 * counted / (plan.num_steps * rows * counted)


def image_sizes(num_images=500):
    """Return heights and widths of images: lognormal areas around 224 x 224, four aspect ratios, some upright."""
    rng = np.random.default_rng(0)
    area = 224**2 * rng.lognormal(0, 0.4, num_images)
    ratio = rng.choice([1, 4 / 3, 3 / 2, 16 / 9], num_images)
    ratio = np.where(rng.random(num_images) < 0.3, 1 / ratio, ratio)
    return np.clip(np.sqrt(np.stack([area / ratio, area * ratio], axis=1)), 32, 1024).astype(int)


def test_the_padding_of_images_is_that_of_their_pixels(package):
    """By the sum of the sides a plan says 19 % where 37 % of the pixels are padding; by their product it says 35 %."""
    sizes = image_sizes()

    def padding_of_pixels(plan):
        real = padded = 0
        for step in range(plan.num_steps):
            ids = plan.rows(step)
            _, height, width = plan.buckets.shapes[plan.step_bucket[step]]
            padded += ids.size * height * width
            real += sum(int(sizes[i][0]) * int(sizes[i][1]) for i in ids[ids >= 0])
        return 1 - real / padded

    by_sum = package.make_plan(sizes, max_tokens=2**14, max_shapes=7, length_multiple=16)
    assert by_sum.padding == pytest.approx(0.1923, abs=1e-4)
    assert padding_of_pixels(by_sum) == pytest.approx(0.3743, abs=1e-4)
    by_pixels = package.make_plan(sizes, max_tokens=2**22, max_shapes=7, length_multiple=16, size="product")
    assert by_pixels.padding == padding_of_pixels(by_pixels) < padding_of_pixels(by_sum)
    assert f"{by_pixels.padding:.2%}" in by_pixels.report()
    assert all(rows * height * width <= 2**22 for rows, height, width in by_pixels.buckets.shapes)


def test_the_order_by_length_is_by_what_pairs_count(package):
    """A long thin image comes before a square one that holds more; its sum would put it behind."""
    lengths, buckets = [[40, 2], [10, 10], [3, 3]], [(1, 40, 40)]
    orders = {
        size: package.make_plan(lengths, buckets, order="length", size=size).sample_ids.tolist()
        for size in ("sum", "larger", "product")
    }
    assert orders == {"sum": [2, 1, 0], "larger": [2, 1, 0], "product": [2, 0, 1]}


def test_a_second_length_may_be_0(package):
    """A graph without edges: it counts its nodes, goes into the bucket of its nodes, and no bucket is of length 0."""
    graphs = [[3, 0], [5, 0], [4, 7], [2, 1]]
    plan = package.make_plan(graphs, max_tokens=24, max_shapes=4, order="length")
    assert sorted(plan.sample_ids.tolist()) == [0, 1, 2, 3]
    assert plan.num_tokens.sum() == 22
    alone = package.make_plan(graphs[:2], max_tokens=24, max_shapes=1)
    assert alone.buckets.shapes == ((2, 5, 1),)
    assert (alone.num_tokens.sum(), alone.padding) == (8, 1 - 8 / 12)


def arrays_of(batch):
    """Return the arrays of a batch by name."""
    arrays = batch if isinstance(batch, dict) else batch._asdict() if hasattr(batch, "_asdict") else vars(batch)
    return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items() if array is not None}


def samples_of(lengths, kind):
    """Return samples of two lengths: of tokens as lists or arrays, or of fields with features."""
    if kind == "fields":
        return [
            {"nodes": np.full((first, 3), i + 1.0, np.float32), "edges": np.full((second, 2), i + 1), "label": i}
            for i, (first, second) in enumerate(lengths)
        ]
    make = list if kind == "lists" else np.array
    return [(make([i + 1] * first), make([i + 1] * second)) for i, (first, second) in enumerate(lengths)]


@pytest.mark.parametrize("kind", ["lists", "arrays", "fields"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_samples_without_a_second_length_are_loaded(package, kind, is_packed):
    """Their elements of the first side are there, none of the second, and nothing is NaN."""
    lengths = [[3, 0], [5, 0], [4, 7], [2, 1]]
    packed = {"packing": "best_fit", "row_lengths": (8, 8)} if is_packed else {}
    plan = package.make_plan(lengths, max_tokens=64, max_shapes=2, **packed)
    axes = {"nodes": "source", "edges": "target", "label": "row"} if kind == "fields" else None
    first, second = ("nodes", "edges") if kind == "fields" else ("source_tokens", "target_tokens")
    totals, num_sequences = np.zeros(2), 0.0
    for batch in package.load(plan, samples_of(lengths, kind), fields=axes):
        arrays = arrays_of(batch)
        assert all(np.isfinite(array).all() for array in arrays.values())
        totals += [arrays[first].sum(), arrays[second].sum()]
        num_sequences += float(arrays["num_sequences"].sum())
    # Sample i holds the number i + 1 at every element.
    features = (3, 2) if axes else (1, 1)
    assert totals.tolist() == [(3 * 1 + 5 * 2 + 4 * 3 + 2 * 4) * features[0], (7 * 3 + 1 * 4) * features[1]]
    assert num_sequences == 4


@pytest.mark.parametrize("size", ["product", "larger"])
def test_images_are_padded_on_both_axes_and_compared_with_what_was_planned(package, size):
    """A field of axes "source target"; the planned tokens are those of `size`."""
    sizes = np.random.default_rng(0).integers(4, 20, (40, 2))
    images = [{"image": np.full((*size, 3), i, np.uint8), "label": i % 5} for i, size in enumerate(sizes)]
    plan = package.make_plan(sizes, max_tokens=2000, max_shapes=3, size=size, num_microbatches=2)
    axes = {"image": "source target", "label": "row"}
    for step, batch in enumerate(package.load(plan, images, fields=axes)):
        bucket = plan.buckets.shapes[plan.step_bucket[step]]
        expected = np.zeros((2, bucket[0], *bucket[1:], 3))
        for (m, b), i in np.ndenumerate(plan.rows(step)):
            if i >= 0:
                height, width = sizes[i]
                expected[m, b, :height, :width] = i
        assert np.array_equal(arrays_of(batch)["image"], expected)
    smaller = [{"image": each["image"][:-1, :-1], "label": each["label"]} for each in images]
    with pytest.raises(ValueError, match=r"tokens.*planned"):
        list(package.load(plan, smaller, fields=axes))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda p: p.make_buckets([[3, 2], [4, 0]], 64, size="product"), r"at least 1.*id 1\D+4\D+0"),
        (lambda p: p.make_plan([[3, 2], [4, 0]], [(1, 9, 9)], size="product"), r"at least 1.*id 1\D+4\D+0"),
        (lambda p: p.make_plan([[2**40, 2**40]], [(1, 2**40, 2**40)], size="product"), "int64|2\\*\\*63"),
        (lambda p: p.make_plan([3, 2], max_tokens=64, size="product"), "size.*one"),
        (lambda p: p.make_plan([3, 2], [(1, 3)], size="product"), "size"),
        (
            lambda p: p.make_plan([[3, 2]], [(1, 4, 4)], packing="best_fit", size="product"),
            "size.*packed",
        ),
        (lambda p: p.make_plan([[3, 2]], [(1, 3, 2)], size="area"), "size.*area"),
        (lambda p: p.make_buckets([[3, 2]], 64, max_cost=2.0, cost=lambda b, s, t: b), "max_cost"),
    ],
)
def test_sizes_that_cannot_be_counted_are_refused(package, call, named):
    """By name, with the first pairs."""
    with pytest.raises(ValueError, match=named):
        call(package)


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_file_tells_what_its_pairs_count(package, tmp_path, size):
    """By its checksum: the fields of all files are the same."""
    from jvarlen.planning import plan_file

    lengths = np.random.default_rng(0).integers(1, 40, (60, 2))
    plan = package.make_plan(lengths, max_tokens=4096, max_shapes=3, length_multiple=4, size=size)
    path = tmp_path / "plan.npz"
    plan.save(path)
    with np.load(path) as archive:
        assert set(archive.files) == set(plan_file._FIELDS)
    for other in ("jvarlen", "torch_ref"):
        loaded = importlib.import_module(other).Plan.load(path)
        assert (loaded.size, loaded.padding, loaded.digest) == (size, plan.padding, plan.digest)


def test_both_families_win_somewhere(package):
    """Sides that grow together make a chain; sides that do not make a set in which targets are cut anew."""
    together = package.make_buckets([[k, k] for k in (1, 5, 9) for _ in range(20)], 40)
    assert [bucket[1:] for bucket in together.shapes] == [(1, 1), (5, 5), (9, 9)]
    crossed = package.make_buckets([(s, t) for s in (1, 9) for t in (1, 9) for _ in range(20)], 40)
    assert [bucket[1:] for bucket in crossed.shapes] == [(1, 1), (1, 9), (9, 1), (9, 9)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"lengths": []}, "length"),
        ({"lengths": [[1], [2]]}, "length"),
        ({"lengths": [[1.0, 2.0]]}, "length"),
        ({"lengths": [[1, 2], [0, 3]]}, r"\b1\D+0\D+3\b"),
        ({"lengths": [[1, 2], [3, -1]]}, r"\b1\D+3\D+-1\b"),
        ({"size": "area"}, "area"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_candidates": 0}, "max_candidates"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_length": 7}, r"max_length.*\b1\D+8\D+2\b.*7|max_length=7.*\b1\D+8\D+2\b"),
        ({"max_length": 2, "overlong": "drop"}, "drop.* no sample"),
        ({"overlong": "truncate"}, "truncate"),
        ({"lengths": [[1, 2], [30, 35], [3, 4]]}, r"\b1\D+30\D+35\b"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what; pairs are listed as such."""
    valid = {"lengths": [[3, 5], [8, 2]], "max_tokens": 64}
    with pytest.raises(ValueError, match=named):
        package.make_buckets(**(valid | arguments))


def test_pairs_above_max_length_are_dropped_on_request(package):
    """The others get the buckets that they have alone, and the plan counts the dropped ones."""
    pairs = np.random.default_rng(0).integers(1, 30, (60, 2)) * 10
    kept = pairs[(pairs <= 200).all(axis=1)]
    few = {"max_length": 200, "overlong": "drop", "max_shapes": 4}
    assert package.make_buckets(pairs, 2000, **few) == package.make_buckets(kept, 2000, max_shapes=4)
    for plan in (
        package.make_plan(pairs, max_tokens=2000, **few),
        package.make_plan(pairs, package.make_buckets(pairs, 2000, **few), overlong="drop"),
    ):
        assert plan.num_dropped == len(pairs) - len(kept) > 0
        assert sorted(plan.sample_ids) == np.flatnonzero((pairs <= 200).all(axis=1)).tolist()


# Plans


@moderate
@given(arguments=pair_plan_arguments())
def test_both_plan_pairs_alike(tmp_path_factory, arguments):
    """Each pair in the first bucket that holds both sides, ordered by its size; three columns a file."""
    plan, other = in_both(lambda package: make_plan(package, arguments))
    assert_same_plan(plan, other)
    lengths, buckets = arguments["lengths"], arguments["buckets"]
    counts = slow_pairs.choose_count(arguments["size"])
    steps = steps_of(plan)
    for bucket, ids in steps:
        for i in ids:
            holding = [k for k, (_, *sides) in enumerate(buckets) if np.less_equal(lengths[i], sides).all()]
            assert holding[0] == bucket
    tokens = [sum(counts(*lengths[i]) for i in ids) for _, ids in steps]
    positions = sum(rows * counts(*sides) for rows, *sides in (buckets[k] for k, _ in steps))
    assert plan.num_tokens.tolist() == tokens
    assert plan.padding == pytest.approx(1 - sum(tokens) / positions / arguments["num_microbatches"], abs=1e-12)
    path = tmp_path_factory.mktemp("pairs") / "plan.npz"
    plan.save(path)
    with np.load(path, allow_pickle=False) as archive:
        assert archive["buckets"].tolist() == [list(bucket) for bucket in buckets]
    assert_same_plan(*in_both(lambda package: package.Plan.load(path)))


def test_pairs_that_no_bucket_holds_are_listed(package):
    """By id and both lengths: a pair may fit no bucket though each side fits some."""
    lengths = np.full((500, 2), 3)
    lengths[123], lengths[456] = (9, 4), (4, 77)
    buckets = [(2, 4, 9), (2, 9, 3)]
    with pytest.raises(ValueError, match=r"(?s)\b123\D+9\D+4\b.*\b456\D+4\D+77\b"):
        package.make_plan(lengths, buckets, order="shuffle")
    dropped = package.make_plan(lengths, buckets, order="length", overlong="drop")
    assert dropped.num_dropped == 2
    assert sorted(dropped.sample_ids.tolist()) == [i for i in range(500) if i not in (123, 456)]
    with pytest.raises(ValueError, match="drop"):
        package.make_plan(lengths[[123, 456]], buckets, order="length", overlong="drop")
    with pytest.raises(ValueError, match="truncate"):
        package.make_plan(lengths, buckets, order="length", overlong="truncate")


@pytest.mark.parametrize(
    ("lengths", "buckets", "named"),
    [
        ([[1, 2], [3, 4]], [(2, 4)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4), (1, 9)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4, 4)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4), (1, 4, 4)], "4"),
        ([[1, 2], [3, 4]], [(2, 4, 5), (1, 4, 4)], "4"),
        ([[1, 2], [3, 4]], [(1, 4, 0)], "0"),
        ([[1, 2, 3]], [(1, 4, 5)], "length"),
    ],
    ids=str,
)
def test_widths_that_do_not_match_are_refused(package, lengths, buckets, named):
    """Pairs need buckets of two lengths, single lengths buckets of one, strictly ascending."""
    with pytest.raises(ValueError, match=named):
        package.make_plan(lengths, buckets, order="length")
