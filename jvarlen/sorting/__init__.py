"""A distributed sample sort.

- `sortable_words`, `shard_sort`, `sharded_rows`: keys as sortable words, the sort of a shard, rows of processes.
- `sample_sort`: keys sorted over a mesh axis.
"""
