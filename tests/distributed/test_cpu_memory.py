"""Memory of steps on a CPU."""

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import jax, jax.numpy as jnp
from jvarlen.distributed.cpu_memory import keep_memory_of_steps
if sys.argv[1] == "kept":
    keep_memory_of_steps()
x = jnp.ones((3000, 3000))
step = jax.jit(lambda x: jnp.sum(jnp.sin(x @ x) @ jnp.cos(x)))  # of products, 36 MB each
for _ in range(3):
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="for glibc")
def test_a_step_finds_its_memory_from_the_step_before():
    # One device, and programs as users compile them.
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}

    def faults(how):
        command = [sys.executable, "-c", STEPS, how]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 0.1 * faults("not kept")
