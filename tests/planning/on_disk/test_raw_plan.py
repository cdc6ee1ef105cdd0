"""Files of raw arrays: opened by header, size and time of change; every change of them is found."""

import os
import pickle
import shutil

import numpy as np
import pytest

import torch_ref
from jvarlen import Plan, load, make_plan
from jvarlen.planning import plan_file
from jvarlen.planning.on_disk import out_of_core, raw_plan

LENGTHS = np.random.default_rng(0).integers(1, 41, 300)
BUCKETS = [(4, 10), (2, 40)]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of a plan with six chunks of sample ids."""
    for module in (plan_file, raw_plan, out_of_core):
        monkeypatch.setattr(module, "DIGEST_CHUNK", 50)
    monkeypatch.setattr(torch_ref.plan_file, "_CHUNK", 50)
    return make_plan(LENGTHS, BUCKETS, order="shuffle", out=tmp_path / "plan", progress=False)._file.path


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
    return raw_plan.open_plan_file(path).header["arrays"][name]["offset"]


def test_opening_maps_the_arrays(path):
    plan = Plan.load(path)
    assert all(isinstance(array, np.memmap) for array in (plan.sample_ids, plan.step_offsets, plan.num_tokens))
    with pytest.raises(ValueError, match="read-only"):
        plan.sample_ids[0] = 1


def test_verify_names_the_damaged_places(path):
    Plan.load(path).verify(progress=False)
    rewrite(path, offset_of(path, "sample_ids") + 8 * 120)
    rewrite(path, offset_of(path, "sample_ids") + 8 * 299)
    plan = Plan.load(path)  # size and time of change are as they were
    with pytest.raises(ValueError, match=r"places 100 to 149 \(steps \d+ to \d+\), places 250 to 299"):
        plan.verify(progress=False)


@pytest.mark.parametrize("name", ["buckets", "step_bucket", "step_offsets", "num_tokens", "chunk_digests"])
def test_verify_finds_every_change(name, path):
    rewrite(path, offset_of(path, name))
    with pytest.raises(ValueError, match="damaged"):
        raw_plan.open_plan_file(path).verify(progress=False)


def test_a_copy_is_verified_when_it_is_opened(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copyfile(path, copy)
    os.utime(copy, ns=(0, 0))
    assert Plan.load(copy).digest == Plan.load(path).digest
    rewrite(copy, offset_of(copy, "sample_ids"), keeps_time=True)
    with pytest.raises(ValueError, match="damaged"):
        Plan.load(copy)


def test_what_is_no_whole_file_is_refused(path, tmp_path):
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "bytes, not"),
        (whole[:100], "header is damaged"),
        (whole[:60] + b"#" + whole[61:], "header is damaged"),
    ):
        (tmp_path / "other").write_bytes(content)
        for read in (Plan.load, torch_ref.Plan.load):
            with pytest.raises(ValueError, match=message if read == Plan.load else "damaged|cut"):
                read(tmp_path / "other")


def test_the_reference_reads_the_same_plan(path):
    plan, reference = Plan.load(path), torch_ref.Plan.load(path)
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
    pickled = pickle.dumps(Plan.load(path))
    assert len(pickled) < 500
    assert pickle.loads(pickled).digest == Plan.load(path).digest
    plan = Plan.load(path)
    make_plan(LENGTHS, BUCKETS, order="length", out=path, progress=False)  # in its place
    for use in (lambda: pickle.loads(pickled), lambda: plan.verify(progress=False)):
        with pytest.raises(ValueError, match=r"was replaced .*since it was opened"):
            use()
    in_memory = make_plan(LENGTHS, BUCKETS, order="length")
    assert pickle.loads(pickle.dumps(in_memory)).digest == in_memory.digest


def test_batches_begin_at_any_step(path):
    samples = [np.full(length, 1, np.int32) for length in LENGTHS]
    plan = Plan.load(path)
    in_memory = make_plan(LENGTHS, BUCKETS, order="shuffle")
    begun = load(plan, samples, start_step=plan.num_steps - 2, verify=True)
    for batch, expected in zip(begun, load(in_memory, samples, start_step=plan.num_steps - 2), strict=True):
        np.testing.assert_array_equal(batch.lengths, expected.lengths)


def test_a_plan_saved_from_a_file_is_the_same(path, tmp_path):
    Plan.load(path).save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz").digest == Plan.load(path).digest
