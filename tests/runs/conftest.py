"""What tests of runs share: the pictures of a run, which take longer than its steps, are left empty."""

import pytest

from tests.support.run_fit import leave_pictures_empty


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    """Tests of reports look at pictures; those of examples see that a run has them."""
    with pytest.MonkeyPatch.context() as patch:
        leave_pictures_empty(patch.setattr)
        yield
