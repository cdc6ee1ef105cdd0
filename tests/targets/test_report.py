"""The report of a target: its table, its file and back, copies, and what is not known."""

import copy
import dataclasses
import json
import pickle

import pytest

from jvarlen.estimates.communication import CommunicationEstimate, Traffic
from jvarlen.planning.buckets import Bucket
from jvarlen.targets.buffers import Buffer
from jvarlen.targets.dump import Launches
from jvarlen.targets.report import SOURCE, TargetReport, TargetRow

GB = 10**9
ROW = TargetRow(
    bucket=Bucket(4, 2048),
    lower_s=0.5,
    compile_s=9.25,
    flops=3.5e15,
    argument_bytes=20 * GB,
    output_bytes=GB // 4,
    temp_bytes=36 * GB,
    host_bytes=0,
    total_bytes=56 * GB + GB // 4,
    limit_bytes=63 * GB,
    communication=CommunicationEstimate([Traffic("all-gather", ("data",), 64, 7 * GB, 6 * GB, 60, 48)]),
    seconds=1.25,
    exposed_s=0.125,
    kernels={"__cudnn$fmhaSoftmax": 32, "__cudnn$fmhaSoftmaxBackward": 32},
    launches=Launches(kernels=1200, copies=250, collectives=50, graphs=62),
    buffers=(
        Buffer(5 * GB, "temporary", "f32[4,2048,32000]", "dot_general", "train.py:30 loss_fn"),
        Buffer(2 * GB, "argument", "f32[32000,4096]", "state.params['embed']", None),
    ),
)
TOO_LARGE = dataclasses.replace(ROW, bucket=Bucket(8, 1024), temp_bytes=50 * GB, total_bytes=70 * GB + GB // 4)
NO_ROOM = TargetRow(
    bucket=Bucket(64, 512), lower_s=1, compile_s=2, flops=None, total_bytes=17 * GB, limit_bytes=17 * GB
)
UNKNOWN_LIMIT = dataclasses.replace(ROW, limit_bytes=None, communication=None, kernels={})
ALL = TargetReport([ROW, TOO_LARGE, NO_ROOM, UNKNOWN_LIMIT], "8xh100", "data8.zero3", 9.5, 14.5)


def test_the_table_shows_the_figures_and_where_they_come_from():
    first, header, row, too_large, no_room, unknown_limit, *rest = str(ALL).splitlines()
    assert first == f"data8.zero3 on 8xh100. {SOURCE}"
    names = ["bucket", "fits", "total GB", "limit GB", "arguments GB", "output GB", "temporaries GB"]
    assert header.split("  ")[0] == "bucket"
    assert [name for name in names if name in header] == names
    assert "host GB" not in header
    assert "seconds (estimate)  exposed s (estimate)" in header
    figures = "4×2048 yes 56.2 63 20 0.25 36 1.25 0.125 3,500 1,500 62 9.25"
    assert " ".join(row.split()) == f"{figures} __cudnn$fmhaSoftmax 32, __cudnn$fmhaSoftmaxBackward 32"
    assert too_large.split()[:7] == ["8×1024", "no", "70.2", "63", "20", "0.25", "50"]
    assert no_room.split() == ["64×512", "no", "17", "17", *"––––––––", "2", "–"]
    assert [unknown_limit.split()[place] for place in (1, 2, 3, -1)] == ["–", "56.2", "–", "none"]
    assert rest.pop(0) == "compiling: 9.5 s wall, 14.5 s CPU"
    assert rest[:2] == [f"the communication of a step of {bucket} is unknown" for bucket in ("64×512", "4×2048")]
    assert rest[2] == "a step of 8×1024 communicates:"
    assert "all-gather" in rest[4]
    assert rest[5] == "the largest buffers of a step of 8×1024:"
    assert rest[7].split() == ["5", "temporary", "f32[4,2048,32000]", "dot_general", "train.py:30", "loss_fn"]
    assert rest[8].split() == ["2", "argument", "f32[32000,4096]", "state.params['embed']", "–"]


def test_columns_without_figures_are_left_out_of_the_table_but_not_of_the_file():
    small = dataclasses.replace(ROW, output_bytes=499_999, host_bytes=500_000, launches=None, limit_bytes=None)
    report = TargetReport([small, dataclasses.replace(small, output_bytes=0, exposed_s=0.0)], "8xh100", "data8")
    header = str(report).splitlines()[1]
    assert [name for name in ("fits", "limit GB", "output GB", "launches", "graphs") if name in header] == ["fits"]
    assert "host GB" in header
    assert [row["output_bytes"] for row in json.loads(report.to_json())["rows"]] == [499_999, 0]
    assert str(TargetReport([], "8xh100", "data8"))


@pytest.mark.parametrize(("rows", "fits"), [([ROW], True), ([ROW, UNKNOWN_LIMIT], None), (ALL, False), ([], True)])
def test_all_fit_where_each_is_known_to(rows, fits):
    assert TargetReport(rows, "8xh100", "data8").fits is fits


def test_a_program_for_which_there_is_no_room_does_not_fit_whatever_the_rounded_bytes():
    assert NO_ROOM.total_bytes == NO_ROOM.limit_bytes
    assert (NO_ROOM.has_program, NO_ROOM.fits) == (False, False)


def test_the_file_holds_plain_figures_and_null_for_those_that_are_not_known():
    document = json.loads(ALL.to_json())
    assert (document["target"], document["layout"], document["fits"]) == ("8xh100", "data8.zero3", False)
    row, _, no_room, unknown_limit = document["rows"]
    assert (row["bucket"], row["fits"], row["flops"]) == ([4, 2048], True, 3.5e15)
    assert row["kernels"] == ROW.kernels
    assert row["communication"] == [ROW.communication[0]._asdict() | {"axes": ["data"]}]
    told = {name for name, value in no_room.items() if value is not None}
    assert told == {"bucket", "program", "lower_s", "compile_s", "total_bytes", "limit_bytes", "fits"}
    assert unknown_limit["limit_bytes"] is unknown_limit["fits"] is None


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))])
def test_copies_of_a_report_are_equal(again):
    assert (again(ALL), vars(again(ALL))) == (ALL, vars(ALL))


def test_the_kernels_of_attention_that_are_priced_are_said():
    of_triton = dataclasses.replace(ROW, kernels={"_forward_kernel": 8, "_dq_kernel": 8, "_dkv_kernel": 8})
    said = "priced by Triton's kernels"
    assert said in str(TargetReport([of_triton], "8xh100", "data8"))
    assert said not in str(ALL)
