"""The list of bad samples of a run: what is before a step stays, in the order in which it was written."""

import json

import pytest

from jvarlen.loading import SkippedSample
from jvarlen.runs.directory import open_bad_samples, write_bad_records

RECORD = {"step": None, "file": "a.jsonl", "record": "line 3", "reason": "not JSON"}


def skipped(step, *ids):
    return [SkippedSample(1, step, i, f"OSError: {i} is gone") for i in ids]


def rows(run_dir, name="bad_samples.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_a_list_is_cut_where_its_run_goes_on(tmp_path, capsys):
    write_bad_records(tmp_path, [RECORD])
    with open_bad_samples(tmp_path, start_step=0, skips=True, progress=True) as bad:
        bad.log(7, skipped(3, 5, 6))
        bad.log(8, [])
        bad.log(9, skipped(5, *range(10, 15)))
        bad.sync()
        assert (bad.num_in_files, bad.num_in_steps()) == (1, 7)
    first = [{"epoch": 1, "step": 7, "id": i, "reason": f"OSError: {i} is gone"} for i in (5, 6)]
    assert rows(tmp_path)[:3] == [RECORD, *first]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 5
    assert shown[0] == "step 8 leaves out sample 5: OSError: 5 is gone"
    # Lines of another process are cut as well, and one that a kill has cut off.
    (tmp_path / "bad_samples.1.jsonl").write_text('{"step": 8, "id": 1}\n{"step": 9, "id": 2}\n{"st')
    with open_bad_samples(tmp_path, start_step=9, skips=False, progress=False) as bad:
        assert (bad.num_in_files, bad.num_in_steps()) == (1, 3)
        bad.log(9, skipped(5, 9))
    assert rows(tmp_path) == [RECORD, *first]
    assert rows(tmp_path, "bad_samples.1.jsonl") == [{"step": 8, "id": 1}]


@pytest.mark.parametrize("line", [b"{", b"\xff", b'{"id": 3}', b"3"])
def test_a_damaged_list_is_refused_by_line(tmp_path, line):
    write_bad_records(tmp_path, [RECORD])
    path = tmp_path / "bad_samples.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    opened = open_bad_samples(tmp_path, start_step=0, skips=True, progress=False)
    with pytest.raises(ValueError, match=rf"{path} is damaged"), opened:
        pass


def test_nothing_bad_leaves_an_empty_list_and_only_where_it_is_asked_for(tmp_path):
    write_bad_records(tmp_path, [])
    with open_bad_samples(tmp_path, start_step=0, skips=False, progress=False):
        assert not list(tmp_path.iterdir())
    with open_bad_samples(tmp_path, start_step=0, skips=True, progress=False) as bad:
        assert (bad.num_in_files, bad.num_in_steps()) == (0, 0)
    assert rows(tmp_path) == []


def test_evaluations_list_a_sample_once_and_after_a_resume_too(tmp_path, capsys):
    write_bad_records(tmp_path, [RECORD])
    first = {"step": None, "evaluation": "held_out", "id": 3, "reason": "OSError: 3 is gone"}
    # Process 1 has found another sample, which this process reads from now on.
    of_other = '{"step": null, "evaluation": "held_out", "id": 4, "reason": "gone"}\n'
    for step in (0, 6, 4):  # the last is resumed from before the second evaluation
        with open_bad_samples(tmp_path, start_step=step, skips=True, progress=True) as bad:
            bad.log_evaluation("held_out", skipped(0, 3, 3))  # both chunks of a sample
            bad.log_evaluation("held_out", skipped(1, 3, *([4] * (step > 0))))
            bad.log(step, skipped(step, 3))
            if step:
                bad.log_evaluation("other", skipped(0, 3))
            assert (bad.num_in_files, bad.num_in_evaluations()) == (1, 3 if step else 1)
            assert bad.num_in_steps() == (2 if step else 1)
        (tmp_path / "bad_samples.1.jsonl").write_text(of_other)
    assert capsys.readouterr().err.splitlines()[0] == "evaluation on held_out leaves out sample 3: OSError: 3 is gone"
    of_steps = [{"epoch": 1, "step": step, "id": 3, "reason": "OSError: 3 is gone"} for step in (0, 4)]
    assert rows(tmp_path) == [RECORD, first, of_steps[0], first | {"evaluation": "other"}, of_steps[1]]
