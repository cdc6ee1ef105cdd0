"""A distributed sample sort, and plans that no process holds whole.

- `sortable_words`, `shard_sort`, `sharded_rows`: keys as sortable words, the sort of a shard, rows of processes.
- `sample_sort`: keys sorted over a mesh axis. `balance`: how even the result is, and what the exchange sends.
- `ordered_file`, `sort_file`: one file written by many processes; a file of lengths, sorted.
- `plan_places`, `chunk_digests`, `distributed_plan`: a plan of which each process makes its own rows.
"""
