"""Files of a run directory that were damaged or made by others: errors by their path."""

import itertools
import re
import shutil

import pytest

from jvarlen import UserError
from jvarlen.cli import main
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.saved_config import changed_contents, load_config
from tests.support.recorded_run import NUM_STEPS
from tests.support.synthetic_runs import write_run

DEEP = "[" * 100_000


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", 3)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["summary.json", "compile_report.json", "config.json", "metrics.jsonl"])
def test_a_report_names_a_file_that_is_damaged(name, run):
    path = run / name
    for content in ("", "null", "[]", "7", DEEP, '{"rows": [{"bucket": [2, 8]}]}', '{"a": ' * 100_000, "\xff"):
        path.write_text(content + "\n{}" * (name == "metrics.jsonl"))
        with pytest.raises((UserError, FileNotFoundError), match=re.escape(str(path))):
            read_runs([run])


WRONG = ('"seed": "three"', '"no": 1', '"plan": {"max_tokens": 0}', '"data": {"field": "body"}', '"plan": 3')


@pytest.mark.parametrize(
    "content", ["", "[]", "{", DEEP, *(f'{{"format": 4, {wrong}}}' for wrong in WRONG), '{"format": []}', "\xff"]
)
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


def flip(whole):
    return whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 255]) + whole[len(whole) // 2 + 1 :]


DAMAGES = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "flipped": flip,
    "foreign": lambda whole: b"PK\x03\x04 something else altogether",
    "empty": lambda whole: b"",
}


@pytest.fixture
def ended(recorded_run, tmp_path):
    return shutil.copytree(recorded_run.run_dir, tmp_path / "run")


def contents(run_dir):
    """All but the lock, which names the process that held it last."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "lock")
    return {path.relative_to(run_dir): path.read_bytes() for path in files}


def refused(ended, capsys, *options):
    """What is said of a resume that changes nothing."""
    before = contents(ended)
    assert main(["train", "--resume", str(ended), "--no-progress", *options]) == 2
    assert contents(ended) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jvarlen: ")
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["plan.npz"], DAMAGES),
        *itertools.product(["config.json"], ["empty"]),
        *itertools.product(["metrics.jsonl", "bad_samples.jsonl", "checkpoint"], ["flipped"]),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_nothing_is_changed(ended, name, damage, capsys):
    damaged = ended / name
    if name == "checkpoint":
        damaged = max(ended.glob(f"checkpoints/{NUM_STEPS}/**/d/*"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    # The first byte of the log: the last line may be cut off, as by a kill, and other digits of a loss show nothing.
    struck = bytes([whole[0] ^ 1]) + whole[1:] if name.endswith(".jsonl") else DAMAGES[damage](whole)
    damaged.write_bytes(struck)
    assert (str(ended / "checkpoints") if name == "checkpoint" else name) in refused(ended, capsys)


@pytest.mark.slow
def test_fewer_steps_than_a_run_has_done_are_refused(ended, capsys):
    said = refused(ended, capsys, "--max-steps", "1")
    assert f"the checkpoint is at step {NUM_STEPS}, training takes 1" in said
