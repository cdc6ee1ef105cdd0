"""What a bill says is what goes over the loopback of a network namespace."""

import importlib
import itertools
from pathlib import Path

import pytest

from tests.processes import COMPILE_FAST

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def zero_jax(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("support.zero_jax")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_processes", "microbatches"), [(2, (1, 2)), (4, (2,))])
def test_processes_send_what_the_bill_says(zero_jax, monkeypatch, num_processes, microbatches):
    if not zero_jax.can_count():
        pytest.skip("no network namespace: needs root, unshare and ip")
    monkeypatch.setenv("XLA_FLAGS", COMPILE_FAST)
    cases = [zero_jax.Case(*case) for case in itertools.product(range(4), microbatches)]
    # Layers of 4 MiB; in smaller messages, gloo's own bytes are more than what is compared.
    sizes = zero_jax.Sizes(num_layers=2, width=1024, rows=1)
    found = zero_jax.in_namespace(sizes, cases, num_processes, num_counted=1)
    assert len(found) == len(cases)
    for case, sent in zip(cases, found, strict=True):
        assert sent["counted"] == pytest.approx(sent["by gloo"], rel=0.01), case
        # What a ring sends, but for reduce-scatters of 4 processes: gloo's send a sixth more.
        assert sent["billed"] <= sent["by gloo"] < 7 / 6 * sent["billed"], case
        assert (sent["by gloo"] == sent["billed"]) == (num_processes == 2 or case.zero == 0), case
