"""Profiling: seconds fall to the step they belong to, and a trace holds the steps asked for."""

import dataclasses
import gzip
import json
import mmap
import re
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.runs import steps
from jvarlen.runs.steps import StepMeter, StepProfiler, host_memory_bytes
from jvarlen.training.checkpoint import Place

FIRST = Place(num_steps_done=0, epoch=0, step=0, plan_digest="")


def test_times_of_steps_add_up_and_waits_lie_within_them(monkeypatch):
    now = 0.0
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now)

    def batches():
        nonlocal now
        for wait_s in (1.0, 2.0, 4.0):
            now += wait_s
            yield wait_s

    meter, rows = StepMeter(FIRST, batches()), []
    for step in range(3):
        meter.next_batch()
        now += 0.25  # the dispatch
        if step:
            rows.append(meter.end_step())
    now += 8.0
    rows.append(meter.end_step())
    assert [row["step_s"] for row in rows] == [0.25 + 2 + 0.25, 4 + 0.25, 8], "the first batch is no step's"
    assert [row["data_wait_s"] for row in rows] == [2, 4, 0]
    now += 100.0
    meter.skip()
    now += 0.5
    assert meter.end_step()["step_s"] == 0.5
    assert {row["stall_s"] for row in rows} == {0}


def test_a_step_that_its_dispatch_computes_keeps_its_own_seconds(monkeypatch):
    """Where the step before is over when the next one is dispatched, its metrics are read after that one's time."""
    now = 0.0
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now)
    meter, rows, running = StepMeter(FIRST, iter("abc")), [], None
    for seconds in (1.0, 2.0, 4.0):
        meter.next_batch()
        meter.before_step(running)
        now += seconds
        if running is not None:
            rows.append(meter.end_step())
        running = ({}, jax.block_until_ready(jnp.zeros(())))
    rows.append(meter.end_step())
    assert [row["step_s"] for row in rows] == [1, 2, 4]


def test_waits_for_the_compiler_and_checkpoints_are_no_time_of_a_step(monkeypatch):
    now = 0.0
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now)
    meter = StepMeter(dataclasses.replace(FIRST, train_s=50.0, stall_s=7.0), iter("abc"))
    meter.next_batch()
    with meter.stalled():
        now += 13.0
    now += 0.25
    first = meter.end_step()
    meter.next_batch()
    now += 0.25
    second = meter.end_step()
    assert [(row["step_s"], row["stall_s"], row["time_s"]) for row in (first, second)] == [
        (0.25, 13, 63.25),
        (0.25, 0, 63.5),
    ]
    meter._batches = types.SimpleNamespace(num_without_target=0)
    place = meter.measured(FIRST)
    assert (place.train_s, place.stall_s) == (63.5, 20)


def test_memory_is_the_most_that_was_held():
    def kernel_says(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

    # Pages of its own: an array of NumPy may come to lie where memory was freed and never given back.
    with mmap.mmap(-1, kernel_says("VmHWM") - kernel_says("VmRSS") + (128 << 20)) as block:
        block.write(b"x" * len(block))
    assert kernel_says("VmRSS") + (64 << 20) < kernel_says("VmHWM")
    assert abs(host_memory_bytes() - kernel_says("VmHWM")) < 16 << 20
    meter = StepMeter(FIRST, iter("a"))
    meter.next_batch()
    figures = meter.end_step()
    assert abs(figures["host_memory_bytes"] - host_memory_bytes()) < 64 << 20
    assert figures["device_memory_bytes"] is None or figures["device_memory_bytes"] > 0


def test_a_step_is_metered_in_microseconds():
    meter = StepMeter(FIRST, iter(range(10_000)))
    fastest = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            meter.next_batch()
            meter.end_step()
        fastest = min(fastest, (time.perf_counter() - start) / 20)
    assert fastest < 100e-6  # a tenth of a millisecond on the slowest machine; 13 µs as measured


def trained(profiler, num_steps, stop_at=None):
    """A state through so many steps of two buckets in turn."""
    step = jax.jit(lambda state: state + 1)
    state = step(jnp.zeros(4))
    with no_recompiles(), profiler:
        for number in range(num_steps):
            if number == stop_at:
                raise InterruptedError
            with profiler.step("12×344" if number % 2 else "3×8", number, state):
                state = step(state)
    return state


def traced(directory):
    """Names and numbers of the annotated steps, in the order of time."""
    (path,) = directory.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("train ")]
    steps.sort(key=lambda event: event["ts"])
    return [(event["name"], int(event["args"]["step_num"])) for event in steps]


# One process of tests must not have two traces at once; each of these starts and ends its own.
@pytest.mark.parametrize(
    ("num_training", "num_traced", "start_after", "numbers"),
    [(8, 3, 4, [4, 5, 6]), (4, 3, 10, [1, 2, 3]), (2, 9, 10, [0, 1])],
    ids=["steady", "short", "shorter than the trace"],
)
def test_the_trace_holds_the_steps_by_the_names_of_their_buckets(
    tmp_path, num_training, num_traced, start_after, numbers
):
    profiler = StepProfiler(tmp_path, num_traced, steps_left=num_training, start_after=start_after)
    assert trained(profiler, num_training)[0] == num_training + 1
    assert traced(tmp_path) == [(("train 3×8", "train 12×344")[number % 2], number) for number in numbers]


def test_the_trace_is_written_while_training_goes_on(tmp_path):
    with StepProfiler(tmp_path, 1, steps_left=9, start_after=0) as profiler:
        for number in range(2):
            assert not list(tmp_path.iterdir())
            with profiler.step("3×8", number, jnp.zeros(4)):
                pass
        assert traced(tmp_path) == [("train 3×8", 0)]


def test_a_trace_that_is_cut_short_is_written(tmp_path):
    with pytest.raises(InterruptedError):
        trained(StepProfiler(tmp_path, 9, steps_left=20, start_after=2), 20, stop_at=4)
    assert [number for _, number in traced(tmp_path)] == [2, 3]


def test_no_trace_leaves_nothing(tmp_path):
    profiler = StepProfiler(tmp_path / "trace", 0, steps_left=5, start_after=0)
    trained(profiler, 5)
    assert not (tmp_path / "trace").exists()
    assert profiler.step("3×8", 0, None) is not None
