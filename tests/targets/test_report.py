"""The report of a target: its table, its file and back, copies, and what is not known."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest

from jvarlen.parallel.communication import CommunicationEstimate, Traffic
from jvarlen.planning.buckets import Bucket, PairBucket
from jvarlen.targets.buffers import Buffer
from jvarlen.targets.launches import Launches
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
        Buffer(5 * GB, "temporary", "f32[4,2048,32000]", "dot_general", "train.py:30 loss_fn", 2),
        Buffer(2 * GB, "argument", "f32[32000,4096]", "state.params['embed']", None, 1),
    ),
)
TOO_LARGE = dataclasses.replace(ROW, bucket=Bucket(8, 1024), temp_bytes=50 * GB, total_bytes=70 * GB + GB // 4)
NO_ROOM = TargetRow(
    bucket=Bucket(64, 512), lower_s=1, compile_s=2, flops=None, total_bytes=17 * GB, limit_bytes=17 * GB
)
UNKNOWN_LIMIT = dataclasses.replace(ROW, limit_bytes=None, communication=None, kernels={})
ALL = TargetReport([ROW, TOO_LARGE, NO_ROOM, UNKNOWN_LIMIT], "8xh100", "data8.zero3", 9.5, 14.5)


def test_the_table_tells_the_figures_and_where_they_come_from():
    first, header, row, too_large, no_room, unknown_limit, *rest = str(ALL).splitlines()
    assert first == f"data8.zero3 on 8xh100. {SOURCE}"
    names = ["bucket", "fits", "total GB", "limit GB", "arguments GB", "output GB", "temporaries GB"]
    assert header.split("  ")[0] == "bucket"
    assert [name for name in names if name in header] == names
    assert "host GB" not in header
    assert "step s (estimate)  exposed s (estimate)" in header
    figures = [
        "4×2048",
        "yes",
        "56.2",
        "63",
        "20",
        "0.25",
        "36",
        "1.25",
        "0.125",
        "3,500",
        "1,500",
        "62",
        "9.25",
    ]
    assert row.split() == [*figures, "__cudnn$fmhaSoftmax", "32,", "__cudnn$fmhaSoftmaxBackward", "32"]
    assert too_large.split()[:7] == ["8×1024", "no", "70.2", "63", "20", "0.25", "50"]
    assert no_room.split() == ["64×512", "no", "17", "17", *"––––––––", "2", "–"]
    assert [unknown_limit.split()[place] for place in (1, 2, 3, -1)] == ["–", "56.2", "–", "none"]
    assert rest.pop(0) == "compiling: 9.5 s wall, 14.5 s CPU"
    assert rest[:2] == [f"what a step of {bucket} communicates is not known" for bucket in ("64×512", "4×2048")]
    assert rest[2] == "a step of 8×1024 communicates:"
    assert "all-gather" in rest[4]
    assert rest[5] == "the largest buffers of a step of 8×1024:"
    assert rest[7].split() == ["5", "temporary", "f32[4,2048,32000]", "dot_general", "train.py:30", "loss_fn"]
    assert rest[8].split() == ["2", "argument", "f32[32000,4096]", "state.params['embed']", "–"]


def test_columns_that_tell_nothing_are_left_out_of_the_table_but_not_of_the_file():
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


def test_a_report_comes_back_from_disk(tmp_path):
    pairs = TargetReport([dataclasses.replace(ROW, bucket=PairBucket(2, 8, 16))], "here", "data8")
    for report in (ALL, pairs, TargetReport([], "here", "data8")):
        report.save(tmp_path / "report.json")
        again = TargetReport.load(tmp_path / "report.json")
        assert (again, again.target, again.layout) == (report, report.target, report.layout)
        assert str(again) == str(report)
        assert [type(row.bucket) for row in again] == [type(row.bucket) for row in report]


def test_the_file_holds_plain_figures_and_null_for_those_that_are_not_known():
    document = json.loads(ALL.to_json())
    assert (document["target"], document["layout"], document["fits"]) == ("8xh100", "data8.zero3", False)
    row, _, no_room, unknown_limit = document["rows"]
    assert (row["bucket"], row["fits"], row["flops"]) == ([4, 2048], True, 3.5e15)
    assert row["kernels"] == ROW.kernels
    assert row["communication"] == [ROW.communication[0]._asdict() | {"axes": ["data"]}]
    told = {name for name, value in no_room.items() if value is not None}
    assert told == {"bucket", "lower_s", "compile_s", "total_bytes", "limit_bytes", "fits"}
    assert unknown_limit["limit_bytes"] is unknown_limit["fits"] is None


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))])
def test_copies(again):
    assert (again(ALL), vars(again(ALL))) == (ALL, vars(ALL))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda document: document.pop("layout"), "it lacks 'layout'$"),
        (lambda document: document.pop("format"), "it lacks 'format'$"),
        (lambda document: document.update(target=8), "target is 8"),
        (lambda document: document.update(format=0), "its format is 0, and this version of jvarlen reads 1$"),
        (lambda document: document["rows"][0].pop("total_bytes"), "total_bytes"),
        (lambda document: document["rows"][0].update(colour="red"), "row has unknown colour$"),
        (lambda document: document["rows"][0].update(temp_bytes=-1), "temp_bytes is -1"),
        (lambda document: document["rows"][0]["kernels"].update(kernel="often"), "kernels is 'often'"),
        (lambda document: document["rows"][0]["communication"][0].update(times=0.5), "times is 0.5"),
        (lambda document: document["rows"][0]["communication"][0].pop("kind"), "kind"),
        (lambda document: document["rows"][0].update(communication=3), "int"),
    ],
)
def test_damaged_reports_are_refused_by_name(damage, said, tmp_path):
    path = tmp_path / "report.json"
    document = json.loads(ALL.to_json())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"report\.json holds no target report: .*{said}"):
        TargetReport.load(path)


def test_a_file_of_lengths_is_no_report(tmp_path):
    (tmp_path / "lengths.json").write_text("[3, 4]")
    with pytest.raises(ValueError, match=r"lengths\.json holds no target report: it holds no JSON object$"):
        TargetReport.load(tmp_path / "lengths.json")


def test_a_saved_report_is_read_without_jax(tmp_path):
    ALL.save(tmp_path / "report.json")
    program = """
import sys
from jvarlen.targets import TargetReport
print(TargetReport.load(sys.argv[1]))
assert not {"jax", "matplotlib"} & set(sys.modules)
"""
    run = [sys.executable, "-c", program, str(tmp_path / "report.json")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == f"{ALL}\n"
