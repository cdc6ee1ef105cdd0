"""Meshes for tests, over the first devices."""

from jvarlen.distributed.layout import Layout


def data_mesh(num_devices=-1):
    """A mesh with the axis "data"; the other axes of a layout have one device."""
    return Layout(data=num_devices).on().mesh


def layout_mesh(layout):
    return layout.on().mesh
