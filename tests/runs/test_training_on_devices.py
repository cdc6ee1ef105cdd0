"""Training over devices and processes: the same losses and rates on any number, stopped and resumed on another."""

import contextlib
import json
import os
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jvarlen import FitConfig, UserError, cli, fit
from jvarlen.compiling.lowering import make_step_compiler
from jvarlen.data.split import HELD_OUT
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.saved_config import load_config
from jvarlen.targets.target import Target
from tests.runs.run_train_command import HEARTBEAT_S
from tests.support import forks, run_fit
from tests.support.meshes import data_mesh
from tests.support.processes import COMPILE_FAST, ROOT, run, started
from tests.support.settings import changed

FITTING = Path(__file__).parents[1] / "support" / "run_fit.py"


def records(run_dir):
    """The records of steps."""
    return [row for row in read_metrics(Path(run_dir) / "metrics.jsonl") if "loss" in row]


def bad_samples(run_dir):
    """The records of all processes."""
    lists = [path.read_text() for path in Path(run_dir).glob("bad_samples*.jsonl")]
    rows = [json.loads(line) for line in "".join(lists).splitlines()]
    return sorted(rows, key=lambda row: (-1 if row["step"] is None else row["step"], row["id"]))


def assert_same_course(one, other):
    """The same steps at the same rates, bit for bit, with losses that differ by rounding alone."""
    assert len(one) == len(other)
    for name in one[0].keys() - {"loss", "time_s", "step_s", "data_wait_s", "stall_s", "host_memory_bytes"}:
        assert [row[name] for row in one] == [row[name] for row in other]
    np.testing.assert_allclose([row["loss"] for row in one], [row["loss"] for row in other], rtol=1e-5)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory, compilation_cache):
    runs_dir = tmp_path_factory.mktemp("one") / "runs"
    return fit(run_fit.make_skipping_config(runs_dir, compilation_cache), run_fit.make_data_with_gaps())


def test_a_dry_run_tells_what_a_step_holds_and_sends(tmp_path, capsys):
    settings = [
        "--parallel", "data2.zero2", "--num-microbatches", "4", "--max-tokens", "64", "--dry-run",
        "--max-shapes", "2", "--max-length", "32", "--decoder.num-layers", "1", "--decoder.width", "16",
        "--decoder.num-heads", "1", "--no-progress", "--runs-dir", str(tmp_path),
    ]  # fmt: skip
    assert cli.main(["train", *settings]) == 0
    _, memory = capsys.readouterr().out.split("Memory of a step of 2×32 on data2.zero2\n")
    memory, communication = memory.split("Communication of this step\n")
    parts = {name: int(number.replace(",", "")) for name, number in map(str.split, memory.strip().splitlines()[1:])}
    assert parts["total"] == sum(parts.values()) - parts["total"]
    assert parts["gathered"] == 0  # gradients are added a layer at a time
    assert parts["params"] > parts["grads"] > parts["params"] // 2
    assert {line.split()[0] for line in communication.splitlines()} >= {"reduce-scatter", "all-gather", "all-reduce"}
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="call dry_run"):
        fit(FitConfig(dry_run=True))


