"""Files of raw arrays: opened by header, size and time of change; every change of them is found."""

import hashlib
import json
import os

import numpy as np
import pytest

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
    monkeypatch.setattr(torch_ref.planning.plan_file, "_CHUNK", 50)
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


def forge(path, change):
    """Changes the header, and signs it again."""
    header = raw_plan._read_header(path)
    change(header)
    text = json.dumps(header).encode().ljust(4096 - 16 - 32)
    time = os.stat(path).st_mtime_ns
    with path.open("r+b") as file:
        file.write(raw_plan._MAGIC + hashlib.sha256(text).digest() + text)
    os.utime(path, ns=(time, time))


HEADERS = {
    "microbatches": lambda header: header.update(microbatches_per_step=2**31),
    "negative": lambda header: header.update(microbatches_per_step=-1),
    "text": lambda header: header.update(microbatches_per_step="1"),
    "dropped": lambda header: header.update(num_dropped=-1),
    "overlong": lambda header: header.update(overlong="split"),
    "dtype": lambda header: header["arrays"]["sample_ids"].update(dtype="<i4"),
    "object": lambda header: header["arrays"]["sample_ids"].update(dtype="|O"),
    "offset": lambda header: header["arrays"]["sample_ids"].update(offset=0),
    "shape": lambda header: header["arrays"]["step_offsets"].update(shape=[2**62]),
    "no array": lambda header: header["arrays"].pop("num_tokens"),
    "no digest": lambda header: header.pop("digest"),
    "array": lambda header: header.update(arrays=[]),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("read", [open_plan, torch_ref.Plan.load])
def test_a_forged_header_is_refused_by_the_path(read, name, path):
    forge(path, HEADERS[name])
    with pytest.raises(ValueError, match=str(path)):
        read(path)


@pytest.mark.parametrize("name", ["step_offsets", "step_bucket", "num_tokens"])
@pytest.mark.parametrize("read", [open_plan, torch_ref.Plan.load])
def test_steps_that_no_plan_has_are_refused_though_digests_are_not_compared(read, name, path):
    begin = raw_plan._read_header(path)["arrays"][name]["offset"]
    time = os.stat(path).st_mtime_ns
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(b"\xff" * 4)
    os.utime(path, ns=(time, time))
    with pytest.raises(ValueError, match=str(path)):
        read(path)
