"""Files of raw arrays: opened by header, size and time of change; every change of them is found."""

import os
import pickle
import shutil

import numpy as np
import pytest

from jvarlen import Plan, load, make_plan
from jvarlen.experimental.large_plans import open_plan, out_of_core, plan_on_disk, raw_plan
from jvarlen.planning import plan_file

torch_ref = pytest.importorskip("torch_ref")

LENGTHS = np.random.default_rng(0).integers(1, 41, 300)
BUCKETS = [(4, 10), (2, 40)]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of a plan with six chunks of sample ids."""
    for module in (plan_file, raw_plan, out_of_core):
        monkeypatch.setattr(module, "DIGEST_CHUNK", 50)
    monkeypatch.setattr(torch_ref.plan_file, "_CHUNK", 50)
    plan_on_disk(LENGTHS, BUCKETS, tmp_path / "plan", order="shuffle", progress=False)
    return tmp_path / "plan"


def rewrite(path, offset, keeps_time=True):
    """Changes a byte, and keeps the time of change if wanted."""
    status = os.stat(path)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def offset_of(path, name):
    return open_plan(path)._header["arrays"][name]["offset"]


def test_opening_maps_the_arrays(path):
    plan = open_plan(path)
    assert all(isinstance(array, np.memmap) for array in (plan.sample_ids, plan.step_offsets, plan.num_tokens))
    with pytest.raises(ValueError, match="read-only"):
        plan.sample_ids[0] = 1


def test_verify_names_the_damaged_places(path):
    open_plan(path).verify(progress=False)
    rewrite(path, offset_of(path, "sample_ids") + 8 * 120)
    rewrite(path, offset_of(path, "sample_ids") + 8 * 299)
    plan = open_plan(path)  # size and time of change are as they were
    with pytest.raises(ValueError, match=r"places 100 to 149 \(steps \d+ to \d+\), places 250 to 299"):
        plan.verify(progress=False)


@pytest.mark.parametrize("name", ["buckets", "step_bucket", "step_offsets", "num_tokens", "chunk_digests"])
def test_verify_finds_every_change(name, path):
    rewrite(path, offset_of(path, name))
    with pytest.raises(ValueError, match="damaged"):
        open_plan(path).verify(progress=False)


def test_a_copy_is_verified_when_it_is_opened(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copyfile(path, copy)
    os.utime(copy, ns=(0, 0))
    assert open_plan(copy).digest == open_plan(path).digest
    rewrite(copy, offset_of(copy, "sample_ids"), keeps_time=True)
    with pytest.raises(ValueError, match="damaged"):
        open_plan(copy)


def test_what_is_no_whole_file_is_refused(path, tmp_path):
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "bytes, not"),
        (whole[:100], "header is damaged"),
        (whole[:60] + b"#" + whole[61:], "header is damaged"),
    ):
        (tmp_path / "other").write_bytes(content)
        for read in (open_plan, torch_ref.Plan.load):
            with pytest.raises(ValueError, match=message if read == open_plan else "damaged|cut"):
                read(tmp_path / "other")


def test_the_reference_reads_the_same_plan(path):
    plan, reference = open_plan(path), torch_ref.Plan.load(path)
    assert reference.digest == plan.digest
    assert isinstance(reference.sample_ids, np.memmap)
    np.testing.assert_array_equal(reference.sample_ids, plan.sample_ids)
    np.testing.assert_array_equal(reference.num_tokens, plan.num_tokens)
    for step in range(plan.num_steps):
        np.testing.assert_array_equal(reference.rows(step), plan.rows(step))
    rewrite(path, offset_of(path, "sample_ids"), keeps_time=False)
    with pytest.raises(ValueError, match="changed"):
        torch_ref.Plan.load(path)


def test_another_process_opens_the_file_instead_of_copying_the_arrays(path):
    pickled = pickle.dumps(open_plan(path))
    assert len(pickled) < 500
    assert pickle.loads(pickled).digest == open_plan(path).digest
    plan = open_plan(path)
    plan_on_disk(LENGTHS, BUCKETS, path, order="length", progress=False)  # in its place
    for use in (lambda: pickle.loads(pickled), lambda: plan.verify(progress=False)):
        with pytest.raises(ValueError, match=r"was replaced .*since it was opened"):
            use()
    in_memory = make_plan(LENGTHS, BUCKETS, order="length")
    assert pickle.loads(pickle.dumps(in_memory)).digest == in_memory.digest


def test_batches_begin_at_any_step(path):
    samples = [np.full(length, 1, np.int32) for length in LENGTHS]
    plan = open_plan(path)
    in_memory = make_plan(LENGTHS, BUCKETS, order="shuffle")
    begun = load(plan, samples, start_step=plan.num_steps - 2, verify=True)
    for batch, expected in zip(begun, load(in_memory, samples, start_step=plan.num_steps - 2), strict=True):
        np.testing.assert_array_equal(batch.lengths, expected.lengths)


def test_a_plan_saved_from_a_file_is_the_same(path, tmp_path):
    open_plan(path).save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz").digest == open_plan(path).digest
