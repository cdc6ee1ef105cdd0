"""The parts of a traced `jax.lax.scan`, by shapes: versions of JAX name them differently."""

from __future__ import annotations

from typing import Any

__all__ = ["scan_parts"]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many arrays a scan keeps fixed, and how many it carries; its other arguments are sliced.

    What is sliced or stacked has one axis more outside of the loop than inside.

    Args:
      eqn: the equation, a `jax.extend.core.JaxprEqn`.
    """
    body = eqn.params["jaxpr"].jaxpr
    num_sliced, num_stacked = (
        sum(whole.aval.shape != part.aval.shape for whole, part in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    num_carry = len(eqn.outvars) - num_stacked
    return len(eqn.invars) - num_carry - num_sliced, num_carry
