"""`fit` on small data: it compiles nothing late, and resumes with the same numbers."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time

import jax
import pytest

from jvarlen import CompileOptions, FitConfig, Plan, fit, no_recompiles
from jvarlen.models import DecoderConfig
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs import loop as run_loop
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, OptimizerConfig, PlanConfig
from jvarlen.runs.saved_config import load_config
from tests.conftest import random_dataset
from tests.support.forks import Fork
from tests.support.processes import ROOT
from tests.support.run_fit import Interrupting, make_data
from tests.support.settings import changed

pytestmark = pytest.mark.slow


def make_config(runs_dir, compilation_cache):
    return FitConfig(
        max_steps=25,
        num_epochs=2,
        checkpoints=CheckpointConfig(checkpoint_every=4),
        directory=DirectoryConfig(runs_dir=runs_dir),
        compile=CompileOptions(cache_dir=compilation_cache),
        progress=False,
        plan=PlanConfig(
            max_tokens=128, max_shapes=2, max_length=32, overlong="truncate", num_microbatches=2, packing="padded"
        ),
        decoder=DecoderConfig(num_layers=1, width=16, num_heads=1),
    )


@pytest.fixture
def config(tmp_path, compilation_cache):
    return make_config(tmp_path / "runs", compilation_cache)


@pytest.fixture
def of_one_shape(config):
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, max_shapes=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compilation_cache, split):
    """A run to its end, to compare others with; what a test changes is a copy of it."""
    return fit(make_config(tmp_path_factory.mktemp("whole"), compilation_cache), split)


def test_another_seed_and_rate_compile_nothing(whole, config, split):
    """Nor another number of steps: all of them are data of the programs."""
    rates = OptimizerConfig(learning_rate=0.01, warmup_fraction=0.3, schedule_unit="tokens", base_batch_size=4)
    with no_recompiles("count") as count:
        run = fit(dataclasses.replace(config, seed=5, max_steps=11, optimizer=rates), split)
    assert run.summary.num_steps == 11
    assert run.summary.num_cache_hits == 4, "two shapes, to train and to evaluate"
    assert [each.function for each in count.recompilations if not each.cache_hit] == []


def step_records(run_dir):
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]


def same_training(one, other):
    """The same steps with the same losses, to the last bit; times are another matter."""
    of_time = {"time_s", "step_s", "data_wait_s", "stall_s", "host_memory_bytes", "device_memory_bytes"}
    without_time = [
        [{name: value for name, value in row.items() if name not in of_time} for row in step_records(run_dir)]
        for run_dir in (one.run_dir, other.run_dir)
    ]
    same_params = jax.tree.map(lambda a, b: bool((a == b).all()), one.state.params, other.state.params)
    return without_time[0] == without_time[1] and all(jax.tree.leaves(same_params))


def test_nothing_compiles_inside_the_guard_of_a_run(of_one_shape, split, compilations, monkeypatch):
    """Evaluations, checkpoints and the log included; there is nothing that the guard overlooks."""
    guard, guarded = run_loop.no_recompiles, []

    @contextlib.contextmanager
    def watched():
        before = len(compilations)
        with guard() as count:
            yield count
        guarded.extend(compilations[before:])

    monkeypatch.setattr(run_loop, "no_recompiles", watched)
    ahead = dataclasses.replace(of_one_shape.compile, when="ahead")
    config = dataclasses.replace(of_one_shape, max_steps=6, eval_every=2, compile=ahead)
    result = fit(config, split)
    assert result.summary.num_steps == 6
    assert compilations
    assert not guarded


def test_an_interrupted_run_resumes_with_exactly_the_steps_left(config, split, whole, capsys):
    # 150 reads are some 15 steps, of which at most 8 wait in the loader: some are done by then, and some are left.
    interrupted = fit(config, split._replace(train=Interrupting(split.train, after=len(split.train) + 150)))
    assert interrupted.summary.interrupted
    assert 0 < interrupted.summary.num_steps < 25
    assert interrupted.summary.held_out_after is None
    assert f"--resume {interrupted.run_dir}" in capsys.readouterr().out
    resumed = fit(changed(config, resume=interrupted.run_dir), split)
    assert resumed.run_dir.resolve() == interrupted.run_dir.resolve()
    assert same_training(whole, resumed)
    assert resumed.summary.held_out_before == whole.summary.held_out_before
    assert resumed.summary.held_out_after == whole.summary.held_out_after
    assert resumed.summary.num_tokens == whole.summary.num_tokens
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_packed_rows_and_rates_counted_in_samples_and_tokens_and_bfloat16_resume_as_well(config, split, whole):
    config = changed(
        config,
        num_epochs=6,
        plan=dataclasses.replace(config.plan, packing="best_fit"),
        optimizer=OptimizerConfig(schedule_unit="sequences", batch_size_unit="tokens", base_batch_size=100),
        decoder=dataclasses.replace(config.decoder, compute_dtype="bfloat16"),
    )
    result = fit(config, split)
    plan = Plan.load(result.run_dir / "plan.npz")
    assert plan.is_packed
    assert result.summary.num_steps == 25
    assert result.summary.compilations_after_first_step == 0
    records = step_records(result.run_dir)
    assert [row["num_sequences"] for row in records[: plan.num_steps]] == plan.num_sequences.tolist()
    assert sum(row["num_sequences"] for row in records[: plan.num_steps]) == len(split.train)
    assert result.summary.padding < 0.1 < whole.summary.padding
    for row in records:
        assert row["learning_rate_scale"] == pytest.approx((row["num_tokens"] / 100) ** 0.5, rel=1e-12)
        assert row["learning_rate"] == row["base_learning_rate"] * row["learning_rate_scale"]
    interrupting = split._replace(train=Interrupting(split.train, after=len(split.train) + 150))
    stopped = fit(changed(config, runs_dir=config.directory.runs_dir / "stopped"), interrupting)
    assert stopped.summary.interrupted
    assert 0 < stopped.summary.num_steps < 25
    resumed = fit(changed(load_config(stopped.run_dir / "config.json"), resume=stopped.run_dir), split)
    assert same_training(resumed, result)


def test_resuming_with_other_data_or_what_is_no_run_is_refused(config, split, whole, tmp_path):
    with pytest.raises(ValueError, match="the data differ"):
        fit(changed(config, resume=whole.run_dir), split._replace(train=random_dataset(90, 40)))
    for nothing in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(FileNotFoundError, match="no run to resume"):
            fit(changed(config, resume=nothing), split)


def test_the_built_in_corpus_is_cut_and_trained_on_for_some_steps_and_other_data_is_not(config, split, monkeypatch):
    config = dataclasses.replace(config, max_steps=1, plan=dataclasses.replace(config.plan, overlong=None))
    with pytest.raises(ValueError, match=r"samples longer than the longest bucket .*\(limit 32\)"):
        fit(config, split)
    monkeypatch.setattr("jvarlen.runs.data.stdlib_functions", lambda progress: split.train)
    monkeypatch.setattr(sys.modules["jvarlen.runs.settings"], "_DEMO_STEPS", 3)
    result = fit(dataclasses.replace(config, max_steps=None, num_epochs=None))
    assert result.summary.num_steps == 3, "those of the built-in corpus, and not an epoch"
    saved = load_config(result.run_dir / "config.json")
    assert (saved.plan.overlong, saved.max_steps) == ("truncate", 3)
    assert Plan.load(result.run_dir / "plan.npz").num_truncated > 0


# A run of the command line with the data of `run_fit`, in which Ctrl-C comes while the first bucket is compiled, or
# whose samples take long to read, so that a signal can come amid the steps.
SIGNALLED_PROGRAM = """
import dataclasses, importlib, os, signal, sys, time

