"""Seconds of compiling in several threads: of the wall once, of the CPU all."""

import threading
import time

import numpy as np
import pytest

from jvarlen import CompileOptions, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.compiling import clock as module
from jvarlen.compiling.clock import CompileClock


def test_blocks_at_once_count_once(monkeypatch):
    now, cpu = 0.0, 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module.time, "process_time", lambda: cpu)
    clock = CompileClock()
    with clock:
        now, cpu = 1.0, 2.0
        with clock:  # as another thread
            now, cpu = 3.0, 5.0
        assert clock.seconds == (0, 0)
        now, cpu = 4.0, 6.0
    now, cpu = 10.0, 10.0
    with pytest.raises(KeyError), clock:
        raise KeyError(now := 10.5)
    assert clock.seconds == (4.5, 6.0)


def test_threads_that_wait_side_by_side_count_once():
    clock, barrier, inside_s = CompileClock(), threading.Barrier(4), []

    def wait():
        start = time.perf_counter()
        with clock:
            barrier.wait()  # now all are inside
            time.sleep(0.05)
            barrier.wait()
        inside_s.append(time.perf_counter() - start)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s, _ = clock.seconds
    assert 0.05 <= wall_s <= sum(inside_s) - 3 * 0.05


@pytest.mark.parametrize("when", ["ahead", "background"])
def test_a_step_knows_the_seconds_of_its_own_programs(when):
    def count(state, batch):
        return state + batch.num_sequences, {}

    before = module.COMPILING.seconds
    start = time.perf_counter()
    options = CompileOptions(cache_dir=None, when=when, num_threads=2)
    shapes = BatchShapes([(2, 4), (1, 8), (1, 16)])
    report = compile_buckets(count, np.float32(0), shapes, options=options, progress=False).report
    assert 0 < report.wall_s < time.perf_counter() - start
    assert report.cpu_s > 0
    whole = [now - then for now, then in zip(module.COMPILING.seconds, before, strict=True)]
    assert whole == pytest.approx([report.wall_s, report.cpu_s], rel=0.2, abs=0.05)
    compile_buckets(count, np.float32(0), BatchShapes([(3, 4)]), options=options, progress=False).wait()
    assert module.COMPILING.seconds[0] - before[0] > whole[0], "of all steps"
