"""Whether two plans, or two loaders, give the same batches in the same order."""

import numpy as np

from jvarlen._common.pytree import leaves_by_name


def assert_same_batches(one, other):
    """Leaves are compared by name, in shape and value: frameworks differ in dtypes and containers."""
    if hasattr(one, "step_bucket"):
        assert one.digest == other.digest
        one, other = ([{"rows": plan.rows(step)} for step in range(plan.num_steps)] for plan in (one, other))
    for leaves, others in zip(map(leaves_by_name, one), map(leaves_by_name, other), strict=True):
        assert leaves.keys() == others.keys()
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(others[name]), err_msg=name)
