"""Parallelism beyond data parallelism.

- `pipeline`: a model in stages over a mesh axis.
"""
