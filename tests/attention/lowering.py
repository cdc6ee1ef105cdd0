"""Lowering for platforms that are not here."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def lower_for(platform, function, *arguments):
    """The text of a function's program."""
    trace = jax.jit(function).trace
    if platform != "cuda":
        return trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):  # JAX 0.12 asks for the device
        return trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
