"""Meshes for tests, over the first devices."""

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import placement_of


def data_mesh(num_devices=-1):
    """A mesh with the axis "data"; the other axes of a layout have one device."""
    return Layout(data=num_devices).on().mesh


def layout_mesh(layout):
    return layout.on().mesh


def batch_shardings(batch, mesh):
    return placement_of(mesh).batch_shardings(batch)
