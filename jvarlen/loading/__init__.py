"""From a plan and a dataset to batches on devices.

- `collate`: the samples of a step as host arrays of the bucket's shape.
- `plan_source`: reads and collates any step. `ids_digest`: proof of which samples were read.
- `read_ahead`: reads steps ahead in a thread or in workers. `shared_memory`: checks that /dev/shm has room for them.
- `loader`: the iterator of batches; the only module that moves data to devices.
"""
