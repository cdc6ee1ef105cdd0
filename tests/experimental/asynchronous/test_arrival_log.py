"""Arrival logs: what is saved is what is loaded, and what cannot have happened is rejected."""

import dataclasses

import numpy as np
import pytest

from jvarlen import UserError
from jvarlen.experimental.asynchronous import ArrivalLog


def make_log(**changes):
    fields = {
        "plan_digest": "ab" * 32,
        "staleness_bound": None,
        "initial_digest": "cd" * 32,
        "final_digest": "ef" * 32,
        "steps": np.array([3, 2, 4]),
        "versions": np.array([[0, 0], [0, 1], [1, 2]]),
        "workers": np.array([[0, 1], [1, 0], [0, 0]]),
        "arrived_s": np.array([[0.1, 0.2], [0.3, 0.4], [0.1, 0.5]]),
        "applied_s": np.array([0.2, 0.4, 0.5]),
        "losses": np.array([1.0, np.nan, 0.1]),
    }
    return ArrivalLog(**fields | changes)


@pytest.mark.parametrize("bound", [None, 0, 4])
def test_a_log_is_saved_and_loaded(tmp_path, bound):
    log = make_log(staleness_bound=bound)
    log.save(tmp_path / "log.npz")
    loaded = ArrivalLog.load(tmp_path / "log.npz")
    for field in dataclasses.fields(log):
        one, other = (getattr(each, field.name) for each in (log, loaded))
        np.testing.assert_array_equal(one, other)
        assert type(one) is type(other)
    assert log.first_step == 2
    assert log.staleness.tolist() == [[0, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": np.array([3, 2, 2])}, "lacks 4"),
        ({"versions": np.array([[0, 0], [0, 2], [1, 2]])}, "do not exist yet: 1"),
        ({"versions": np.array([[0, 0], [0, 1], [-1, 2]])}, "do not exist yet: 2"),
        ({"losses": np.zeros(2), "workers": np.zeros((3, 1))}, r"'losses \[2\]', 'workers \[3, 1\]'"),
    ],
)
def test_what_cannot_have_happened_is_no_log(changes, said):
    with pytest.raises(UserError, match=said):
        make_log(**changes)


def test_other_files_are_no_logs(tmp_path):
    path = tmp_path / "log.npz"
    with pytest.raises(FileNotFoundError, match="no arrival log"):
        ArrivalLog.load(path)
    make_log().save(path)
    whole = path.read_bytes()
    np.savez(tmp_path / "other.npz", steps=np.arange(3))
    for content in (b"", b"{}", whole[: len(whole) // 2], (tmp_path / "other.npz").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="holds no arrival log"):
            ArrivalLog.load(path)
