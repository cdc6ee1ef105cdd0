"""The step clock: each step's own seconds, nothing waits, nothing is held, and the process still ends cleanly."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from jvarlen.compiling.step_clock import StepClock


@pytest.fixture(scope="module")
def busy():
    """A step that is dispatched at once and keeps the device for some tens of milliseconds."""
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), x))
    return step.lower(jnp.ones((256, 256))).compile()


def run(clock, step, keys, pause=0.0):
    """Seconds that dispatching the steps took, and that all of them took."""
    x = jax.block_until_ready(jnp.ones((256, 256)))
    start = time.perf_counter()
    for key in keys:
        time.sleep(pause)
        started = time.perf_counter()
        x = step(x)
        clock.step(key, started, {"x": x, "not an array": 3})
    dispatched = time.perf_counter()
    clock.median_seconds()
    return dispatched - start, time.perf_counter() - start


def test_steps_that_queue_up_are_each_given_their_own_seconds(busy):
    clock = StepClock()
    dispatch_s, total_s = run(clock, busy, range(6))
    seconds = clock.median_seconds()
    assert list(seconds) == list(range(6))
    assert 0.7 * total_s < sum(seconds.values()) <= total_s  # from dispatch on they would add up to 3.5 times as much
    assert dispatch_s < 0.7 * total_s


def test_the_time_before_the_dispatch_is_not_the_steps(busy):
    clock = StepClock()
    _, total_s = run(clock, busy, range(4), pause=0.2)
    assert 0 < sum(clock.median_seconds().values()) <= total_s - 0.2  # the first pause; others, the step may outlast


def num_steps_of(clock):
    return {key: len(seconds) for key, seconds in clock._seconds.items()}


def test_an_output_is_let_go_once_it_is_ready(busy):
    clock = StepClock()
    x = busy(jnp.ones((256, 256)))
    clock.step("key", time.perf_counter(), x)
    held = weakref.ref(x)
    del x
    clock.median_seconds()
    assert held() is None


def test_a_failed_step_is_left_out_and_the_next_one_is_not():
    failed = jnp.ones(3)
    failed.delete()
    clock = StepClock()
    for key, output in (("failed", failed), ("good", jnp.ones(3))):
        clock.step(key, time.perf_counter(), output)
    assert clock.median_seconds().keys() == {"good"}
    assert num_steps_of(clock) == {"good": 1}


def clocks():
    return {thread for thread in threading.enumerate() if thread.name.startswith("step clock")}


def test_a_clock_that_no_one_refers_to_ends():
    before = clocks()
    clock = StepClock()
    clock.step("key", time.perf_counter(), jnp.ones(3))
    (thread,) = clocks() - before
    del clock
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_that_ends_amid_steps_ends_well():
    program = """
import time, jax, jax.numpy as jnp
from jvarlen.compiling.step_clock import StepClock
step = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ y), x))
x = jax.block_until_ready(step(jnp.ones((256, 256))))
clock = StepClock()
for _ in range(20):
    started = time.perf_counter()
    x = step(x)
    clock.step("key", started, x)
print("ends")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
