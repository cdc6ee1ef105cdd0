"""Samples of three lengths and more: digests, padding of a corpus of videos, and what is refused."""

import hashlib

import numpy as np
import pytest

import jvarlen

from . import in_both


def video_lengths(num_videos=2000):
    """Return frames, heights and widths: seconds at 8 or 24 a second, four heights, five aspect ratios."""
    rng = np.random.default_rng(0)
    frames = np.clip(rng.lognormal(1.2, 0.6, num_videos) * rng.choice([8, 24], num_videos, p=[0.4, 0.6]), 4, 160)
    height = rng.choice([144, 240, 360, 480], num_videos, p=[0.1, 0.3, 0.4, 0.2])
    ratio = rng.choice([9 / 16, 3 / 4, 1, 4 / 3, 16 / 9], num_videos, p=[0.2, 0.1, 0.1, 0.2, 0.4])
    area = height**2 * 4 / 3
    return np.stack([frames, np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=1).astype(np.int64)


def count_padding(plan, lengths):
    """Return the share of voxels that hold nothing, row by row."""
    real = sum(int(np.prod(lengths[i])) for i in plan.sample_ids)
    shapes = [plan.buckets.shapes[k] for k in plan.step_bucket]
    padded = plan.num_microbatches * sum(int(np.prod(shape)) for shape in shapes)
    return 1 - real / padded


@pytest.fixture(scope="module")
def videos():
    return video_lengths()


def test_the_padding_of_videos_is_that_of_their_voxels(package, videos):
    """Planned by the sum of three lengths, over 40 % of the voxels are padding where the plan says less than 30."""
    few = {"max_shapes": 12, "max_candidates": 5, "length_multiple": (1, 16, 16)}
    buckets = package.make_buckets(videos, 2**27, size="product", **few)
    plan = package.make_plan(videos, buckets)
    assert sorted(plan.sample_ids.tolist()) == list(range(len(videos)))
    assert plan.padding == pytest.approx(count_padding(plan, videos), abs=1e-12)
    assert f"{plan.padding:.2%}" in plan.report()
    for rows, frames, height, width in plan.buckets.shapes:
        assert rows * frames * height * width <= 2**27
        assert height % 16 == width % 16 == 0
    by_sum = package.make_plan(videos, package.make_buckets(videos, 2**14, **few))
    assert by_sum.padding < 0.3 < 0.4 < count_padding(by_sum, videos)
    assert plan.padding < count_padding(by_sum, videos) - 0.05


AXES = {"pixels": ("frames height width", 7), "marks": "width frames", "caption": "width", "label": "row"}


def samples_of(lengths):
    """Return small videos, sample i of value i + 1, whose third length is also that of a caption."""
    return [
        {
            "pixels": np.full((*size, 2), i + 1, np.uint8),
            "marks": np.full((size[2], size[0]), i + 1, np.float32),
            "caption": np.arange(size[2]),
            "label": i,
        }
        for i, size in enumerate(lengths.tolist())
    ]


def test_batches_of_three_lengths_hold_what_was_planned(package):
    """Each sample once, in its bucket and place, by brute force; padding counted on the batches is the plan's."""
    lengths = np.random.default_rng(0).integers(1, 8, (60, 3))
    plan = package.make_plan(lengths, max_tokens=600, max_shapes=5, size="product", num_microbatches=2)
    samples, real, padded, seen = samples_of(lengths), 0, 0, []
    for step, batch in enumerate(package.load(plan, samples, fields=AXES)):
        rows, *limits = plan.buckets.shapes[plan.step_bucket[step]]
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        pixels, marks = np.full((2, rows, *limits, 2), 7), np.zeros((2, rows, limits[2], limits[0]))
        found, weights = np.zeros((3, 2, rows), int), np.zeros((2, rows, limits[2]))
        for (m, b), i in np.ndenumerate(plan.rows(step)):
            if i >= 0:
                frames, height, width = found[:, m, b] = lengths[i]
                pixels[m, b, :frames, :height, :width] = i + 1
                marks[m, b, :width, :frames] = i + 1
                weights[m, b, :width] = 1
                seen.append(i)
        for name, expected in (("pixels", pixels), ("marks", marks), ("weights", weights)):
            assert np.array_equal(arrays[name], expected), name
        for word, of_word in zip(("frames", "height", "width"), found, strict=True):
            assert np.array_equal(arrays[f"{word}_lengths"], of_word)
        assert "source_lengths" not in arrays
        real, padded = real + found.prod(axis=0).sum(), padded + np.prod(pixels.shape[:-1])
    assert sorted(seen) == list(range(60))
    assert plan.padding == pytest.approx(1 - real / padded, abs=1e-12)


def test_two_lengths_may_have_names_of_their_own(package):
    lengths = np.random.default_rng(0).integers(1, 9, (20, 2))
    plan = package.make_plan(lengths, max_tokens=200, max_shapes=3, size="product")
    images = [{"image": np.ones(size, np.float32), "rows": np.arange(size[0])} for size in lengths]
    total = np.zeros(3)
    for batch in package.load(plan, images, fields={"image": "height width", "rows": "height"}):
        names = ("image", "height_lengths", "width_lengths")
        total += [float(np.asarray(batch[name], dtype=np.float64).sum()) for name in names]
        assert "source_lengths" not in batch
    assert total.tolist() == [lengths.prod(axis=1).sum(), *lengths.sum(axis=0)]


@pytest.mark.parametrize(
    ("packing", "fields", "named"),
    [
        ("best_fit", {"one": "left", "two": "right"}, "left.*right|source.*target"),
        ("padded", {"tokens": "left", "two": "right"}, "next_token_targets"),
        ("padded", {"target_tokens": "source", "two": "target"}, "next_token_targets"),
    ],
)
def test_names_by_which_tokens_would_be_miscounted_are_refused(package, packing, fields, named):
    """Segments of other names let a sample predict the next; tokens of the first length take weights of the last."""
    plan = package.make_plan([(3, 5), (4, 2)], [(2, 8, 8)], packing=packing)
    samples = [dict(zip(fields, map(np.arange, size), strict=True)) for size in ((3, 5), (4, 2))]
    with pytest.raises(ValueError, match=named):
        list(package.load(plan, samples, fields=fields))


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        # Words in another order than the lengths: the caption's comes first, and is compared with the frames.
        ({"caption": "width", "pixels": "frames height width"}, "another order|in this order"),
        ({"pixels": "frames height width", "caption": "frames"}, "caption"),
        ({"pixels": "frames height"}, "3 lengths.*frames"),
        ({"pixels": "frames height width", "caption": "depth"}, "3 lengths"),
        ({"pixels": "frames source target"}, "3 lengths.*source"),
        ({"pixels": "frames height width", "marks": "width frames width height"}, "marks"),
        ({"pixels": "frames height width", "weights": "frames"}, "weights"),
        ({"pixels": "frames  height width"}, "pixels"),
        (None, "3 lengths"),
    ],
)
def test_words_that_do_not_name_the_lengths_are_refused(package, axes, named):
    lengths = np.array([[1, 4, 9], [2, 5, 7], [3, 6, 8]] * 3)
    plan = package.make_plan(lengths, max_tokens=1000, max_shapes=2, size="product")
    with pytest.raises(ValueError, match=f"(?s){named}"):
        list(package.load(plan, samples_of(lengths), fields=axes))


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"image": "height width", "rows": "heigth"}, "2 lengths.*3.*heigth"),
        ({"image": "length", "rows": "length"}, "2 lengths.*source.*target.*1.*length"),
        ({"image": "source  target", "rows": "source"}, "image"),
    ],
)
def test_words_that_do_not_name_two_lengths_are_refused(package, axes, named):
    plan = package.make_plan([(3, 5), (4, 2)], [(2, 8, 8)])
    images = [{"image": np.ones(size), "rows": np.arange(size[0])} for size in ((3, 5), (4, 2))]
    with pytest.raises(ValueError, match=f"(?s){named}"):
        list(package.load(plan, images, fields=axes))


