"""Reports of benchmarks: the same as data and as Markdown, collected, and the source of every figure that is quoted."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "jvarlen").glob("**/README.md")),
]
REPORT = re.compile(r"benchmarks/results/[\w-]+\.md")
# Not those of names: int64, 64-bit, AVX-512.
NUMBER = re.compile(r"(?<![\w.])(?<!\w-)(≈ ?)?([−-]?\d[\d,]*+(?:\.\d+)?+)(?!-?[^\W\d])( million)?")

WORKS = '''"""Does it work?"""
from support.timing import report, table
report("works", ["# It works", "", "As it should:", "", *table("a|b", [("1", ""), ("2", "x")])], write=False)
'''
FAILS = WORKS.replace("Does it work?", "Does it fail?") + "raise SystemExit(3)\n"


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("support.reports")


@pytest.fixture
def runner(reports, monkeypatch, tmp_path):
    """The runner, of two small benchmarks in a folder of their own."""
    run = importlib.import_module("run")
    for name, program in (("works", WORKS), ("fails", FAILS)):
        (tmp_path / f"{name}.py").write_text(program)
    (tmp_path / "support").symlink_to(BENCHMARKS / "support")
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(reports, "commit", lambda: {"commit": "a" * 40, "dirty": False})
    return run


def collected(folder):
    (path,) = folder.glob("*-bench.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.md")), ids=lambda path: path.stem)
def test_a_report_as_data_is_the_same_report(reports, path):
    markdown = path.read_text()
    data = reports.parse(markdown.split("\n"))
    assert reports.render(data) == markdown
    assert sum(len(table["rows"]) + 2 for table in data["tables"]) == len(re.findall(r"^\|", markdown, re.MULTILINE))


def test_tables_know_their_heading_and_their_empty_cells(reports):
    data = reports.parse(["# A", "## B", "", "one", "two", "| x | y |", "|---|---|", "| 1 |  |", "", "## C"])
    table = {"title": "B", "after": 3, "header": ["x", "y"], "rows": [["1", ""]]}
    assert data == {"text": ["# A", "## B", "one\ntwo", "## C"], "tables": [table]}


def test_a_report_names_its_question_machine_versions_and_commit(reports):
    report = json.loads(json.dumps(reports.make_report("bucket-compile", ["# Title"], quick=False)))
    assert report["question"].startswith("What do strategies of few shapes cost")
    assert {"cores", "processor", "memory_bytes", "os", "gpus"} <= report["machine"].keys()
    assert {"python", "jvarlen", "numpy", "jax"} <= report["versions"].keys()
    assert report["text"][0] == "# Title"
    assert report["text"][-1].startswith(f"Commit {(report['commit'] or 'unknown')[:10]}")


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_report_is_kept_as_markdown_and_data_and_a_quick_one_is_not(reports, monkeypatch, tmp_path, is_full):
    timing = importlib.import_module("support.timing")
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    timing.report("loader", ["# Title", "", "Text."], write=is_full)
    kept = {path.suffix: path.read_text() for path in tmp_path.glob("*-loader.*")}
    assert kept.keys() == ({".md", ".json"} if is_full else set())
    if is_full:
        assert kept[".md"] == reports.render(json.loads(kept[".json"]))
        assert kept[".md"].startswith("# Title\n\nText.\n\nCommit ")


def test_every_benchmark_asks_the_question_that_the_list_has(reports):
    for path in {*BENCHMARKS.glob("*.py")} - {BENCHMARKS / "run.py"}:
        question = reports.question(path)
        assert question.endswith("?"), path.name
        assert f"| `{path.name}` | {question} |" in (BENCHMARKS / "README.md").read_text()


def test_one_that_fails_is_named_while_the_others_run(runner, tmp_path, capfd):
    assert runner.main(["--quick"]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "failed: fails"
    fails, works = collected(tmp_path)["benchmarks"]
    assert (fails["name"], fails["exit_code"]) == ("fails", 3)
    assert fails["report"]["text"] == works["report"]["text"]  # what it had measured until then
    assert (works["name"], works["exit_code"], works["question"]) == ("works", 0, "Does it work?")
    assert works["report"]["tables"][0]["rows"] == [["1", ""], ["2", "x"]]
    (markdown,) = tmp_path.glob("*-bench.md")
    assert "## It works\n\nQuick form" in markdown.read_text()
    assert re.search(r"\| Does it fail\? \| fails \| [\d.]+ \| \*\*failed\*\* \|", markdown.read_text())


def test_resuming_runs_what_is_missing_of_the_same_commit_alone(runner, reports, tmp_path, monkeypatch, capfd):
    assert runner.main(["--quick", "--only", "works"]) == 0
    (tmp_path / "fails.py").write_text(WORKS.replace("Does it work?", "Does it fail?"))
    (tmp_path / "works.py").unlink()
    (tmp_path / "works.py").write_text(FAILS)  # would fail if it ran again
    assert runner.main(["--quick", "--resume"]) == 0
    assert [entry["name"] for entry in collected(tmp_path)["benchmarks"]] == ["fails", "works"]
    monkeypatch.setattr(reports, "commit", lambda: {"commit": "b" * 40, "dirty": False})
    assert runner.main(["--quick", "--resume"]) == 1
    assert "failed: works" in capfd.readouterr().err


def quoting(document):
    """Paragraphs and bullets that name a report, and so quote it; a table belongs to the paragraph before it."""
    blocks = re.split(r"\n\s*\n(?!\|)|\n(?=- )", document.read_text())
    return [block for block in blocks if REPORT.search(block)]


def unfounded(block, reports):
    """Numbers of a text that are, rounded as they are there, in none of the reports; those marked ≈ are derived."""
    known = [float(number.replace(",", "").replace("−", "-")) for _, number, _ in NUMBER.findall(reports)]
    missing = []
    for is_derived, number, millions in NUMBER.findall(re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", block)):
        value = float(number.replace(",", "").replace("−", "-")) * (1e6 if millions else 1)
        num_digits = len(number.partition(".")[2])
        if not is_derived and not any(round(other, num_digits) == value for other in known):
            missing.append(number)
    return missing


def test_numbers_are_found_as_they_are_rounded():
    reports = "| 10,000,000 | 1.128 | -0.05 | 93.27% | 4×1024 |"
    assert unfounded("10 million of 1,024, 64-bit: 1.13 to 93 %, −0.05 [a](b-2.md), `x 7`, ≈ 5 in all", reports) == []
    assert unfounded("1.12 of 11 million, and 64 bits", reports) == ["1.12", "11", "64"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_figures_are_those_of_their_reports(document):
    for block in quoting(document):
        paths = [ROOT / name for name in REPORT.findall(block)]
        assert not [path for path in paths if not path.exists()]
        assert not unfounded(block, "\n".join(path.read_text() for path in paths)), block


def test_every_measured_figure_names_its_report():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    (section,) = re.findall(r"^What `benchmarks/` measured.*", text, re.DOTALL | re.MULTILINE)
    bullets = re.split(r"\n(?=- )", section)[1:]
    assert bullets
    assert not [bullet for bullet in bullets if not REPORT.search(bullet)]


def test_documents_that_name_a_benchmark_with_figures_name_its_report():
    for document in DOCUMENTS:
        for block in re.split(r"\n\s*\n", document.read_text()):
            if re.search(r"benchmarks/\w+\.py", block) and re.search(r"\d\.\d", block):
                assert REPORT.search(block), f"{document.name}: {block}"