class Slow:
    def __init__(self, dataset):
        self._dataset = dataset
    def __len__(self):
        return len(self._dataset)
    def __getitem__(self, index):
        time.sleep(0.003)
        return self._dataset[index]

def make_signalled_step(*args, **options):
    step = make_train_step(*args, **options)
    def signalled(*args):  # called where it is traced
        os.kill(os.getpid(), signal.SIGINT)
        return step(*args)
    return dataclasses.replace(step, function=signalled)

if __name__ == "__main__":
    from jvarlen.cli import main
    from jvarlen.runs.data import open_training_data
    from tests.support.run_fit import leave_pictures_empty, make_data

    leave_pictures_empty()
    os.setsid()  # a group of its own, whose processes are signalled together
    prepare, task = map(importlib.import_module, ("jvarlen.runs.prepare", "jvarlen.runs.task"))
    make_train_step, data = task.make_train_step, make_data()
    when, runs_dir, num_workers = sys.argv[1:]
    if when == "compiling":
        task.make_train_step = make_signalled_step
    else:
        data = data._replace(train=Slow(data.train))
    prepare.open_training_data = lambda config, given, model: open_training_data(config, data, model)
    sys.exit(main(
        ["train", "--runs-dir", runs_dir, "--num-workers", num_workers, "--max-steps", "40", "--num-epochs", "20",
         "--no-progress", "--compile.cache-dir", "None",
         "--max-tokens", "128", "--max-shapes", "1", "--max-length", "32",
         "--num-microbatches", "4", "--packing", "padded",
         "--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1"]
    ))
