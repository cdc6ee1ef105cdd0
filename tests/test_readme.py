"""The README's script runs as it stands, on less data."""

import re
from pathlib import Path

import numpy as np
import pytest

import jvarlen
from jvarlen import datasets
from jvarlen.cli import main
from jvarlen.datasets import TokenDataset

README = Path(jvarlen.__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_script_trains_on_every_sample(monkeypatch):
    rng = np.random.default_rng(0)
    samples = [rng.integers(32, 127, length, np.uint8).tobytes() for length in (9, 17) * 40]
    monkeypatch.setattr(datasets, "stdlib_functions", lambda: TokenDataset.from_bytes(samples))
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(script, names)
    assert names["plan"].num_samples == 80
    assert names["mesh"].size == 4
    assert 0 < float(names["metrics"].loss) < 8


def run_guide(name):
    """What the lines of a guide leave behind."""
    names: dict = {}
    for script in re.findall(r"```python\n(.*?)```", (README.parent / "docs" / name).read_text(), re.DOTALL):
        exec(script, names)
    return names


def test_the_lines_of_the_planning_guide_run(capsys):
    names = run_guide("planning.md")
    assert names["plan"].num_samples == len(names["lengths"])
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert "of the rows" in printed


def test_the_lines_of_the_sorting_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("sorting.md")
    assert names["lengths"].tolist() == [1, 3, 2]
    assert np.array_equal(np.sort(np.load("order.npy")), np.arange(20_000))
    printed = capsys.readouterr().out
    assert "5,000 to 5,000" in printed
    assert "ExchangeVolume" in printed


@pytest.mark.slow
def test_the_lines_of_the_compilation_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("compilation.md")
    printed = capsys.readouterr().out
    assert "no bucket was compiled for this batch. Nearest is" in printed
    assert "int32[1,3,1000], planned was" in printed
    assert f"{len(names['plan'].buckets)} programs read" in printed
    assert "0 executables left" in printed
    assert names["step"].ledger.times_used == names["plan"].num_steps


def test_the_lines_of_the_guide_to_mixtures_run(capsys):
    names = run_guide("mixtures.md")
    assert capsys.readouterr().out.splitlines() == ["[500 400 100]", "[200 160  40]", "[500 400 100]"]
    assert len(names["mixture"]) == names["plan"].num_samples == 1000


@pytest.mark.slow
def test_the_lines_of_the_training_guide_run(capsys):
    names = run_guide("training.md")
    printed = capsys.readouterr().out
    assert "0.2" in printed
    assert "{'float32'}" in printed
    assert names["metrics"].loss < 6
    assert len(names["rates"]) == names["plan"].num_steps
    assert names["step"].collectives(names["plan"].buckets[0])["all-reduce"].in_loops == 0


@pytest.mark.slow
def test_the_lines_of_the_testing_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("testing.md")
    printed = capsys.readouterr().out
    assert "likely: loss_fn returns means" in printed
    assert "1 is missing: id 3" in printed
    assert "step 0 differs: " in printed
    assert names["step"].ledger.times_used == 2 * len(names["plan"].buckets) + 2 * names["plan"].num_steps


@pytest.mark.slow
def test_the_lines_of_the_data_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("data.md")
    assert names["tokens"].lengths.sum() < names["saved"].lengths.sum()
    assert names["tokens"].num_values <= 400
    printed = capsys.readouterr().out
    assert "500 b'line 499: " in printed
    assert printed.count("corpus.jsonl.lengths-") == 2


def test_the_settings_that_the_guides_name_exist(capsys):
    """Flags of other programs stand in blocks of shell lines, which the tests of launching run."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out)) | {"--html", "--help"}
    for name in ("runs.md", "data.md", "training.md", "compilation.md"):
        text = re.sub(r"```.*?```", "", (README.parent / "docs" / name).read_text(), flags=re.DOTALL)
        assert set(re.findall(r"`(--[\w.-]+)", text)) <= known, name


def test_the_commands_it_names_exist():
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
