"""Plans, batches, orders and rates are those of before, integer for integer and bit for bit, in both packages."""

import pytest

from . import calls
from .plans import BUCKETS, CASES, LENGTHS
from .shorten import as_json, read

GOLDEN = read("plans")


def test_every_case_has_values() -> None:
    assert set(GOLDEN) == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("package", calls.PACKAGES)
def test_a_plan_is_the_one_of_before(package, name):
    assert as_json(CASES[name](package)) == GOLDEN[name]


@pytest.mark.parametrize("order", ["length", "length_descending", "shuffle"])
def test_a_plan_made_in_parts_or_on_disk_is_the_one_in_memory(order, tmp_path):
    options = {"num_microbatches": 4, "order": order}
    expected = GOLDEN[f"plan in order: {order}"]["digest"]
    assert calls.digest_in_parts(LENGTHS, BUCKETS, 4, **options) == expected
    assert calls.digest_on_disk(LENGTHS, BUCKETS, tmp_path / "plan", **options) == expected


@pytest.mark.parametrize("package", calls.PACKAGES)
def test_a_plan_from_its_file_is_the_one_that_was_saved(package, tmp_path):
    plan = calls.make_plan(package, LENGTHS, BUCKETS, num_microbatches=4, order="shuffle")
    loaded = calls.saved_and_loaded(package, plan, tmp_path / "plan.npz")
    assert loaded.digest == plan.digest == GOLDEN["plan in order: shuffle"]["digest"]
