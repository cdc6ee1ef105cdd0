"""The page of a target: true for every kind of row, and readable in a browser at two widths."""

import dataclasses

import pytest

from jvarlen.estimates.communication import CommunicationEstimate
from jvarlen.planning.buckets import Bucket
from jvarlen.reports.target_page import write_target_page
from jvarlen.targets.report import SOURCE, TargetReport
from tests.reports.html_pages import Page
from tests.targets.test_report import GB, NO_ROOM, ROW, TOO_LARGE, UNKNOWN_LIMIT

ALONE = dataclasses.replace(ROW, communication=CommunicationEstimate(), kernels={})
# The fullest first, as those with the most tokens and padding come first.
MANY = [
    dataclasses.replace(ROW, bucket=Bucket(k, 512 * k), temp_bytes=3 * k * GB, total_bytes=20 * GB + 3 * k * GB)
    for k in range(16, 0, -1)
]


def page_of(path, rows, target="8xh100", layout="data8.zero3"):
    write_target_page(path, TargetReport(rows, target, layout))
    page = Page(path.read_text(encoding="utf-8"))
    page.assert_loads_nothing()
    page.assert_colours_are_of_both_palettes()
    return page


def cells_of(page, name):
    """The rows of a table, without its header."""
    text = page.source
    start = text.index(f'<section class="table" id="{name}"')
    return Page(text[start : text.index("</section>", start) + len("</section>")]).cells[1:]


def test_the_tables_hold_the_figures_of_every_bucket(tmp_path):
    page = page_of(tmp_path / "page.html", [TOO_LARGE, ROW, NO_ROOM])
    assert "3 buckets on 8xh100" in page.text
    assert SOURCE in page.text
    assert (
        page.text.index("1 of 3")
        < page.text.index("70.2 GB")
        < page.text.index("8×1024: 111.5% of 63 GB, does not fit")
    )
    assert [row[:2] for row in cells_of(page, "buckets")] == [["8×1024", "no"], ["4×2048", "yes"], ["64×512", "no"]]
    assert cells_of(page, "buckets")[2].count("–") == 8
    assert "host GB" not in page.text
    assert "no room" in page.text
    assert "Launches are those outside of CUDA graphs." in page.text
    kernels = "__cudnn$fmhaSoftmax 32, __cudnn$fmhaSoftmaxBackward 32"
    assert cells_of(page, "kernels") == [["8×1024, 4×2048", kernels], ["64×512", "–"]]
    assert cells_of(page, "buffers") == [
        ["8×1024", "5", "temporary", "f32[4,2048,32000]", "dot_general", "train.py:30 loss_fn"],
        ["8×1024", "2", "argument", "f32[32000,4096]", "state.params['embed']", "–"],
    ]
    assert cells_of(page, "buffers-of-others")[2] == ["64×512", "not known"]
    [traffic] = ROW.communication.cells()[1:]
    assert cells_of(page, "collectives") == [["8×1024", *traffic]]
    assert cells_of(page, "collectives-of-others") == [["4×2048", *traffic], ["64×512", "not known"]]


def test_the_picture_holds_the_bytes_by_kind_and_the_limit(tmp_path):
    text = page_of(tmp_path / "page.html", [TOO_LARGE, ROW, NO_ROOM]).pictures["memory"].text
    for part in ("8×1024, does not fit: 70.25", "4×2048: 56.25", "64×512, does not fit: 17", "GB"):
        assert part in text
    for part in ("arguments", "temporaries", "output", "no program"):
        assert part in text
    assert "no program" not in page_of(tmp_path / "page.html", [ROW]).pictures["memory"].text


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW], ["1 bucket on", "1 of 1", "The line is the limit."]),
        ([NO_ROOM], ["1 bucket on", "0 of 1", "64×512", "not known"]),
        ([UNKNOWN_LIMIT], ["The limit is not known.", "not known"]),
        (MANY, ["16 buckets on", "14 of 16"]),
    ],
    ids=["one", "no room", "no limit", "many"],
)
def test_pages_of_other_reports(tmp_path, rows, said):
    page = page_of(tmp_path / "page.html", rows)
    for part in said:
        assert part in page.text
    assert len(cells_of(page, "buckets")) == len(rows)
    assert ("collectives-of-others" in page.ids) == (len(rows) > 1)


@pytest.mark.parametrize(
    ("surplus", "said"),
    [(-GB // 10, "99.8% of 63 GB A"), (GB // 10, "100.2% of 63 GB, does"), (1, "100.0% of 63 GB, does")],
)
def test_what_does_not_fit_is_said_so_whatever_the_rounded_share(tmp_path, surplus, said):
    page = page_of(tmp_path / "page.html", [dataclasses.replace(ROW, total_bytes=63 * GB + surplus)])
    assert said in " ".join(page.text.split())


def test_the_fullest_bucket_is_told_of_and_of_programs_first(tmp_path):
    asks_for_more = dataclasses.replace(NO_ROOM, total_bytes=99 * GB)
    page = page_of(tmp_path / "page.html", [asks_for_more, ROW, TOO_LARGE])
    assert "99 GB64×512: 582.4% of 17 GB, does not fit" in page.text
    assert {row[0] for row in cells_of(page, "buffers")} == {"8×1024"}
    assert [row[0] for row in cells_of(page, "collectives-of-others")] == ["64×512", "4×2048"]


def test_one_device_communicates_nothing(tmp_path):
    page = page_of(tmp_path / "page.html", [ALONE])
    assert cells_of(page, "collectives") == [["4×2048", "none"]]
    assert cells_of(page, "kernels") == [["all", "none"]]