def test_streams_take_samples_of_three_lengths(package):
    """In the steps of the plan in the order of the dataset, and loaded where the package loads streams."""
    lengths = np.random.default_rng(0).integers(1, 9, (30, 3))
    shapes, options = [(3, 4, 8, 8), (2, 8, 8, 8)], {"num_microbatches": 2, "size": "product"}
    plan = package.make_plan(lengths, shapes, order="dataset", **options)
    expected = [plan.rows(step).tolist() for step in range(plan.num_steps)]
    steps = list(package.stream_batches(lengths.tolist(), shapes, **options))
    assert sorted(step.ids.tolist() for step in steps) == sorted(expected)
    for step in steps:
        assert np.array_equal(step.lengths[step.ids >= 0], lengths[step.ids[step.ids >= 0]])
    if package is jvarlen:
        batches = jvarlen.load(jvarlen.stream_batches(lengths, shapes, **options), samples_of(lengths), fields=AXES)
        pairs = np.concatenate(
            [np.stack([each["ids"], each["height_lengths"]], axis=-1).reshape(-1, 2) for each in batches]
        )
        assert sorted(pairs[pairs[:, 0] >= 0].tolist()) == [[i, height] for i, height in enumerate(lengths[:, 1])]
    with pytest.raises(ValueError, match="one or two lengths"):
        package.stream_batches(lengths, max_tokens=600, packing="best_fit")


