"""`python -m jvarlen.experimental.elastic`: what it refuses before a process starts."""

import pytest

from jvarlen.experimental.elastic.__main__ import main


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "elastic training needs run_dir"),
        (["--run-dir", "runs", "--distributed"], "elastic training starts the processes itself"),
        (["--run-dir", "runs"], "1 microbatches a step do not spread over the shards of data2"),
        (["--run-dir", "runs", "--parallel", "data4"], "the layout data4 takes 4 devices, not the 2 given ones"),
        (
            ["--run-dir", "runs", "--parallel", "auto"],
            "parallel auto would choose anew for the survivors: name a layout",
        ),
    ],
)
def test_settings_that_cannot_go_on_are_refused(args, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["2", "--", "jvarlen", "train", *args]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_trainings_are_supervised(capsys):
    with pytest.raises(SystemExit):
        main(["2", "--", "jvarlen", "plan", "lengths.npy"])
    assert "a script of your own calls keep_training" in capsys.readouterr().err
