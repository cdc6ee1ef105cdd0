"""The compile report: every figure in the table and back from disk, unused buckets, and a plan's figures."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.compiling.report import CompileReport, CompileRow, row_of
from jvarlen.planning.buckets import Bucket, MultiLengthBucket
from jvarlen.planning.make_plan import make_plan

LONG = CompileRow(
    bucket=Bucket(2, 24),
    lower_s=0.5,
    compile_s=3.5,
    cache_hit=False,
    flops=1.25e12,
    argument_bytes=3_000_000,
    output_bytes=2_000_000,
    alias_bytes=1_500_000,
    temp_bytes=40_000_000,
    peak_bytes=43_000_000,
    times_used=8,
    step_s=0.0125,
)
SHORT = dataclasses.replace(
    LONG, bucket=Bucket(4, 8), compile_s=0.5, cache_hit=True, flops=math.nan, times_used=0, step_s=math.nan
)


def cells(report):
    """The table's rows of buckets and the one of totals, each a dict by header; cells end where their header does."""
    header, *lines = report.table().splitlines()
    columns = [(part.group(), part.end()) for part in re.finditer(r"\S+( \S+)*", header)]
    starts = [0, *(end for _, end in columns)]
    return [
        {name: line[start:end].strip() for start, (name, end) in zip(starts, columns, strict=False)}
        for line in lines[: len(report) + 1]
    ]


def test_the_table_shows_every_figure_of_a_bucket_and_the_totals():
    long, short, total = cells(CompileReport([LONG, SHORT]))
    assert long == {
        "bucket": "2×24", "lower s": "0.5", "compile s": "3.5", "cache": "miss", "GFLOP": "1,250", "args MB": "3",
        "out MB": "2", "temp MB": "40", "aliased MB": "1.5", "peak MB": "43", "step ms": "12.5", "used": "8",
    }  # fmt: skip
    assert [short[name] for name in ("cache", "GFLOP", "step ms", "used")] == ["hit", *"––0"]
    names = ("bucket", "lower s", "compile s", "cache", "used", "peak MB")
    assert [total[name] for name in names] == ["total", "", "", "1 hit", "8", ""]


def test_buckets_never_used_are_named_all_of_them():
    many = [dataclasses.replace(SHORT, bucket=Bucket(2, length)) for length in range(30, 100)]
    report = CompileReport([LONG, *many])
    assert report.unused == tuple(row.bucket for row in many)
    assert str(report).splitlines()[-1] == "never used: " + ", ".join(f"2×{length}" for length in range(30, 100))
    assert "never used" not in str(CompileReport([LONG]))


def test_what_is_unknown_is_null_in_the_file_and_what_follows_is_there(tmp_path):
    CompileReport([LONG, SHORT]).save(tmp_path / "compile_report.json")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    long, short = json.loads((tmp_path / "compile_report.json").read_text(), parse_constant=refuse)["rows"]
    assert long["bucket"] == [2, 24]
    assert long["total_bytes"] == 43_500_000
    assert {name for name, value in short.items() if value is None} == {
        *("flops", "step_s", "planned_steps", "padding")
    }


def report_of(buckets):
    return CompileReport([dataclasses.replace(LONG, bucket=bucket) for bucket in reversed(buckets)])


@pytest.mark.parametrize("sides", [1, 2])
def test_steps_and_padding_are_those_of_the_plans_rows(sides):
    lengths = np.random.default_rng(0).integers(1, 25, (101, sides)).squeeze()
    shapes = {
        1: [Bucket(4, 8), Bucket(3, 16), Bucket(2, 24), Bucket(1, 30)],
        2: [MultiLengthBucket((3, 12, 12)), MultiLengthBucket((2, 24, 24)), MultiLengthBucket((1, 24, 30))],
    }
    plan = make_plan(lengths, shapes[sides], num_microbatches=2, order="shuffle")
    num_steps, num_tokens, padded_tokens = (dict.fromkeys(plan.buckets.shapes, 0) for _ in range(3))
    for step in range(plan.num_steps):
        bucket = plan.buckets.shapes[plan.step_bucket[step]]
        rows = plan.rows(step)
        num_steps[bucket] += 1
        num_tokens[bucket] += int(lengths[rows[rows >= 0]].sum())
        padded_tokens[bucket] += rows.size * sum(bucket.lengths)
    before = report_of(plan.buckets.shapes)
    report = before.with_plan(plan)
    assert [row.bucket for row in report] == [row.bucket for row in before]
    for row in report:
        assert row.planned_steps == num_steps[row.bucket]
        if row.planned_steps:
            assert row.padding == pytest.approx(1 - num_tokens[row.bucket] / padded_tokens[row.bucket], rel=1e-12)
    assert report[0].planned_steps == 0
    assert report[0].padding is None
    *_, total = cells(report)
    assert total["in plan"] == f"{plan.num_steps}"


def test_a_plan_of_other_buckets_is_refused_by_name():
    plan = make_plan([3, 8, 20], [(4, 8), (2, 16), (2, 24)], order="length")
    planned = report_of([Bucket(4, 8), Bucket(2, 24)]).with_plan(plan)  # no step is of 2×16
    assert [row.planned_steps for row in planned] == [1, 1]
    with pytest.raises(ValueError, match=r"not of this plan, which does not have 3×30, 5×25$"):
        report_of([Bucket(2, 24), Bucket(5, 25), Bucket(3, 30)]).with_plan(plan)


def test_a_row_has_the_figures_of_the_compiler():
    def step(state, x):
        return state + 1, (x @ x).sum()

    compiled = jax.jit(step, donate_argnums=0).lower(jnp.zeros(50), jnp.ones((30, 30))).compile()
    row = row_of("step", Bucket(30, 30), compiled=compiled, lower_s=0.25, compile_s=0.5, cache_hit=True)
    assert (row.bucket, row.lower_s, row.compile_s, row.cache_hit) == (Bucket(30, 30), 0.25, 0.5, True)
    assert 2 * 30**3 <= row.flops < 3 * 30**3
    assert row.argument_bytes == 4 * (50 + 900)
    assert row.alias_bytes == 4 * 50
    assert row.output_bytes >= 4 * 51
    assert row.temp_bytes >= 4 * 30
    assert 0 < row.peak_bytes <= row.total_bytes
    assert (row.times_used, row.is_live, row.planned_steps, row.padding) == (0, True, None, None)
    assert CompileReport([row]).unused == (Bucket(30, 30),)
