"""What an estimate says is what goes over the loopback of a network namespace."""

import pytest

from tests.support.benchmark_modules import BENCHMARKS, imported
from tests.support.processes import COMPILE_FAST

namespace = imported("support.namespace")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_send_what_the_estimate_says(namespace):
    if not namespace.is_available():
        pytest.skip("no network namespace: needs root, unshare and ip")
    cases = [(level, 2) for level in range(4)]  # and microbatches a shard
    sizes = 2, 1024, 1  # two layers of 4 MiB, one row; of small messages, what gloo adds would be more than 1 %
    program = BENCHMARKS / "support" / "zero_jax.py"
    flags = f"--xla_force_host_platform_device_count=1 {COMPILE_FAST}"
    found = namespace.run(program, (sizes, cases, 1, 0), 2, XLA_FLAGS=flags, OMP_NUM_THREADS="1")
    assert len(found) == len(cases)
    for case, sent in zip(cases, found, strict=True):
        assert sent["counted"] == pytest.approx(sent["by gloo"], rel=0.01), case
        assert sent["by gloo"] == sent["estimated"], case
