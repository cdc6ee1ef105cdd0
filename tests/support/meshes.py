"""Meshes for tests, over the first devices."""

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place, placement_of


def data_mesh(num_devices=-1):
    """A mesh with the axis "data"; the other axes of a layout have one device."""
    return place(Layout(data=num_devices)).mesh


def layout_mesh(layout):
    return place(layout).mesh


def batch_shardings(batch, mesh):
    return placement_of(mesh).batch_shardings(batch)
