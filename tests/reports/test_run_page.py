"""Reports of runs: true to the records, complete for runs in any state; nothing in a file is trusted."""

import dataclasses
import json
import re

import numpy as np
import pytest
from matplotlib.image import imread

from jvarlen.cli import main
from jvarlen.compiling.report import CompileReport, CompileRow
from jvarlen.planning.buckets import Bucket
from jvarlen.reports import figures as drawing
from jvarlen.reports.run_page import plot_curves, read_runs
from jvarlen.reports.run_records import read_run
from tests.reports.browser import measured, num_pixels_of, render
from tests.reports.html_pages import Page
from tests.support.synthetic_runs import BUCKETS, MB, records_of, write_run

FIGURES = {
    "loss-tokens", "loss-time", "evaluations", "learning-rate", "shapes", "throughput",
}  # fmt: skip


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


def reported(*run_dirs, path):
    read_runs(run_dirs).write_html(path)
    return page_of(path)


def rows_of(page):
    return {cells[0]: cells[1:] for cells in page.cells if len(cells) > 1}


def sum_of(records, name, **where):
    """By a loop over the records of steps."""
    return sum(r[name] for r in records if "loss" in r and all(r[key] == value for key, value in where.items()))


@pytest.fixture
def page_path(tmp_path):
    return tmp_path / "page.html"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Two runs and their page, drawn once for the tests that only read it."""
    folder = tmp_path_factory.mktemp("drawn")
    runs = [
        write_run(folder / "first", 60),
        write_run(folder / "second", 90, seed=1, settings={"plan": {"max_tokens": 9, "order": "length"}}),
    ]
    reported(*runs, path=folder / "page.html")
    return folder / "page.html", runs


def test_the_table_holds_the_figures_of_the_records(tmp_path):
    records = records_of(70)
    report = read_runs([write_run(tmp_path / "run", 70, records=records)])
    figures = {name: values for name, (values,) in report.figures}
    tokens, positions = sum_of(records, "num_tokens"), sum_of(records, "padded_tokens")
    steps = [record for record in records if "loss" in record]
    assert figures["State"] == "ended"
    assert figures["Steps"] == "70"
    assert figures["Tokens"] == f"{tokens:,}"
    assert figures["Padding"] == f"{1 - tokens / positions:.2%}"
    last = [record["loss"] for record in steps[-50:]]
    assert figures["Last loss, nats a token"] == f"{last[-1]:.3f}"
    assert figures["Mean loss of up to 50 last steps, nats a token"] == f"{sum(last) / 50:.3f}"
    assert figures["Tokens per second"] == f"{tokens / steps[-1]['time_s']:,.0f}"
    assert figures["Wait for data"] == f"{sum_of(records, 'data_wait_s') / sum_of(records, 'step_s'):.2%}"
    assert figures["Seconds of compiling, wall and CPU"] == "12.5, 20.2"
    assert figures["Evaluation held_out, nats a token"] == "8.000, then 4.000"
    lines = report.table().splitlines()
    assert any(line.split() == ["Tokens", f"{tokens:,}"] for line in lines)
    assert any(line.startswith("32 × 16") for line in lines)


def test_buckets_are_counted_from_the_records_and_described_by_the_report(tmp_path):
    records = [record for record in records_of(50) if record.get("bucket_rows") != 8]
    report = read_runs([write_run(tmp_path / "run", 50, records=records)])
    tables = [re.split(" {2,}", line) for line in report.table().split("\n\n")[1].splitlines()[1:]]
    assert [cells[0] for cells in tables] == [f"{rows} × {length}" for rows, length in BUCKETS]
    for k, (rows, _) in enumerate(BUCKETS):
        _, num_steps, _, tokens, padding, seconds, median_ms, _, compile_s, _ = tables[k]
        of_bucket = [record["step_s"] for record in records if record.get("bucket_rows") == rows]
        assert (int(num_steps), float(compile_s)) == (len(of_bucket), 2 * k + 1)
        if of_bucket:
            own, padded = (sum_of(records, name, bucket_rows=rows) for name in ("num_tokens", "padded_tokens"))
            assert (tokens, padding) == (f"{own:,}", f"{1 - own / padded:.2%}")
            assert float(seconds) == pytest.approx(sum(of_bucket), abs=0.01)
            assert float(median_ms) == pytest.approx(1e3 * np.median(of_bucket), abs=0.01)
        else:
            assert (tokens, padding, seconds, median_ms) == ("0", "not known", "0.00", "not known")


def records_with(num_steps=60, **changes):
    """Records of steps of one bucket and 0.1 s, with changes at some of them: `changes` is {field: {step: value}}."""
    records = [record for record in records_of(num_steps) if "loss" in record]
    for i, record in enumerate(records):
        record |= {"bucket_rows": 32, "bucket_length": 16, "num_tokens": 500, "step_s": 0.1, "data_wait_s": 0.0}
        record |= {name: values[i] for name, values in changes.items() if i in values}
    return records


def test_a_wait_for_the_compiler_is_no_time_of_steps(tmp_path):
    report = read_runs([write_run(tmp_path / "run", records=records_with(stall_s={20: 3.0, 30: 0.5}))])
    figures = {name: values for name, (values,) in report.figures}
    assert figures["Seconds of stalls"] == "3.5"
    assert figures["Seconds of steps"] == "6.0"
    assert figures["Tokens per second"] == "5,000"


def test_several_runs_lie_in_the_same_pictures_and_are_named(drawn):
    path, runs = drawn
    page = page_of(path)
    assert {attrs["id"] for attrs in page.named("figure")} == FIGURES
    assert page.text.count("first") > len(FIGURES)
    assert page.pictures.keys() == FIGURES
    for picture in page.pictures.values():
        drawn = re.sub(r"<style.*?</style>", "", picture.source)
        assert "var(--first)" in drawn
        assert "var(--second)" in drawn
        assert "var(--third)" not in drawn
    rows = rows_of(page)
    assert rows["Steps"] == ["60", "90"]
    assert rows["plan.max_tokens"] == ["512", "9"]
    differing = [line.split()[0] for line in read_runs(runs).table().split("\n\n")[1].splitlines()]
    assert differing == ["Setting", "seed", "plan.max_tokens", "plan.order"]


def test_the_page_loads_nothing_and_has_colours_for_light_and_dark_surroundings(drawn):
    page = page_of(drawn[0])
    page.assert_loads_nothing()
    assert "default-src 'none'" in page.source
    for each in (page, *page.pictures.values()):
        each.assert_colours_are_of_both_palettes()


def test_a_run_that_goes_on_is_shown_without_its_last_half_line(tmp_path):
    run = write_run(tmp_path / "run", 12, has_ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "loss": 1.')
    figures = dict(read_runs([run]).figures)
    assert figures["State"] == ["going on, or broken off"]
    assert figures["Steps"] == ["12"]
    assert figures["Seconds of compiling, wall and CPU"] == ["not known"]


def test_a_summary_of_fewer_steps_than_were_logged_is_from_before_the_run_was_resumed(tmp_path):
    run = write_run(tmp_path / "run", 12)
    summary = json.loads((run / "summary.json").read_text())
    for num_steps, is_interrupted, state in ((12, False, "ended"), (12, True, "interrupted"), (11, True, "going on")):
        (run / "summary.json").write_text(json.dumps(summary | {"num_steps": num_steps, "interrupted": is_interrupted}))
        assert dict(read_runs([run]).figures)["State"][0].startswith(state)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, page_path, num_steps):
    records = [record for record in records_of(num_steps) if "loss" in record] if num_steps else []
    page = reported(write_run(tmp_path / "run", records=records, has_ended=False), path=page_path)
    assert rows_of(page)["Steps"] == [f"{num_steps}"]
    assert rows_of(page)["seed"] == ["0"]
    assert bool(page.pictures) == bool(num_steps)


def test_text_of_directories_settings_and_evaluations_is_escaped(tmp_path, page_path, capsys):
    evil = '<script>alert("1")</script>\x1b[31m\u202e&'
    records = [record | ({"evaluation": evil} if "evaluation" in record else {}) for record in records_of(6)]
    runs = [
        write_run(tmp_path / evil.replace("/", "_"), 6, records=records, settings={evil: evil, "plan": {evil: evil}}),
        write_run(tmp_path / "b", 6, records=records),
    ]
    assert main(["report", *map(str, runs), "--html", str(page_path)]) == 0
    page, printed = page_of(page_path), capsys.readouterr().out
    assert not page.named("script")
    assert 'alert("1")' in page.text
    assert 'alert("1")' in printed
    for text in (printed, page_path.read_text()):
        assert "\x1b" not in text
        assert "\u202e" not in text


STEP = '{"step": 0, "loss": 3.0}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STEP + '{"step": 1, "loss": "low"}\n', "metrics.jsonl is damaged: .*could not convert"),
        (STEP + "nonsense\n" + STEP, "metrics.jsonl, line 2"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_ends_in_exit_code_2(text, said, tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    (run / "metrics.jsonl").write_text(text)
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)
    assert str(run) in line
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_what_is_no_run_is_named(name, tmp_path):
    run = write_run(tmp_path / "run", 3)
    (run / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"run is not the directory of a run: there is no .*{name}"):
        read_run(run)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_equal_names_of_runs_are_told_apart_and_none_comes_twice(tmp_path):
    runs = [write_run(tmp_path / each, 2) for each in ("a/x/run", "b/x/run", "other")]
    assert read_runs(runs).names == ("a/x/run", "b/x/run", "other")
    (tmp_path / "link").symlink_to(runs[0])
    with pytest.raises(ValueError, match=r"given more than once: .*a/x/run"):
        read_runs([*runs, tmp_path / "link"])
    with pytest.raises(ValueError, match="at least one"):
        read_runs([])


def long_run(run, num_steps):
    """The steps of a run over and over, without files."""
    times = num_steps // run.num_steps
    steps = {name: np.tile(values, times) for name, values in run.steps.items()}
    steps["step"] = np.arange(float(num_steps))
    steps["time_s"] = steps["step_s"].cumsum()
    return dataclasses.replace(run, steps=steps)


def test_the_size_does_not_grow_with_the_run_and_every_step_counts(tmp_path, page_path, monkeypatch):
    run = long_run(read_run(write_run(tmp_path / "run", 50)), 200_000)
    lines, to_svg = {}, drawing.to_svg

    def noting(figure):
        lines[figure.axes[0].get_ylabel()] = list(figure.axes[0].lines)
        return to_svg(figure)

    monkeypatch.setattr(drawing, "to_svg", noting)
    report = read_runs([run.path])._replace(runs=(run,))
    report.write_html(page_path)
    assert page_path.stat().st_size < 500_000
    (line,) = lines["tokens per second"]
    x, y = line.get_data()
    assert len(x) == 300
    assert 0 < x[0] < x[-1] < 200_000
    cuts = np.linspace(0, 200_000, 301).astype(int)
    tokens, time_s = run.steps["num_tokens"], np.append(0, run.steps["time_s"])
    for k in (0, 7, 299):  # of each range: all its tokens over all its time
        first, end = cuts[k], cuts[k + 1]
        assert y[k] == pytest.approx(tokens[first:end].sum() / (time_s[end] - time_s[first]))


def test_the_command_prints_the_table_and_writes_the_page(tmp_path, capsys, monkeypatch):
    runs = [str(write_run(tmp_path / name, 4)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", runs[0]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(read_runs(runs[:1]).table())
    assert printed.endswith(f"{runs[0]}/report.html\n")
    assert page_of(tmp_path / "a" / "report.html").text.count("Run a")
    assert main(["report", *runs]) == 0
    assert capsys.readouterr().out.endswith("\nreport.html\n")
    assert "2 runs" in page_of(tmp_path / "report.html").text
    assert main(["report"]) == 2
    assert main(["report", runs[0], "--html", "nowhere/page.html"]) == 2
    assert "there is no directory nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_fit_is_shown_as_its_summary_has_it(recorded_run, page_path):
    page = reported(recorded_run.run_dir, path=page_path)
    rows, summary = rows_of(page), recorded_run.summary
    assert rows["State"] == ["ended"]
    assert rows["Steps"] == rows["max_steps"] == ["20"]
    assert rows["Tokens"] == [f"{summary.num_tokens:,}"]
    assert rows["Padding"] == [f"{summary.padding:.2%}"]
    assert rows["Shapes"] == ["2"]
    assert {attrs["id"] for attrs in page.named("figure")} >= FIGURES


@pytest.mark.slow
def test_a_reader_sees_the_page_in_a_browser(drawn):
    width, is_dark = 390, True
    path, (first, _) = drawn
    seen = render(path, width=width, height=4000, is_dark=is_dark)
    assert seen.complaints == []
    page = Page(seen.dom)
    assert "2 runs" in page.text
    tokens = read_run(first).steps["num_tokens"].sum()
    assert rows_of(page)["Tokens"][0] == f"{tokens:,.0f}"
    for hex_code in ("#74b0f0", "#f5a25d") if is_dark else ("#2a6ebb", "#c8590a"):
        assert num_pixels_of(seen.pixels, hex_code) > 1000
    layout = measured(path, width=width)
    assert {box["figure"] for box in layout["pictures"]} == FIGURES
    assert all(box["width"] > 250 and box["height"] > 120 for box in layout["pictures"])
    assert layout["num_labels"] > 30
    assert layout["clipped"] == []
    assert layout["page_width"] <= width


def test_losses_of_ones_own_are_shown_as_they_are(tmp_path, page_path):
    own = [record | {"mean_loss": 0.5} if "evaluation" in record else record for record in records_of(60)]
    own = [{name: value for name, value in record.items() if name != "nats_per_token"} for record in own]
    run = write_run(tmp_path / "own", records=own)
    last = [record["loss"] for record in own if "loss" in record][-1]
    figures = {name: values for name, (values,) in read_runs([run]).figures}
    assert figures["Last loss"] == f"{last:.3f}"
    assert figures["Evaluation held_out"] == "0.500, then 0.500"
    reported(run, path=page_path)
    assert "nats a token" not in page_path.read_text()
    figures = dict(read_runs([run, write_run(tmp_path / "nats")]).figures)
    assert figures["Last loss, nats a token or own"] == [f"{last:.3f}"] * 2


@pytest.mark.parametrize("num_steps", [0, 1, 30])
def test_curves_are_drawn_for_any_number_of_steps(tmp_path, num_steps):
    rates = {"base_learning_rate": 0.1, "learning_rate": 0.2}
    figures = {"loss": 3.0, "num_sequences": 3, "bucket_rows": 2, "bucket_length": 8} | rates
    rows = [{"step": s} | figures for s in range(num_steps)]
    plot_curves([{"step": 0, "evaluation": "held_out", "nats_per_token": 8.0}, *rows], tmp_path / "curves.png")
    pixels = imread(tmp_path / "curves.png")[..., :3]
    is_blue = pixels[..., 2] - pixels[..., 0] > 0.3
    lower_half = is_blue[len(is_blue) // 2 :]  # points only
    assert bool(lower_half.any()) == (num_steps > 0)
    assert lower_half.mean() < 0.01


def test_a_run_of_steps_of_several_groups_counts_groups_and_draws_every_shape(tmp_path, page_path):
    records = records_with(12)
    for step, record in enumerate(records):
        del record["bucket_rows"], record["bucket_length"]
        groups = [{"rows": 32, "length": 16, "num_groups": 1 + step}, {"rows": 8, "length": 64, "num_groups": 2}]
        record |= {"num_groups": 3 + step, "groups": groups[: 1 + step % 2]}
    run = write_run(tmp_path / "run", 12, records=records, has_ended=False)
    known = (0.25, 1.0, False, 1e9, MB, MB, 0, MB, MB)
    rows = [
        CompileRow(Bucket(32, 16), *known, step_s=0.5, planned_steps=70, padding=0.25, program="accumulation"),
        CompileRow(Bucket(32, 16), *known, step_s=0.25, planned_steps=70, padding=0.25, program="gradients"),
        CompileRow(None, *known, program="update"),
    ]
    CompileReport(rows, 12.5, 20.25).save(run / "compile_report.json")
    page = reported(run, path=page_path)
    cells = rows_of(page)
    assert cells["Groups per step"] == ["8.5, at most 14"]
    groups = [sum(range(1, 13)), 2 * 6]
    assert cells["32 × 16"] == [f"{groups[0]}", "70", "25.00%", "750.00", "0.50", "2.00", "no"]
    assert cells["8 × 64"] == [f"{groups[1]}", *["not known"] * 6]
    assert "shapes" in page.pictures
    assert read_run(run).shapes.tolist() == [
        [step, group["num_groups"], group["rows"], group["length"], 0]
        for step, record in enumerate(records)
        for group in record["groups"]
    ]
