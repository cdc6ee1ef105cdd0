"""The arguments of a plan that decide which samples come, and when."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.planning.order import Order
from torch_ref.planning.pacing import Pacing

__all__ = ["Settings"]


class Settings(NamedTuple):
    """The arguments of `make_plan` that decide which samples come, and when."""

    order: Order
    difficulty: ArrayLike | None
    pacing: Pacing | None
    overlong: str
    seed: int
    epoch: int
    group_ids: NDArray[np.int64] | None = None