@pytest.mark.slow
def test_a_layout_splits_the_cpu_into_its_devices(tmp_path):
    environment = os.environ | {"XLA_FLAGS": COMPILE_FAST, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    settings = [
        "--parallel", "data2.zero1", "--num-microbatches", "4", "--max-tokens", "64", "--max-steps", "2",
        "--max-shapes", "1", "--max-length", "16", "--decoder.num-layers", "1", "--decoder.width", "8",
        "--decoder.num-heads", "1", "--no-progress", "--runs-dir", str(tmp_path),
    ]  # fmt: skip
    ended = forks.run(ROOT / "jvarlen" / "__main__.py", "train", *settings, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "Summary" in ended.stdout


def test_layouts_that_runs_cannot_have_are_refused_before_anything_compiles(tmp_path):
    for settings, message in (
        ({"parallel": "data2.zeroo1"}, "zeroo1"),
        ({"parallel": "data2", "devices": 4}, "takes 2 devices, not the 4 given ones"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(changed(run_fit.make_config(tmp_path), **settings), run_fit.make_data())
    with pytest.raises(ValueError, match="4 microbatches a step do not spread over 3 shards"):
        fit(run_fit.make_config(tmp_path), run_fit.make_data(), layout=data_mesh(3))


# What another letter is in, and what is said of it.
DIFFERING = {
    "data": "/proc/self/cwd/data.txt, the training data",
    "eval": "/proc/self/cwd/eval.txt, the data of eval",
    "given": "the training data: give all the same",
}
# How a process is lost, and what the other says. Only if process 0 is killed does JAX abort the others.
LOST = {
    "killed": "jvarlen: .*no word from process 1|lost process 1",  # seen by its silence on a busy machine
    "stopped": f"jvarlen: lost process 1: no sign of life in {HEARTBEAT_S} s",
    "stopped 0": f"jvarlen: lost process 0, where all meet: no answer in {HEARTBEAT_S} s",
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Two processes of the command for each failure: while some wait for heartbeats, other tests run."""
    program = Path(__file__).with_name("run_train_command.py")
    with contextlib.ExitStack() as stack:
        yield {
            failing: stack.enter_context(
                started(program, 2, failing, str(tmp_path_factory.mktemp(failing.replace(" ", ""))))
            )
            for failing in ("reading", "reading 0", "planning", *DIFFERING, *LOST)
        }


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fit_over_processes_stops_together_and_resumes_anywhere(on_one_device, tmp_path):
    first, second = run(FITTING, 2, str(tmp_path), seconds=300)
    assert "Summary" in first
    assert "Summary" not in second
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    run_dir, num_steps, num_compilations = results[0]["whole"]
    assert (num_steps, num_compilations) == (run_fit.NUM_STEPS, 0)
    assert_same_course(records(run_dir), records(on_one_device.run_dir))
    summary = json.loads((Path(run_dir) / "summary.json").read_text())
    num_skipped = summary["num_skipped"]
    assert bad_samples(run_dir) == bad_samples(on_one_device.run_dir)
    assert num_skipped == on_one_device.summary.num_skipped == len(bad_samples(run_dir)) - 1 > 10
    assert [row["id"] for row in bad_samples(run_dir) if row.get("evaluation") == HELD_OUT] == [3]
    assert summary["num_skipped_evaluation"] == on_one_device.summary.num_skipped_evaluation == 1
    assert all(list(Path(run_dir).glob(f"bad_samples{of}.jsonl")) for of in ("", ".1"))

    run_dir, num_steps, was_interrupted = results[0]["stopped"]
    assert was_interrupted, "process 1 was, and process 0 stopped with it"
    assert 0 < num_steps < run_fit.NUM_STEPS
    saved = load_config(Path(run_dir) / "config.json")
    assert (saved.hardware.coordinator, saved.hardware.num_processes, saved.hardware.process_id) == (None, None, None)
    resumed = fit(changed(saved, resume=Path(run_dir), devices=2), run_fit.make_data_with_gaps())
    assert bad_samples(run_dir) == bad_samples(on_one_device.run_dir)
    assert (resumed.summary.num_skipped, resumed.summary.num_skipped_evaluation) == (num_skipped, 1)
    assert resumed.summary.num_steps == run_fit.NUM_STEPS
    assert_same_course(records(run_dir), records(on_one_device.run_dir))

    assert results[0]["chosen"] == 2
    assert results[0]["differing"] == [
        "UserError",
        "processes differ in settings, in the order of processes: seed: 0, 1",
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("failing", ["planning", "reading", "reading 0"])
def test_the_command_ends_on_all_processes_when_one_fails(failing, commands):
    """No process is left waiting: within a minute all have ended, by an exit code that says so."""
    ended = commands[failing].wait(60)
    assert max(each.at for each in ended) - commands[failing].started_at < 60
    failed, other = reversed(ended) if failing != "reading 0" else ended
    assert failed.code == other.code == 2, other.output
    assert ("cost.json" if failing == "planning" else "the disk of this process is gone") in failed.output
    if failing == "planning":
        assert "jvarlen: could not plan the training: process 1: " in other.output


OF_RUN = [
    "--buckets", "4", "16", "2", "32", "--max-steps", "30", "--decoder.num-layers", "2", "--decoder.width", "16",
    "--decoder.num-heads", "2", "--no-progress",
]  # fmt: skip


def test_a_target_gets_the_programs_of_the_run(tmp_path, monkeypatch):
    """From the same settings, whether they are those of train or compile, and from samples or lengths."""
    given = [
        *("--parallel", "data2.tensor2.zero1", "--decoder.compute-dtype", "bfloat16", "--decoder.attention", "xla"),
        *("--trainable", "*mlp*", "--optimizer.batch-size-rule", "none"),
    ]
    (tmp_path / "lines.txt").write_text("".join(f"{'x' * (i % 30 + 1)}{i}\n" for i in range(300)))
    np.save(tmp_path / "lengths.npy", np.arange(1, 33))
    programs = {}

    def noted(compiler, lowered):
        if len(programs) < 2:
            programs[lowered.key] = lowered.program.as_text(), dict(compiler.compiler_options)
        if len(programs) == 2:
            raise UserError("enough")
        return lowered  # in place of a row

    def of_run(step, state, shapes, *, options, progress):
        for bucket in shapes.buckets:
            compiler = make_step_compiler(step, state, shapes, options)
            noted(compiler, compiler.lower(*compiler.passes(bucket)))

    monkeypatch.setattr("jvarlen.runs.open_run.compile_buckets", of_run)
    monkeypatch.setattr("jvarlen.targets.compile_for._row", lambda compiler, target, lowered: noted(compiler, lowered))
    monkeypatch.setattr("jvarlen.targets.compile_for.num_threads", lambda options: 1)
    here = Target("here", tuple(jax.devices()[:4]), None, is_here=True)
    monkeypatch.setattr(Target, "parse", classmethod(lambda cls, text: here))
    data, found = str(tmp_path / "lines.txt"), []
    for command in (
        ["train", "--data", data, "--runs-dir", str(tmp_path / "runs"), "--devices", "4"],
        ["train", "--data", data, "--devices", "4", "--dry-run", "--target", "here"],
        ["compile", data, "--target", "here"],
        ["compile", str(tmp_path / "lengths.npy"), "--target", "here"],
    ):
        programs.clear()
        assert cli.main([*command, *OF_RUN, *given]) == 2
        found.append(dict(programs))
    assert len(found[0]) == 2
    assert found[1:] == found[:1] * 3


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("differing", DIFFERING)
def test_processes_with_other_contents_under_one_name_are_refused_before_the_first_step(commands, differing):
    for ended in commands[differing].wait(120):
        assert ended.code == 2
        assert f"processes have different contents of {DIFFERING[differing]}" in ended.output
        assert "step" not in ended.output.partition("jvarlen:")[0]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("how", LOST)
def test_when_a_process_is_lost_the_other_names_it_and_ends_with_2(commands, how):
    running, victim = commands[how], 0 if how == "stopped 0" else 1
    deadline = time.monotonic() + 120
    while "struck at" not in running.output(victim):
        assert time.monotonic() < deadline, running.output(victim)
        time.sleep(0.05)
    survivor = running.processes[1 - victim]
    code, printed = survivor.wait(2 * HEARTBEAT_S + 20), running.output(1 - victim)
    assert code == 2, printed
    assert re.search(LOST[how], printed), printed
    assert "Check failure" not in printed
