"""Examples run as their readers run them, warnings as errors, and what they print is true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import keeping_programs
from tests.support import forks
from tests.support.processes import COMPILE_FAST

EXAMPLES = Path(__file__).parents[1] / "examples"
# Examples of real training, with the loss that each must fall below, and the least of what else it prints.
TRAININGS = {
    "sentence_classification": (0.4, {"accuracy": 0.85}),
    "translation": (1.5, {}),
    "molecules": (4.0, {}),
    "gpt": (0.8, {}),
    "native_images": (0.3, {}),
    "proteins": (0.5, {}),
    "sentence_embeddings": (0.18, {"nearest of the same topic:": 0.7}),
    "hugging_face": (0.4, {}),
    "preference_pairs": (0.4, {"accuracy:": 0.9, "margin:": 1.0}),
    "lora": (0.5, {}),
}
FOR_TRAINERS = {"torch_accelerate", "torch_lightning", "torch_trainer"}  # tests/trainers runs them
NUM_LOADERS = {"sentence_classification": 2, "lora": 2}  # the second is for evaluation, or for adapters
SECONDS = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory, programs_of_before):
    """One device, and programs of earlier sessions; a resumed run reads what it compiled before."""
    folder = tmp_path_factory.mktemp("jupyter")
    return os.environ | {
        "PYTHONPATH": str(EXAMPLES.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": COMPILE_FAST,
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        **{name.upper(): str(value) for name, value in keeping_programs(programs_of_before).items()},
    }


@pytest.fixture
def run(environment, tmp_path):
    """Runs an example in an empty folder and gives what it printed."""

    def run(program: Path, *args: str, warnings: str = "error") -> str:
        env = environment | {"PYTHONWARNINGS": warnings}
        ended = forks.run(program, *args, env=env, cwd=tmp_path, seconds=SECONDS)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    return run


def numbers(pattern: str, printed: str) -> list[float]:
    """The groups of the one place where a pattern is found."""
    (found,) = re.findall(pattern, printed)
    return [float(number.replace(",", "")) for number in ((found,) if isinstance(found, str) else found)]


def test_ten_line_plan_pads_much_less_than_padding_to_the_longest(run):
    printed = run(EXAMPLES / "ten_line_plan.py")
    padding, to_longest = numbers(r"padding: ([\d.]+)%; padded to the longest, it would be ([\d.]+)%", printed)
    assert padding < 20 < 90 < to_longest
    num_samples, num_steps = numbers(r"([\d,]+) samples, each in one of ([\d,]+) steps", printed)
    assert numbers(r"total\s+([\d,]+)\s+([\d,]+)", printed) == [num_samples, num_steps]
    assert num_samples == 50_000


@pytest.mark.parametrize("stem", TRAININGS)
def test_examples_train_on_every_sample_with_the_planned_programs(run, stem):
    if stem == "hugging_face":
        pytest.importorskip("datasets")
    printed = run(EXAMPLES.parent / "tests" / "support" / "run_example.py", str(EXAMPLES / f"{stem}.py"))
    below, least = TRAININGS[stem]
    first, last, num_steps = numbers(r"(?m)^loss ([\d.]+) -> ([\d.]+).* in (\d+) steps$", printed)
    assert last < below < 0.8 * first
    for name, value in least.items():
        assert numbers(rf"(?m)^{name} ([\d.]+)$", printed)[0] > value
    trained = re.findall(r"^loader \d: (\d+) of (\d+) samples, each (\d) times, in (\d+) steps", printed, re.MULTILINE)
    assert len(trained) == NUM_LOADERS.get(stem, 1)
    assert all(samples == num_samples for samples, num_samples, *_ in trained)
    assert int(trained[0][3]) == num_steps
    assert "compiled between steps: none" in printed


def test_rollouts_learn_to_count_down_without_recompilation(run):
    printed = run(EXAMPLES / "rollouts.py")  # which raises if anything compiles after the first iteration
    first, last, num_iterations = numbers(r"reward ([\d.]+) -> ([\d.]+) in (\d+) iterations", printed)
    assert first < 0.1 < 0.8 < last
    assert num_iterations == 39


def test_speech_ctc_resumes_and_learns(run, tmp_path):
    example = EXAMPLES / "speech_ctc.py"
    run(example, "12", "4")
    assert "32 steps on 4 devices" in run(example, "32", "4")
    metrics = tmp_path / "runs" / "speech_ctc" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in records if "loss" in row] == list(range(32))
    held_out = [row for row in records if row.get("evaluation") == "held_out"]
    assert held_out[-1]["mean_loss"] < held_out[0]["mean_loss"] / 4


def test_own_jsonl_resumes_with_the_steps_that_are_left_and_learns(run, tmp_path):
    printed = run(EXAMPLES / "own_jsonl.py")
    stopped, planned, taken = numbers(r"stopped after (\d+) of (\d+) steps, resumed; steps taken: (\d+)", printed)
    assert 20 < stopped < planned == taken == 60
    (metrics,) = tmp_path.glob("runs/own_jsonl/2*/metrics.jsonl")
    assert metrics.with_name("curves.png").read_bytes().startswith(b"\x89PNG")
    records = map(json.loads, metrics.read_text().splitlines())
    assert [record["step"] for record in records if "loss" in record] == list(range(60))
    for loop in ("fit", "the loop"):
        first, last = numbers(rf"loss of {loop}: ([\d.]+) -> ([\d.]+)", printed)
        assert 5 < first < 6  # log 256, bytes being all alike
        assert last < 2


def test_layered_pure_jax_learns_with_the_losses_of_one_device(run):
    printed = run(EXAMPLES / "layered_pure_jax.py")
    assert "a device holds (3, 8, 64) of (3, 32, 64)" in printed
    assert numbers(r"(\d+) steps, with the losses of one device", printed)[0] > 30
    first, last = re.findall(r"ten steps: loss ([\d.]+), (\d+)% correct", printed)
    assert float(last[0]) < 2.5 < 3.5 < float(first[0]) < 5  # log 64 is 4.2
    assert int(last[1]) > 50 > 20 > int(first[1])


def test_layered_nnx_learns_with_dropout_and_the_losses_of_one_device(run):
    printed = run(EXAMPLES / "layered_nnx.py")
    assert "a device holds (3, 8, 64) of (3, 32, 64)" in printed
    num_steps, first, last = numbers(r"(\d+) steps, with the losses of one device: ([\d.]+) -> ([\d.]+)", printed)
    assert num_steps > 20
    assert last < 1.5 < 4 < first < 5.5  # log 64 is 4.2; log 2 is 0.7
    assert numbers(r"without dropout: ([\d.]+)", printed)[0] < last


@pytest.mark.multiprocess
def test_multi_process_shares_the_samples_and_agrees_on_plan_and_losses(run):
    printed = run(EXAMPLES / "multi_process.py")
    # If both print at the same time, two lines may be in one.
    lines = re.findall(r"process (\d) of 2: read (\d+) of 400 samples, (plan .*? steps)", printed)
    ranks, num_read, seen = zip(*lines, strict=True)
    assert set(ranks) == {"0", "1"}
    assert sum(map(int, num_read)) == 400
    assert min(map(int, num_read)) > 150
    assert seen[0] == seen[1]
    first, last = numbers(r"loss ([\d.]+) -> ([\d.]+)", seen[0])
    assert last < 0.1 < 2.7 < first  # log 16
    assert "all processes have the same plan and the same losses" in printed


def test_torch_sampler_learns_with_rows_that_repeat_sentences(run):
    pytest.importorskip("torch")
    printed = run(EXAMPLES / "torch_sampler.py")
    (padding,) = numbers(r"^([\d.]+)% padding in shapes", printed)
    assert padding < 20
    first, last, num_steps = numbers(r"loss ([\d.]+) -> ([\d.]+) in (\d+) steps", printed)
    assert num_steps > 50
    assert last < 0.5 < 1.2 < first < 1.8  # log 4, topics being all alike


def test_tunix_sft_learns_by_each_sample_once_an_epoch_without_recompilation(run):
    pytest.importorskip("tunix")
    pytest.importorskip("qwix")
    watched = EXAMPLES.parent / "tests" / "support" / "run_example.py"
    printed = run(watched, str(EXAMPLES / "tunix_sft.py"), warnings="default")  # Tunix's own
    first, last, num_steps = numbers(r"loss ([\d.]+) -> ([\d.]+) nats a byte of an answer in (\d+) steps", printed)
    assert last < 2 < 4.5 < first < 5.5  # log 128 is 4.9
    trained = re.findall(r"^loader \d: 400 of 400 samples, each 1 times, in (\d+) steps", printed, re.MULTILINE)
    assert sum(map(int, trained)) == num_steps
    assert len(trained) == 2


def test_maxtext_loop_resumes_by_orbax_and_grain_and_learns(run):
    pytest.importorskip("grain")
    printed = run(EXAMPLES / "maxtext_loop.py")
    first, last, num_steps = numbers(r"loss ([\d.]+) -> ([\d.]+) nats a byte in (\d+) steps", printed)
    assert last < 0.8 < 4.5 < first
    assert num_steps > 50
    assert "stopped and resumed: the same losses" in printed


def test_plan_notebook_runs_as_a_notebook_and_draws(environment, tmp_path):
    notebook = tmp_path / "plan_notebook.ipynb"
    for command in (
        ["-m", "jupytext", "--to", "ipynb", "--output", notebook, EXAMPLES / "plan_notebook.py"],
        ["-c", "from nbclient.cli import main; main()", "--inplace", notebook],
    ):
        # Jupyter's own warnings are no concern of the notebook.
        env = environment | {"PYTHONWARNINGS": "default"}
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, check=True, timeout=SECONDS)
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not [output for output in outputs if output.get("name") == "stderr"]
    padding = [float(share) for share in re.findall(r"^ *\d+ shapes: ([\d.]+)% padding", printed, re.MULTILINE)]
    assert len(padding) == 6
    assert padding == sorted(padding, reverse=True)
    assert "the same plan, read back: True" in printed


def test_every_example_has_a_test_and_a_row_in_the_table():
    stems = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {stem for stem in stems if any(name.startswith(f"test_{stem}_") for name in globals())}
    assert stems - tested == TRAININGS.keys() | FOR_TRAINERS
    table = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|.* examples/(\w+)\.py` \|$", table, re.MULTILINE)
    assert sorted(rows) == [(stem,) * 3 for stem in sorted(stems)]
