"""Batching: the kernels do the same compiled and as plain Python."""

import subprocess
import sys

import numpy as np
import pytest

from jvarlen import batch_by_tokens
from jvarlen.planning import _kernels as kernels

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("is_padded", [True, False])
def test_compiled_kernels_do_what_their_python_does(multiple, is_padded):
    pytest.importorskip("numba")
    for kernel, arguments in (
        (kernels.close_by_budget, (LENGTHS, 200, 7, multiple, is_padded)),
        (kernels.close_by_capacity, (1 + LENGTHS % 5,)),
    ):
        assert kernel.compiled(*arguments).tolist() == kernel.py_func(*arguments).tolist()


@pytest.mark.slow
def test_batching_does_without_numba():
    program = """
import sys
sys.modules["numba"] = None
import numpy as np, jvarlen
lengths = np.random.default_rng(0).integers(1, 60, 70_000)  # more than run without it in any case
print(jvarlen.batch_by_tokens(lengths, 200, sequence_multiple=4).offsets.tolist())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lengths = np.random.default_rng(0).integers(1, 60, 70_000)
    assert run.stdout.strip() == str(batch_by_tokens(lengths, 200, sequence_multiple=4).offsets.tolist())
