"""Measuring by a Dask cluster of processes, as its command lines start it, of which some are killed."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest

from jvarlen.data.measure import measure_lengths
from jvarlen.data.sample_ranges import MeasuredRange
from tests.logged_samples import LoggedSamples, measured_by, times_measured
from tests.processes import ROOT

distributed = pytest.importorskip("distributed")
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

NUM_SAMPLES = 2_000
NUM_RANGES = 4  # submitted at a time, to two workers
SHARD_SIZE = 100


class Cluster:
    """A scheduler, and workers of one thread each.

    They have no nanny, which would start them anew: a killed one stays away.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.processes: list[subprocess.Popen] = []
        self._file = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--port", "0", "--no-show", "--scheduler-file", str(self._file))
        self.workers: list[subprocess.Popen] = []
        for _ in range(2):
            self.start_worker()
        deadline = time.monotonic() + 60
        while not self._file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.client = distributed.Client(scheduler_file=str(self._file))
        self.client.wait_for_workers(2, timeout=60)

    def start_worker(self) -> None:
        options = ["--no-nanny", "--nthreads", "1", "--local-directory", str(self._folder)]
        self.workers.append(self._start("worker", "--scheduler-file", str(self._file), *options))

    def close(self) -> None:
        self.client.close(timeout=5)
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dask", *arguments, "--host", "127.0.0.1", "--no-dashboard"]
        with open(self._folder / f"{len(self.processes)}.log", "w") as log:
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    with contextlib.closing(Cluster(tmp_path / "cluster")) as cluster:
        yield cluster


class Watched(Executor):
    """An executor that tells which ranges came back measured."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.arrived: list[range] = []

    def submit(self, function: Callable, /, *args: object, **kwargs: object) -> Future:
        def note(future: Future) -> None:
            if not future.cancelled() and future.exception() is None and isinstance(future.result(), MeasuredRange):
                self.arrived.append(future.result().samples)

        future = self._executor.submit(function, *args, **kwargs)
        future.add_done_callback(note)
        return future


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """What `act` does in a thread while the block runs."""
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_of_a_killed_worker_nothing_is_lost_and_nothing_that_arrived_is_measured_again(cluster, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    executor = Watched(cluster.client.get_executor())
    victim = cluster.workers[0]
    arrived: set[int] = set()

    def kill_in_the_middle_of_a_range() -> None:
        def is_in_the_middle() -> bool:
            arrived.update(i for samples in executor.arrived for i in samples)
            own = measured_by(logs).get(victim.pid, [-1])
            return len(arrived) > NUM_SAMPLES // 4 and own[-1] not in arrived

        wait_until(is_in_the_middle)
        victim.kill()

    dataset = LoggedSamples(logs, NUM_SAMPLES, 0.002)
    with meanwhile(kill_in_the_middle_of_a_range):
        lengths = measure_lengths(dataset, executor=executor, num_workers=NUM_RANGES, progress=False)
    assert np.array_equal(lengths, np.arange(1, NUM_SAMPLES + 1))

    by_process, times = measured_by(logs), times_measured(logs)
    assert set(by_process) == {worker.pid for worker in cluster.workers}
    twice = {i for i, count in times.items() if count > 1}
    assert set(times) == set(range(NUM_SAMPLES))
    assert max(times.values()) <= 2
    assert not twice & arrived
    assert twice <= set(by_process[victim.pid])
    assert sum(not twice.isdisjoint(samples) for samples in executor.arrived) <= NUM_RANGES
    assert Counter(i for samples in executor.arrived for i in samples) == Counter(range(NUM_SAMPLES))


def test_a_dead_cluster_is_named_and_finished_shards_are_not_measured_again(cluster, tmp_path):
    logs, shards = tmp_path / "logs", tmp_path / "shards"
    logs.mkdir()
    dataset = LoggedSamples(logs, NUM_SAMPLES, 0.001)
    options = {"num_workers": NUM_RANGES, "progress": False, "shards": shards, "shard_size": SHARD_SIZE}

    def finished() -> list[int]:
        return [int(path.stem) * SHARD_SIZE + i for path in shards.glob("*.npy") for i in range(SHARD_SIZE)]

    def killed_midway(processes: list[subprocess.Popen], **more: float) -> str:
        enough = len(finished()) + NUM_SAMPLES // 4

        def kill() -> None:
            wait_until(lambda: len(finished()) > enough)
            for process in processes:
                process.kill()

        executor = cluster.client.get_executor()
        begun = time.monotonic()
        with meanwhile(kill), pytest.raises(RuntimeError) as told:
            measure_lengths(dataset, executor=executor, **more, **options)
        assert time.monotonic() - begun < 30
        return str(told.value)

    told = killed_midway(cluster.workers, executor_timeout_s=3)
    assert re.match(
        r"ClientExecutor failed: TimeoutError\(.*s=3'\); it had samples \d+ to \d+.* samples are left", told
    )
    cluster.start_worker()
    cluster.client.wait_for_workers(1, timeout=60)
    times = times_measured(logs)
    finished_first = finished()
    told = killed_midway([cluster.scheduler])
    assert re.match(r"ClientExecutor failed: CancelledError\(.*\); it had samples \d+ to \d+.* samples are left", told)

    times_since = times_measured(logs) - times
    assert times_since
    assert times_since.keys().isdisjoint(finished_first)
    cluster.workers[-1].wait(60)  # ends without a scheduler; it may have measured until then
    times, finished_since = times_measured(logs), finished()
    assert measure_lengths(dataset, **options).tolist() == list(range(1, NUM_SAMPLES + 1))
    times_since = times_measured(logs) - times
    assert times_since == Counter(set(range(NUM_SAMPLES)).difference(finished_since))
