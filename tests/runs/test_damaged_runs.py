"""Files of a run directory that were damaged or made by others: errors by their path."""

import json

import pytest

from jvarlen import UserError
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.config import changed_contents, load_config
from tests.synthetic_runs import write_run

VALUES = [None, "x", True, -1, 0.5, 1e999, 10**400, [], {}, [[]], {"a": "\x1b[2J"}]
DEEP = "[" * 100_000


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", 3)
    return tmp_path / "run"


def paths_of(value):
    """The places of all values in a JSON document, those of lists only for their first item."""
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, each in items:
        yield (key,)
        yield from ((key, *rest) for rest in paths_of(each))


def replaced(document, place, value):
    """The document with another value at a place."""
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = replaced(copy[place[0]], place[1:], value)
    return copy


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
    whole = path.read_text()
    last = whole.splitlines()[-1] if name == "metrics.jsonl" else whole
    document = json.loads(last)
    for place in paths_of(document):
        for value in VALUES:
            changed = json.dumps(replaced(document, place, value))
            path.write_text(whole.replace(last, changed) + "\n" if name == "metrics.jsonl" else changed)
            table_or_error(path)
    for content in ("", "null", "[]", "7", DEEP, '{"a": ' * 100_000, "\xff"):
        path.write_text(content + "\n{}" * (name == "metrics.jsonl"))
        assert table_or_error(path) is None


@pytest.mark.parametrize("content", ["", "[]", "{", DEEP, '{"format": 2, "plan": 3}', '{"format": []}', "\xff"])
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
