"""Layouts beyond data parallelism.

- `pipeline`: a model in stages on the devices of a mesh axis.
"""
