"""The records of a run survive a cut."""

import json

from jvarlen.reports.run_page import read_metrics


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1')
    assert read_metrics(path) == [{"step": 0}]
    path.write_text("")
    assert read_metrics(path) == []
