"""From a plan and a dataset to batches on devices.

- `collate`: the samples of a step into host arrays of the bucket's shape.
- `plan_source`: reads and collates any step. `ids_digest`: proof of which samples were read.
- `read_ahead`: steps read ahead, by a thread or by worker processes. `shared_memory`: room for what these hand over.
- `loader`: the iterator of batches; the only module that moves data to devices.
"""
