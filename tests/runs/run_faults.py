"""A script that runs `fit` undisturbed, and again while it is killed over and over. Argument: a folder.

Every run is a fork of this program, which has imported everything and touched no device. It reports its progress
through a pipe; this process kills it at a given point, and the next run resumes from what it left. What was struck is
printed as JSON.
"""

import dataclasses
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import CompileOptions, FitConfig
from jvarlen.runs.config import CheckpointConfig, DataConfig, DirectoryConfig, PlanConfig
from jvarlen.runs.directory import Trackers
from jvarlen.training.checkpoint import Checkpoints
from tests.support.run_fit import Wrapped, leave_pictures_empty, make_data
from tests.support.settings import changed

NUM_STEPS = 80  # more than eight runs take that are all killed
MOMENTS = ("scan", "compile", "step", "checkpoint")
KILLS_OF_EACH = 2
ATTEMPTS = 3
# Seconds that a moment lasts at the least, within which it is struck at random.
GAPS = 5, 77, 121  # samples that cannot be read any more when steps need them
READ_S = 0.0005  # of one sample: a scan reads 130, a step some 8
COMPILE_S = 0.15
WRITE_S = 0.03

fit_module, open_module = map(importlib.import_module, ("jvarlen.runs.fit", "jvarlen.runs.open_run"))


def loss_fn(params, microbatch):
    """Learns how often each token comes: it compiles soon, and its checkpoint has some files."""
    losses = -jax.nn.log_softmax(sum(params.values()))[microbatch.tokens]
    return jnp.sum(losses * microbatch.weights), jnp.sum(microbatch.weights)


class Reporting(Wrapped):
    """It does not know its lengths, and says which sample is read while they are scanned."""

    def __init__(self, dataset, report):
        super().__init__(dataset)
        self._report, self._num_reads = report, 0

    def on_read(self, index):
        self._num_reads += 1
        if self._num_reads <= len(self):
            self._report("scan", self._num_reads)
        elif index in GAPS:
            raise OSError(f"sample {index} is gone")
        time.sleep(READ_S)


def report_moments(report):
    """Makes this process say when it compiles, when it saves what was not saved, and when a step is in the log."""
    compile_buckets, save, write = open_module.compile_buckets, Checkpoints.save, Trackers.log
    saved = set()

    def reporting_compile(*args, **options):
        report("compile", 0)
        compiled = compile_buckets(*args, **options)
        report("compiled", 0)
        return compiled

    def reporting_save(self, state, place, *args, **options):
        if saved or not self.steps:  # else it is the one that was restored
            report("checkpoint", place.num_steps_done)
        saved.add(place.num_steps_done)
        return save(self, state, place, *args, **options)

    def reporting_write(self, record):
        write(self, record)
        if "loss" in record:
            report("step", record["step"])

    open_module.compile_buckets = reporting_compile
    Checkpoints.save = reporting_save
    Trackers.log = reporting_write


def train(config, out, descriptor):
    """A run to its end: the last state goes to `<out>.npz`, the summary to `<out>.json`."""

    def report(moment, where):
        os.write(descriptor, f"{moment} {where}\n".encode())

    report_moments(report)
    data = make_data()
    params = {f"table {i}": np.zeros(256, np.float32) for i in range(12)}
    result = fit_module.fit(config, data._replace(train=Reporting(data.train, report)), loss_fn=loss_fn, params=params)
    leaves = jax.tree.leaves_with_path(result.state)
    np.savez(out.with_suffix(".npz"), **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
    out.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(result.summary)))


