"""Memory of steps on a CPU."""

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import jax, jax.numpy as jnp
from jvarlen.distributed.launch import keep_memory_of_steps
if sys.argv[1] == "kept":
    keep_memory_of_steps()
x = jnp.ones((64, 3000))
step = jax.jit(lambda x: jnp.sum(jnp.sin(x.T @ x) @ jnp.cos(x.T)))  # with a product of 36 MB
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(5):
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(min(later - earlier for earlier, later in zip(faults, faults[1:])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="for glibc")
def test_a_step_finds_its_memory_from_the_step_before():
    # One device, and programs as users compile them.
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["NPROC"] = "16"  # threads of XLA, each with memory of its own

    def faults(how):
        command = [sys.executable, "-c", STEPS, how]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 0.1 * faults("not kept")