def test_videos_of_other_sizes_than_planned_are_refused(package):
    lengths = np.array([[4, 6, 6]] * 8)
    plan = package.make_plan(lengths, max_tokens=1000, size="product")
    with pytest.raises(ValueError, match="planned"):
        list(package.load(plan, samples_of(lengths - [1, 0, 0]), fields=AXES))


def test_lengths_that_are_known_tell_words_in_another_order():
    """Where one bucket is as long along each length, and a sample counts as much in any order."""
    lengths = np.array([[2, 3, 5], [5, 3, 2], [5, 5, 5]])
    plan = jvarlen.make_plan(lengths, max_tokens=1000, max_shapes=1, size="product")
    swapped = {"caption": "width", "pixels": "frames height width"}
    with pytest.raises(ValueError, match="other lengths than planned"):
        list(jvarlen.load(plan, samples_of(lengths), fields=swapped, lengths=lengths))


def grid_of_quantiles(lengths, parts):
    """Return the bucket lengths of a grid: quantiles of each length, as lhotse and Tensor2Tensor take them."""
    edges = [
        np.unique(np.quantile(side, np.arange(1, n + 1) / n, method="higher"))
        for side, n in zip(lengths.T, parts, strict=True)
    ]
    return np.stack(np.meshgrid(*edges, indexing="ij"), axis=-1).reshape(-1, len(parts))


def test_chosen_buckets_waste_less_than_grids_of_quantiles(videos):
    """As many shapes as any grid has; the grids take whole rows, padding rows not counted."""
    chosen, other = in_both(
        lambda package: package.make_buckets(videos, 2**27, max_shapes=12, max_candidates=6, size="product").shapes
    )
    assert chosen == other
    padding = jvarlen.make_plan(videos, chosen, size="product").padding
    for parts in ((12, 1, 1), (3, 2, 2), (2, 3, 2), (4, 3, 1), (2, 2, 3), (1, 3, 4)):
        shapes = grid_of_quantiles(videos, parts)
        first = (videos[:, None] <= shapes).all(axis=2).argmax(axis=1)
        assert padding < 1 - videos.prod(axis=1).sum() / shapes.prod(axis=1)[first].sum() - 0.05, parts


