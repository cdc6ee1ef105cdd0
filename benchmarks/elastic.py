"""How long after a process is killed does training go on with those that survive?

Four processes train in float64. One of them, never process 0, is killed over and over: at a random moment, while the
others wait for it in an all-reduce, and while a checkpoint is written. It comes back after each time. In the end the
losses of all steps are those of one process that nobody killed, to 1e-12, or it is an error. Run
`python benchmarks/elastic.py [--quick]`. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from support.timing import EMIT_FAST, digits, report, table, versions_and_hardware

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.batches import next_token_targets
from jvarlen.data.split import Split
from jvarlen.data.tokens import TokenDataset
from jvarlen.experimental.elastic import Start, keep_training, surviving_layout
from jvarlen.parallel import Layout
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, HardwareConfig, PlanConfig

NUM_PROCESSES, MICROBATCHES = 2 if "--quick" in sys.argv else 4, 8
NUM_SURVIVORS = NUM_PROCESSES // 2  # how many of the others divide the microbatches
MOMENTS = ("at random", "in an all-reduce", "in a checkpoint")
NUM_KILLS = 10
READ_S = 0.001  # of a sample: steps of some hundredths of a second
LIMIT_S = 240.0  # for anything that is waited for
TOLERANCE = 1e-12


class Slow:
    """Samples that take a while to read."""

    def __init__(self, dataset: TokenDataset):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> object:
        time.sleep(READ_S)
        return self._dataset[index]


def train(folder: Path, num_steps: int, start: Start | None) -> int:
    """Trains a table of which byte follows which, in float64."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    samples = [rng.integers(32, 127, length, np.uint8).tobytes() for length in rng.integers(1, 33, 300)]
    where = {} if start is None else start._asdict()
    where.pop("is_again", None)
    config = FitConfig(
        hardware=HardwareConfig(**where),
        directory=DirectoryConfig(run_dir=folder),
        max_steps=num_steps,
        num_epochs=num_steps,
        checkpoints=CheckpointConfig(checkpoint_every=10),
        progress=False,
        plan=PlanConfig(max_tokens=64, max_shapes=1, max_length=32, num_microbatches=MICROBATCHES, packing="padded"),
        compile=CompileOptions(cache_dir=folder.parent / "compiled"),
    )

    def loss_fn(params, microbatch):
        inputs, targets, weights = next_token_targets(microbatch)
        losses = optax.softmax_cross_entropy_with_integer_labels(params[inputs], targets)
        return (losses * weights).sum(), weights.sum()

    result = fit(
        config,
        Split(train=Slow(TokenDataset.from_bytes(samples[:280])), held_out=TokenDataset.from_bytes(samples[280:])),
        loss_fn=loss_fn,
        params=np.zeros((128, 128)),
        optimizer=optax.adam(0.01),
    )
    return 143 if result.summary.interrupted else 0


def supervise(folder: Path) -> int:
    """Trains until it is stopped."""
    layout = Layout(data=NUM_PROCESSES)
    return keep_training(
        lambda start: train(folder, 100_000, start),
        NUM_PROCESSES,
        progress=lambda: checkpoints(folder),
        survivors=lambda alive: surviving_layout(layout, alive, MICROBATCHES).data,
    )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*"))


