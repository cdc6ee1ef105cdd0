"""The batches of a plan, from a dataset.

- `batch`: the kinds of batches. `fields`: the fields of samples. `collate`: fields padded, packed or stacked.
- `loader`: the batches of one replica.
- `weighted`, `mixtures`: samples whose tokens count differently, and several datasets as one.
"""
