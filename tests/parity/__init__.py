"""One body of contract tests over every package that implements the contract."""

import os

# All packages are required: one that cannot be imported fails its tests. Naming fewer in PARITY_PACKAGES is for the
# time when one of them is still being written.
PACKAGES = tuple(os.environ.get("PARITY_PACKAGES", "jvarlen,torch_ref").split(","))
