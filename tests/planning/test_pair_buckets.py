"""Pairs: few two-dimensional shapes, every pair once, batches of both sides."""

import copy
import dataclasses

import numpy as np
import pytest

from jvarlen import load, make_buckets, make_plan, predict
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.plan_page import write_html_report
from jvarlen.testing import assert_exactly_once


def translation_lengths(num_pairs=20_000):
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(3, 0.6, num_pairs).astype(int) + 1, 1, 200)
    target = np.clip((source * rng.lognormal(0, 0.25, num_pairs)).astype(int) + 1, 1, 200)
    return np.stack([source, target], axis=1)


def independent_lengths():
    return np.random.default_rng(1).integers(1, 200, (20_000, 2))


@pytest.mark.parametrize("lengths", [translation_lengths(), independent_lengths()], ids=["translation", "independent"])
def test_boundaries_on_both_sides_beat_the_same_number_on_one(lengths):
    plan = make_plan(lengths, make_buckets(lengths, 8192, max_shapes=16), order="length")
    longer = lengths.max(axis=1)
    on_one_side = make_plan(longer, make_buckets(longer, 4096, max_shapes=16), order="length")
    padding_on_one_side = 1 - lengths.sum() / (2 * on_one_side.padded_tokens_per_step.sum())
    assert plan.padding < padding_on_one_side
    assert plan.padding < 0.2
    assert (np.sort(plan.sample_ids) == np.arange(len(lengths))).all()


class Pairs:
    """Tokens that tell the pair and the side."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        source, target = self.lengths[i]
        return np.full(source, 2 * i), np.full(target, 2 * i + 1)


def by_area(rows, first, second):
    return 1e-6 * rows * (first + second) ** 3


def test_images_are_reported_in_pixels_everywhere(tmp_path):
    sizes = translation_lengths(300)
    plan = make_plan(sizes, max_tokens=20_000, max_shapes=4, length_multiple=8, size="product")
    pixels = sizes.prod(axis=1)
    padded = sum(int(plan.buckets.shapes[k].rows * np.prod(plan.buckets.shapes[k].lengths)) for k in plan.step_bucket)
    assert plan.num_tokens.tolist() == [pixels[plan.rows(t)[plan.rows(t) >= 0]].sum() for t in range(plan.num_steps)]
    assert plan.padded_tokens_per_step.sum() == padded
    assert plan.padding == 1 - pixels.sum() / padded
    figures = bucket_figures(plan)
    assert (figures.num_tokens.sum(), figures.padded_tokens.sum()) == (pixels.sum(), padded)
    report = plan.report()
    assert f"{plan.padding:.2%}" in report
    assert f"{pixels.sum():,} tokens (the product of a sample's lengths), {padded:,} with padding" in report
    assert all("×".join(map(str, bucket.lengths)) in report for bucket in plan.buckets.shapes)
    write_html_report(tmp_path / "plan.html", plan, sizes)
    page = (tmp_path / "plan.html").read_text()
    assert f"{plan.padding:.2%}" in page
    assert "product of a sample" in page
    assert_exactly_once(plan, len(sizes))
    assert copy.deepcopy(plan).size == dataclasses.replace(plan).size == "product"


@pytest.mark.parametrize("size", ["sum", "larger", "product"])
def test_loading_compares_what_was_planned_in_its_unit(size):
    lengths = np.array([[3, 4], [5, 2], [2, 6]])
    plan = make_plan(lengths, max_tokens=200, max_shapes=1, size=size)
    (batch,) = load(plan, Pairs(lengths))
    assert np.asarray(batch.num_sequences) == 3
    with pytest.raises(ValueError, match=rf"hold .* tokens, but {plan.num_tokens.sum()} were planned"):
        list(load(plan, Pairs([(3, 5), (5, 2), (2, 6)])))


def test_a_cost_of_pairs_chooses_among_buckets_and_their_number():
    lengths = translation_lengths(300)
    budget = {"max_tokens": 1024, "max_shapes": 3, "length_multiple": 8}

    def total(plan):
        return sum(by_area(*plan.buckets.shapes[k]) for k in plan.step_bucket)

    chosen = make_plan(lengths, **budget, cost=by_area)
    assert total(chosen) < total(make_plan(lengths, **budget))
    assert len(make_buckets(lengths, **budget, cost=by_area, compile_seconds=1e9).shapes) == 1


def test_a_wrong_cost_of_a_bucket_of_pairs_is_named():
    plan = make_plan([(1, 2), (3, 4)], [(1, 1, 2), (1, 3, 4)], order="length")
    with pytest.raises(ValueError, match=r"cost\(1, 3, 4\) is -1.0; it must be finite and at least 0"):
        plan.report(cost=lambda rows, source, target: np.where(source == 3, -1.0, rows * target))


def test_pages_and_predictions_of_three_lengths_are_refused_by_name(tmp_path):
    lengths = np.full((4, 3), 5)
    plan = make_plan(lengths, [(2, 5, 5, 5)])
    with pytest.raises(ValueError, match="page shows plans of one or two lengths"):
        write_html_report(tmp_path / "plan.html", plan, lengths)
    with pytest.raises(ValueError, match="predict takes samples of one or two lengths"):
        predict(lambda params, batch: batch, 0, [0] * 4, buckets=[(2, 5, 5, 5)], lengths=lengths, progress=False)
