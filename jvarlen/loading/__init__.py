"""From a plan or a stream and a dataset to batches on devices.

- `collate`: the samples of a step as host arrays of the bucket's shape.
- `plan_source`: reads and collates any step; proof of which samples were read.
- `read_ahead`: reads steps ahead in a thread or in workers, for which /dev/shm needs room.
- `loader`: the iterator of batches; the only module that moves data to devices.
"""
