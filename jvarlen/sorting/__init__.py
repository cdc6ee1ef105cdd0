"""A distributed sample sort, and plans that no process holds whole.

- `sortable_words`, `shard_sort`, `sharded_rows`: keys as words that sort, the sort of a shard, rows of processes.
- `sample_sort`: keys sorted over a mesh axis. `balance`: how evenly, and at what volume of exchange.
- `ordered_file`, `sort_file`: an order written by many processes into one file; lengths read from one.
- `plan_places`, `distributed_plan`: a plan of which each process makes its own rows.
"""
