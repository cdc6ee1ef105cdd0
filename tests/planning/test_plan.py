"""Plans are the same whatever runs them. Their content is tested in `parity/`, for both packages."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jvarlen import make_buckets, make_plan

PROGRAM = """
import numpy as np, jax, jvarlen
assert jax.device_count() == {num_devices}
lengths = np.random.default_rng(0).integers(1, 400, 5000)
buckets = jvarlen.make_buckets(lengths, 4096, max_shapes=6, num_microbatches=8)
print(jvarlen.make_plan(lengths, buckets, order="shuffle", num_microbatches=8, seed=3, epoch=2).digest)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_plan_does_not_depend_on_devices_or_processes():
    lengths = np.random.default_rng(0).integers(1, 400, 5000)
    buckets = make_buckets(lengths, 4096, max_shapes=6, num_microbatches=8)
    digests = {make_plan(lengths, buckets, order="shuffle", num_microbatches=8, seed=3, epoch=2).digest}
    for num_devices in (1, 8):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "PYTHONHASHSEED": str(num_devices),
        }
        program = PROGRAM.format(num_devices=num_devices)
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


def test_a_plan_is_shown_as_its_report():
    plan = make_plan([3, 5, 9, 100], max_tokens=128)
    assert repr(plan) == plan.report()


def test_a_plan_cannot_be_changed():
    plan = make_plan([3, 1, 2], [(2, 4)], packing="best_fit", order="length")
    for array in (plan.sample_ids, plan.step_bucket, plan.step_offsets, plan.num_tokens, plan.row_offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