class Run:
    """A fork of this process that trains, and what it has said; what it prints goes to `<out>.log`."""

    def __init__(self, config, out):
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(reading)
                log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                os.dup2(log, 1)
                os.dup2(log, 2)
                train(config, out, writing)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writing)
        self._said = os.fdopen(reading)

    def wait_for(self, moment, count):
        """Where it is when it has said `moment` so many times; None where it ended before."""
        for line in self._said:
            name, where = line.split()
            count -= name == moment
            if not count:
                return int(where)
        return None

    def kill(self):
        """What else it said, and how it ended: by an exit code, or by a signal, which is negative."""
        os.kill(self._pid, signal.SIGKILL)
        return self.end()

    def end(self):
        """The same, when it has ended by itself."""
        with self._said:
            said = {line.split()[0] for line in self._said}
        return said, os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def directory_of(runs_dir):
    """The one run in it; None where there is none."""
    found = list(runs_dir.glob("[0-9]*"))  # the link `latest` comes and goes
    assert len(found) <= 1, found
    return found[0] if found else None


def is_being_written(run_dir, step):
    """Whether the checkpoint of a step has begun and has not been given its name."""
    checkpoints = run_dir / "checkpoints"
    begun = any(any(checkpoints.glob(name)) for name in (f".{step}.part", f"{step}.*tmp*"))
    return begun and not (checkpoints / str(step)).exists()


def strike(run, moment, runs_dir, chance):
    """Kills a run at a random place of a moment: where that was, whether it was still at it, and how the run ended."""
    if moment == "scan":
        where = run.wait_for(moment, chance.randint(1, 125))
        time.sleep(chance.uniform(0, READ_S))
    elif moment == "compile":
        where = run.wait_for(moment, 1)
        time.sleep(chance.uniform(0, COMPILE_S))
    elif moment == "step":
        where = run.wait_for(moment, chance.randint(1, 8))
        time.sleep(chance.uniform(0, 8 * READ_S))
    else:
        where = run.wait_for(moment, chance.randint(1, 3))
        deadline = time.monotonic() + 5
        while where is not None and not is_being_written(directory_of(runs_dir), where) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, WRITE_S))
    said_later, code = run.kill()
    was_at_it = {
        "scan": lambda: said_later <= {"scan"},
        "compile": lambda: not said_later,
        "step": lambda: said_later <= {"step", "checkpoint"},
        "checkpoint": lambda: is_being_written(directory_of(runs_dir), where),
    }
    return {"moment": moment, "where": where, "struck": where is not None and was_at_it[moment](), "code": code}


def main():
    folder = Path(sys.argv[1])
    leave_pictures_empty()
    jax.config.update("jax_enable_compilation_cache", True)
    cache_dir, killed_dir = folder / "compiled", folder / "killed"
    config = FitConfig(
        max_steps=NUM_STEPS,
        num_epochs=NUM_STEPS,
        checkpoints=CheckpointConfig(checkpoint_every=4),
        directory=DirectoryConfig(runs_dir=folder / "whole"),
        compile=CompileOptions(cache_dir=cache_dir),
        progress=False,
        data=DataConfig(on_bad_sample="skip", max_bad_fraction=0.05),
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, num_microbatches=2, packing="padded"),
    )

    def start(runs_dir):
        resumed = changed(config, runs_dir=runs_dir, resume=directory_of(runs_dir))
        return Run(resumed, folder / runs_dir.name)

    def finish(runs_dir):
        _, code = start(runs_dir).end()
        assert code == 0, runs_dir.with_suffix(".log").read_text()

    finish(config.directory.runs_dir)
    chance = random.Random(0)
    # One before there is a directory, and one before there is a checkpoint; then the others in any order.
    first, later = ["scan", "compile"], list(MOMENTS) * KILLS_OF_EACH
    for moment in first:
        later.remove(moment)
    chance.shuffle(later)
    for number, moment in enumerate(first + later):
        if moment == "compile":
            shutil.rmtree(cache_dir, ignore_errors=True)  # the next ones find what this one leaves there half-written
        for attempt in range(ATTEMPTS):
            found = directory_of(killed_dir)
            kill = strike(start(killed_dir), moment, killed_dir, chance)
            log = killed_dir.with_suffix(".log").read_text()
            assert kill["code"] == -signal.SIGKILL, f"{kill}: {log}"
            print(json.dumps(kill | {"number": number, "attempt": attempt, "resumed": found is not None}), flush=True)
            if kill["struck"]:
                break
    finish(killed_dir)


if __name__ == "__main__":
    main()
