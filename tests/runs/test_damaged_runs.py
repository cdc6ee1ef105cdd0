"""Files of a run directory that were damaged or made by others: errors by their path."""

import pytest

from jvarlen import UserError
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.saved_config import changed_contents, load_config
from tests.support.synthetic_runs import write_run

DEEP = "[" * 100_000


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", 3)
    return tmp_path / "run"


def table_or_error(path):
    try:
        return read_runs([path.parent]).table()
    except (UserError, FileNotFoundError) as error:
        message = str(error)
    assert str(path) in message
    return None


@pytest.mark.parametrize("name", ["summary.json", "compile_report.json", "config.json", "metrics.jsonl"])
def test_a_report_shows_a_run_or_names_the_file(name, run):
    path = run / name
    for content in ("", "null", "[]", "7", DEEP, '{"rows": [{"bucket": [2, 8]}]}', '{"a": ' * 100_000, "\xff"):
        path.write_text(content + "\n{}" * (name == "metrics.jsonl"))
        assert table_or_error(path) is None


@pytest.mark.parametrize("content", ["", "[]", "{", DEEP, '{"format": 4, "plan": 3}', '{"format": []}', "\xff"])
def test_settings_that_are_none_are_named(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UserError, match=str(path)) as refusal:
        load_config(path)
    assert str(refusal.value).count(str(path)) == 1


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"b": "1"}', DEEP])
def test_keys_of_data_that_are_none_are_named(content, tmp_path):
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path / "data.json")):
        changed_contents(tmp_path, {"a": "1"})
