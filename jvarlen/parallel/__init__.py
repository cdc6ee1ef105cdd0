"""Parallelism beyond data parallelism.

- `wire`: what collectives send, and how long it takes. `collectives`: those collectives, in `shard_map`.
- `pipeline`: a model in stages over a mesh axis.
"""