def test_the_digest_of_several_lengths_is_field_by_field(package):
    """With D, and a prefix of their own; of two lengths both stay as they are."""
    ids = hashlib.sha256(np.array([0, 1, 2], "<i8").tobytes()).digest()
    lengths = [[3, 1, 4, 1], [1, 1, 2, 5], [4, 4, 4, 4]]
    for num_lengths, sized in ((2, False), (3, False), (3, True), (4, False)):
        bucket = (2, *[5] * num_lengths)
        steps = {"sequences_per_step": 3} if sized else {}
        plan = package.make_plan([each[:num_lengths] for each in lengths], [bucket], order="dataset", **steps)
        of_lengths = [num_lengths] if num_lengths > 2 else []
        numbers = [1, 1, *of_lengths, 1, 2, 3, *bucket] if sized else [1, 1, *of_lengths, 2, 3, *bucket]
        words = ["jvarlen", *["groups"] * sized, *["lengths"] * (num_lengths > 2), "plan-1\0"]
        content = "-".join(words).encode() + np.array(numbers, "<i8").tobytes() + np.array([0, 0], "<i4").tobytes()
        content += np.array([0, 2] if sized else [], "<i8").tobytes() + np.array([0, 2, 3], "<i8").tobytes()
        assert plan.digest == hashlib.sha256(content + ids).hexdigest()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda p, x: p.make_plan(x, max_tokens=512, packing="best_fit"), "packed"),
        (lambda p, x: p.make_plan(x, [(1, 9, 9, 9)], packing="wrapped"), "packed"),
        (lambda p, x: p.pack_samples(x, (9, 9)), "one or two"),
        (lambda p, x: p.make_plan(x, max_tokens=512, packing="auto"), 'packing="auto" is for .* not of 3'),
        (lambda p, x: p.make_plan(x, max_tokens=512, cost=p.CostModel(1.0, 1.0, 0.0)), "CostModel.* one length"),
        (lambda p, x: p.make_plan(x[:, 0], [(1, 9)], overlong="split"), 'overlong="split" .* packed rows'),
        (lambda p, x: p.make_plan(x, max_tokens=512, overlong="truncate"), "truncate"),
        (lambda p, x: p.make_plan(x, [(1, 9, 9, 9)], overlong="truncate"), "truncate"),
        (lambda p, x: p.make_plan(x, max_tokens=512, strategy="quantile"), "strategy"),
        (lambda p, x: p.make_plan(x, max_tokens=512, length_multiple=(2, 4)), "length_multiple.*3|length_multiple.*2"),
        (lambda p, x: p.make_plan(x, max_tokens=512, length_multiple=4, length_offset=4), "length_offset"),
        (lambda p, x: p.make_plan(x, max_tokens=512, length_multiple=(2, 4, 4), length_offset=(1, 1)), "length_offset"),
        (lambda p, x: p.make_plan(x[:, 0], max_tokens=512, length_multiple=(2, 4)), "length_multiple"),
        (lambda p, x: p.make_plan(x, [(1, 9, 9)]), r"\(N, 2\)|several \[N, D\]"),
        (lambda p, x: p.make_plan(x[:, :2], [(1, 9, 9, 9)]), r"\(N, 3\)|several \[N, D\]"),
        (lambda p, x: p.make_plan(x[:, :1], max_tokens=512), "length"),
        (lambda p, x: p.make_plan(np.full((2, 3), 2**22), [(1, *[2**22] * 3)], size="product"), "int64|2\\*\\*63"),
        (lambda p, x: p.make_buckets(x[:, 0], 512, max_candidates=3), "max_candidates"),
        (lambda p, x: p.make_plan(x[:, :2], max_tokens=512, packing="best_fit", length_multiple=(2, 4)), "packed"),
        (
            lambda p, x: p.make_plan(x[:, 0], max_tokens=512, packing="best_fit", length_multiple=4, length_offset=1),
            "packed",
        ),
    ],
)
def test_what_is_not_for_several_lengths_is_refused_by_name(package, call, named):
    with pytest.raises(ValueError, match=f"(?s){named}"):
        call(package, np.random.default_rng(0).integers(1, 9, (20, 3)))
