"""The page of a plan: well-formed, whole, self-contained, of bounded size, and true."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen
from jvarlen import make_buckets, make_plan
from jvarlen.planning import BatchSizeStages, choose_row_lengths
from jvarlen.planning.compare import compare_strategies
from jvarlen.planning.cost_model import CostModel
from jvarlen.reports.plan_page import integer_bins, write_html_report
from jvarlen.training.rates import StepsOfRun
from tests.reports.html_pages import Page

# Some eighty distinct lengths: choosing row lengths takes time for each.
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 3000).astype(int).clip(1, 900) // 5 * 5 + 3
COST = CostModel(constant=1e-3, linear=1e-6, quadratic=1e-8)
FIGURES = {"lengths", "padding", "tokens", "shapes"}


def page_of(path, *args, **options):
    write_html_report(path, *args, **options)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    return Page(text)


def planned(order="length"):
    return make_plan(LENGTHS, make_buckets(LENGTHS, 4096, max_shapes=6), order=order)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.html"


class Drawn(NamedTuple):
    """A page with all that it can show, for the tests that only read it, and what it was drawn from."""

    path: Path
    page: Page
    plan: jvarlen.Plan
    comparison: list


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    path = tmp_path_factory.mktemp("drawn") / "plan.html"
    plan = planned(order="shuffle")
    comparison = compare_strategies(plan, LENGTHS, 4096, cost=COST)
    page = page_of(path, plan, LENGTHS, cost=COST, comparison=comparison)
    return Drawn(path, page, plan, comparison)


def figure_ids(page):
    return {attrs["id"] for attrs in page.named("figure")}


def test_every_figure_is_there_with_a_title_and_a_caption(drawn, path):
    page, plan = drawn.page, drawn.plan
    assert figure_ids(page) == FIGURES | {"seconds"}
    for image, figure in zip(page.named("img"), page.named("figure"), strict=True):
        assert image["alt"] in page.text
        assert image["aria-describedby"] == f"{figure['id']}-caption"
    assert plan.digest in page.text
    assert f"jvarlen {jvarlen.__version__}" in page.text
    without_options = page_of(path, plan, LENGTHS)
    assert figure_ids(without_options) == FIGURES
    assert {attrs["id"] for attrs in without_options.named("section")} == {"buckets"}


def test_the_tables_hold_the_figures_of_the_plan(drawn):
    page, plan, comparison = drawn.page, drawn.plan, drawn.comparison
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.named("th"))
    rows = {cells[0]: cells[1:] for cells in page.cells}
    for k, bucket in enumerate(plan.buckets.shapes):
        of_bucket = plan.step_bucket == k
        tokens = plan.num_tokens[of_bucket].sum()
        positions = plan.padded_tokens_per_step[of_bucket].sum()
        counts = [plan.num_sequences[of_bucket].sum(), of_bucket.sum(), tokens, positions]
        expected = [f"{count:,}" for count in counts]
        expected += [f"{1 - tokens / positions:.2%}", f"{of_bucket.sum() * COST(*bucket):,.1f}"]
        assert rows[f"{bucket.rows:,} × {bucket.length:,}"] == expected
    assert rows["Total"][:2] == ["3,000", f"{plan.num_steps:,}"]
    for each in comparison:
        assert rows[each.name][0] == f"{each.num_shapes:,}"
        assert rows[each.name][-2:] == [f"{each.seconds:,.1f}", f"{each.relative:.2f}"]
    assert [attrs for attrs in page.named("tr") if attrs.get("class") == "best"]


def test_a_plan_of_many_groups_counts_them_beside_its_steps(path):
    plan = make_plan(LENGTHS, max_tokens=4096, max_shapes=6, sequences_per_step=250, num_microbatches=2)
    page = page_of(path, plan, LENGTHS)
    rows = {cells[0]: cells[1:] for cells in page.cells}
    assert "Groups" in page.cells[0]
    groups = [len(plan.groups(step)) for step in range(plan.num_steps)]
    assert [rows[f"{bucket.rows:,} × {bucket.length:,}"][1] for bucket in plan.buckets.shapes] == [
        f"{number:,}" for number in plan.groups_of_buckets().values()
    ]
    assert rows["Total"][:2] == ["3,000", f"{sum(groups):,}"]
    assert f"mean; at most {max(groups)}, of 2 microbatches" in page.text
    said = f"microbatches a group: 2, groups a step: {sum(groups) / 12:.1f}, at most {max(groups)}, steps: 12"
    assert plan.report().splitlines()[-2].endswith(said)


def test_the_whole_run_is_drawn_where_its_steps_are_given(path):
    plan = make_plan(LENGTHS, max_tokens=4096, max_shapes=6, sequences_per_step=BatchSizeStages([(0, 50), (9_000, 80)]))
    rates = jvarlen.lr_sequence(plan, 1e-3, 50, rule="sqrt")
    page = page_of(path, plan, LENGTHS, steps=StepsOfRun(plan.num_sequences, plan.num_tokens, rates))
    assert figure_ids(page) == {*FIGURES, "run"}
    assert f"{plan.num_steps:,} steps and {int(plan.num_tokens.sum()):,} tokens in all." in page.text


def test_a_packed_plan_tells_how_many_samples_a_row_has(path):
    row_lengths = choose_row_lengths(LENGTHS, 4096, max_shapes=4, max_length=600, overlong="truncate")
    options = {"packing": "best_fit", "row_lengths": row_lengths, "overlong": "truncate"}
    plan = make_plan(LENGTHS, max_tokens=4096, num_microbatches=2, **options)
    page = page_of(path, plan, LENGTHS)
    assert figure_ids(page) == FIGURES
    assert f"{plan.num_samples / plan.num_rows:.2f}" in page.text
    assert f"{plan.num_truncated:,} cut" in page.text
    assert plan.num_truncated > 0


def test_a_plan_of_pairs_shows_both_sides(path):
    lengths = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)
    plan = make_plan(lengths, make_buckets(lengths, 4096, max_shapes=4, max_candidates=8), order="shuffle")
    page = page_of(path, plan, lengths)
    assert figure_ids(page) == FIGURES
    assert "tokens of the source" in page.pictures["lengths"].text
    assert "tokens of the target" in page.pictures["lengths"].text
    assert "Plan of 3,000 pairs" in page.text


def test_the_page_loads_nothing(drawn):
    page = drawn.page
    assert page.pictures.keys() == FIGURES | {"seconds"}
    page.assert_loads_nothing()
    for each in (page, *page.pictures.values()):
        each.assert_colours_are_of_both_palettes()


def test_text_is_escaped(drawn, path):
    comparison = drawn.comparison
    named = [comparison[0]._replace(name='<script>alert("1")</script> </td> & <b>'), *comparison[1:]]
    page = page_of(path, planned(), LENGTHS, comparison=named)
    assert not page.named("script")
    assert not page.named("b")
    assert 'alert("1")' in page.text
    assert "</td> & <b>" in page.text


def test_the_size_does_not_grow_with_the_plan(path):
    lengths = np.random.default_rng(0).integers(1, 65, 400_000)
    plan = make_plan(lengths, make_buckets(lengths, 128, max_shapes=48), order="shuffle")
    assert plan.num_steps > 80_000
    page_of(path, plan, lengths, cost=COST)
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(("lengths", "max_tokens"), [([5], 5), ([1, 1], 1), ([3, 10**9], 10**9), (range(1, 60), 59)])
def test_any_plan_has_a_page(path, lengths, max_tokens):
    lengths = np.array(lengths)
    plan = make_plan(lengths, make_buckets(lengths, max_tokens), order="length")
    page = page_of(path, plan, lengths)
    assert figure_ids(page) == FIGURES


def test_what_does_not_belong_to_the_plan_is_refused(path):
    plan = planned()
    path.write_text("before")
    for lengths, said in (
        (LENGTHS[:100], "there are only 100 lengths"),
        (LENGTHS + 1, "not the lengths that the plan was made for"),
        (np.stack([LENGTHS, LENGTHS], axis=1), "1-D"),
    ):
        with pytest.raises(ValueError, match=said):
            write_html_report(path, plan, lengths)
    assert path.read_text() == "before"


@given(st.integers(1, 10**6), st.integers(0, 10**9))
def test_the_bins_of_the_histogram_hold_every_length(shortest, more):
    bins = integer_bins(shortest, shortest + more)
    widths = np.diff(bins)
    assert bins[0] == shortest
    assert bins[-2] <= shortest + more < bins[-1]
    assert len(widths) <= 48 + 1
    assert (np.diff(widths) >= 0).all()
    assert widths.min() >= 1
