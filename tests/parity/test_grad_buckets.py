"""Gradient buckets are those of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributed

from jvarlen.distributed.grad_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, assign_grad_buckets

DTYPES = {np.dtype(name): getattr(torch, name) for name in ("float32", "float64", "float16")}
DTYPES[np.dtype(jnp.bfloat16)] = torch.bfloat16


@pytest.mark.parametrize("seed", range(50))
def test_buckets_are_those_of_torch(seed):
    """Sizes over six orders of magnitude, of one dtype or several; without memory behind them."""
    rng = np.random.default_rng(seed)
    dtypes = list(DTYPES)[: 1 + seed % len(DTYPES)]
    sizes = np.exp(rng.uniform(0, np.log(2e7), rng.integers(1, 80))).astype(int)
    params = [np.broadcast_to(np.zeros((), dtypes[rng.integers(len(dtypes))]), size) for size in sizes]
    backwards = [torch.empty(len(param), dtype=DTYPES[param.dtype], device="meta") for param in reversed(params)]
    buckets, _ = distributed._compute_bucket_assignment_by_size(backwards, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    expected = [tuple(len(params) - 1 - place for place in bucket) for bucket in buckets]
    # torch sorts buckets by the first gradient that they hold; here they come in the order in which they are full.
    found = sorted(assign_grad_buckets(params), key=lambda bucket: -bucket[0])
    assert found == expected
