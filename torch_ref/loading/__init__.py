"""The batches of a plan, from a dataset.

- `collate`: fields of samples, padded, packed or stacked. `loader`: the batches of one replica.
- `weighted`, `mixtures`: samples whose tokens count differently, and several datasets as one.
"""