def losses_of(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    if [row["step"] for row in rows] != list(range(len(rows))):
        raise ValueError(f"steps are missing or come twice: {[row['step'] for row in rows]}")
    return [row["loss"] for row in rows]


class Training:
    """The supervised training as its killer sees it."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]):
        self._folder, self._process = folder, process

    def workers(self) -> list[int]:
        """The processes that train, process 0 first."""
        pid = self._process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))  # as they were started

    def log_bytes(self) -> int:
        """The size of the log; it is cut when the run is resumed."""
        log = self._folder / "metrics.jsonl"
        return log.stat().st_size if log.exists() else 0

    def has_part(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self._folder / "checkpoints").glob(".*.part"))

    def wait_for(self, condition: Callable[[], bool], interval_s: float = 0.01) -> None:
        """Waits until a condition holds; raises if the training ends before, or if it never does."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self._process.poll() is not None:
                raise RuntimeError(f"the training has ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came within {LIMIT_S} s")
            time.sleep(interval_s)

    def wait_for_steps(self, others: list[int], num_workers: int) -> None:
        """Waits until this many new processes have taken a step."""
        self.wait_for(lambda: len(self.workers()) == num_workers and not {*self.workers()} & {*others})
        before = self.log_bytes()

        def has_grown() -> bool:
            nonlocal before
            last, before = before, min(before, self.log_bytes())  # a resumed run cuts it first
            return self.log_bytes() > last

        self.wait_for(has_grown)

    def kill(self, moment: str, rng: random.Random) -> tuple[str, float]:
        """Kills a process at a moment; what it has struck, and the seconds until the survivors have gone on."""
        workers = self.workers()
        victim = rng.choice(workers[1:])
        time.sleep(rng.random())
        if moment == "in an all-reduce":  # the others come to it and wait
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.5)
        elif moment == "in a checkpoint":
            self.wait_for(self.has_part, 0.0005)
        os.kill(victim, signal.SIGKILL)
        begun = time.monotonic()
        if moment == "in a checkpoint" and not self.has_part():
            moment = "just after a checkpoint"
        self.wait_for_steps(workers, NUM_SURVIVORS)
        return moment, time.monotonic() - begun

    def take_back(self) -> float:
        """Says that the lost process has returned; the seconds until all train."""
        workers, begun = self.workers(), time.monotonic()
        self._process.send_signal(signal.SIGUSR1)
        self.wait_for_steps(workers, NUM_PROCESSES)
        return time.monotonic() - begun


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[Training]:
    """A block in which the training runs; after it, it has ended with all saved."""
    with (folder.parent / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--supervise", str(folder)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": EMIT_FAST},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Training(folder, process)
            process.send_signal(signal.SIGTERM)
            if process.wait(LIMIT_S) != 143:
                raise RuntimeError(f"the training has ended with {process.returncode} after SIGTERM")
        except BaseException:
            process.kill()
            print((folder.parent / "output").read_text(), file=sys.stderr)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two processes, each moment once, and no report")
    parser.add_argument("--supervise", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.supervise:
        sys.exit(supervise(options.supervise))
    num_kills = len(MOMENTS) if options.quick else NUM_KILLS
    rng, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        with supervised(folder) as training:
            training.wait_for_steps([], NUM_PROCESSES)
            for number in range(num_kills):
                moment, seconds = training.kill(MOMENTS[number % len(MOMENTS)], rng)
                back = digits(training.take_back()) if number + 1 < num_kills else "–"
                rows.append([str(number + 1), moment, digits(seconds), back])
        losses = losses_of(folder)
        alone = Path(name) / "alone"
        jax.config.update("jax_platforms", "cpu")
        with contextlib.redirect_stdout(None):
            train(alone, len(losses), None)
        differences = np.abs(np.array(losses) / losses_of(alone) - 1)
        if not differences.max() <= TOLERANCE:
            raise ValueError(
                f"losses differ by {differences.max()}, first at step {np.argmax(differences > TOLERANCE)}"
            )
    lines = [
        f"# Elastic training, {datetime.date.today()}",
        "",
        f"One of {NUM_PROCESSES} processes that train with M = {MICROBATCHES} is killed, and training continues on "
        f"{NUM_SURVIVORS}. Seconds from the kill to the first logged step, with all that comes in between: new "
        "processes, meeting, planning, restoring, compiling. Then, to the first step of all processes again: saving "
        "and the same.",
        "",
        *table("kill|moment|seconds to go on|seconds to take back", rows),
        "",
        f"The {len(losses):,} losses differ by at most {differences.max():.1e}, relatively, from those of one process.",
        "",
        versions_and_hardware("jax", "jaxlib"),
    ]
    report("elastic", lines, write=not options.quick)


if __name__ == "__main__":
    main()