"""


class Signalled:
    """A fork that runs SIGNALLED_PROGRAM, and what it leaves in a folder."""

    def __init__(self, folder, when, num_workers):
        program, self.runs_dir = folder / "program.py", folder / "runs"
        program.write_text(SIGNALLED_PROGRAM)
        self._printed, self._errors = folder / "printed", folder / "errors"
        env = os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        with self._printed.open("w") as output, self._errors.open("w") as errors:
            self.process = Fork(program, [when, str(self.runs_dir), num_workers], env=env, output=output, errors=errors)

    def wait_for_steps(self):
        deadline = time.monotonic() + 120
        while not any(len(path.read_text().splitlines()) > 5 for path in self.runs_dir.glob("*/metrics.jsonl")):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def assert_saves_amid_the_steps(self, number, code):
        """Signals its whole group, with the process that loads."""
        os.killpg(self.process.pid, number)
        assert self.process.wait(60) == code, self.errors
        run_dir = self._printed.read_text().rstrip().splitlines()[-1]
        assert f"jvarlen train --resume {run_dir}" in self._printed.read_text()
        assert 5 < json.loads((self.latest / "summary.json").read_text())["num_steps"] < 40
        assert (self.latest / "curves.png").exists()

    @property
    def errors(self):
        return self._errors.read_text()

    @property
    def latest(self):
        return self.runs_dir / "latest"


@pytest.fixture
def signalled(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(when, num_workers):
            (folder := tmp_path / when).mkdir()
            run = Signalled(folder, when, num_workers)
            stack.callback(run.process.kill)
            return run

        yield start


@pytest.mark.multiprocess
def test_signals_end_a_run_with_their_own_exit_codes_and_resuming_changes_no_number(signalled, compilation_cache):
    """SIGTERM amid the steps to all processes, as from a scheduler; Ctrl-C amid compilation.

    The latter run has no checkpoint yet and begins anew; what the former's process loads is the same.
    """
    compiling, stepping = signalled("compiling", "0"), signalled("stepping", "1")
    stepping.wait_for_steps()
    resume_steps = changed(
        load_config(stepping.latest / "config.json"),
        resume=stepping.latest,
        num_workers=0,
        compile=CompileOptions(cache_dir=compilation_cache),
    )
    in_use = rf"in use by a run that has not ended \(process {stepping.process.pid} on \S+\)"
    with pytest.raises(ValueError, match=in_use):
        fit(resume_steps, make_data())
    stepping.assert_saves_amid_the_steps(signal.SIGTERM, 143)

    assert compiling.process.wait(60) == 130, compiling.errors
    assert compiling.errors.endswith("jvarlen: interrupted\n")
    (begun,) = compiling.runs_dir.iterdir()
    assert not any((begun / "checkpoints").iterdir())

    whole = fit(changed(resume_steps, runs_dir=compiling.runs_dir, resume=begun), make_data())
    resumed = fit(resume_steps, make_data())
    assert whole.summary.num_steps == resumed.summary.num_steps == 40
    assert same_training(whole, resumed)
