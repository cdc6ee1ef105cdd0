"""What tests of runs share: the pictures of a run, which take longer than its steps, are left empty."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    """Tests of reports look at pictures; those of examples see that a run has them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_curves", "plot_ledger"):
            patch.setattr(f"jvarlen.runs.summary.{name}", lambda _, path: path.write_bytes(b""))
        yield
