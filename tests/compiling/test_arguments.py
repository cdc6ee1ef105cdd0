"""Batches that were not planned: their differing leaves are named."""

import jax
import numpy as np
import pytest

from jvarlen import Bucket
from jvarlen.batches import Batch, token_batch_spec
from jvarlen.compiling.compiled_buckets import _explain_unplanned, _explain_unplanned_state, _signature
from tests.support.meshes import batch_shardings, data_mesh

BUCKETS = [Bucket(4, 8), Bucket(2, 16), Bucket(2, 24)]
SPECS = {bucket: token_batch_spec(bucket, 2) for bucket in BUCKETS}


def make_batch(rows, length, num_microbatches=2):
    return jax.tree.map(
        lambda leaf: np.ones(leaf.shape, leaf.dtype), token_batch_spec(Bucket(rows, length), num_microbatches)
    )


def test_a_planned_batch_has_the_signature_of_its_bucket():
    for bucket in BUCKETS:
        batch = make_batch(*bucket)
        assert _signature(batch) == _signature(SPECS[bucket]) == _signature(jax.device_put(batch))
        assert _explain_unplanned(batch, SPECS) is None
    assert len({_signature(spec) for spec in SPECS.values()}) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: make_batch(3, 16), "Nearest is 2×16: .tokens is int32[2,3,16], planned was int32[2,2,16]"),
        (lambda batch: make_batch(4, 8, 1), "Nearest is 4×8: .tokens is int32[1,4,8]"),
        (
            lambda batch: batch._replace(weights=np.ones(batch.weights.shape)),
            "Nearest is 4×8: .weights is float64[2,4,8], planned was float32[2,4,8]. Buckets: 4×8, 2×16, 2×24",
        ),
        (lambda batch: batch._replace(num_sequences=3.0), ".num_sequences is a Python float, planned was float32[]"),
        (lambda batch: batch._replace(lengths=None), ".lengths is absent, planned was int32[2,4]"),
        (lambda batch: batch._asdict(), "is absent"),
        (lambda batch: type("Other", (Batch,), {})(*batch), "the containers of the leaves differ"),
    ],
)
def test_the_leaves_that_differ_are_named(change, said):
    assert said in _explain_unplanned(change(make_batch(4, 8)), SPECS)


def test_a_batch_on_other_devices_is_explained():
    placed = jax.device_put(make_batch(4, 8), jax.devices()[3])
    assert ".tokens is int32[2,4,8] on device 3, planned was int32[2,4,8] on device 0" in _explain_unplanned(
        placed, SPECS, jax.devices()[0]
    )
    shardings = batch_shardings(SPECS[BUCKETS[0]], data_mesh(2))
    spread = jax.device_put(make_batch(4, 8), shardings)
    assert "on devices 0, 1 as ('data',), planned was int32[2,4,8] on device 0" in _explain_unplanned(
        spread, SPECS, jax.devices()[0]
    )
    planned = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        SPECS[BUCKETS[0]],
        shardings,
    )
    assert _explain_unplanned(spread, {BUCKETS[0]: planned}, jax.devices()[0]) is None
    assert _explain_unplanned(make_batch(4, 8), {BUCKETS[0]: planned}) is None


def test_leaves_of_a_state_are_named():
    spec = {"w": jax.ShapeDtypeStruct((3,), np.float32), "n": jax.ShapeDtypeStruct((), np.int32)}
    assert _explain_unplanned_state({"w": np.ones(3, np.float32), "n": np.int32(0)}, spec) is None
    assert _explain_unplanned_state({"w": np.ones(4, np.float32), "n": np.int32(0)}, spec) == (
        "the state is not the one that the step was compiled for: ['w'] is float32[4], planned was float32[3]"
    )
