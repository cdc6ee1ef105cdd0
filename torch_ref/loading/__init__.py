"""The batches of a plan, from a dataset.

- `batch`: the kinds of batches. `fields`: the fields of samples. `collate`: fields padded, packed or stacked.
- `loader`: the batches of one replica, a whole step each.
- `sampler`, `planned`: the microbatches of one replica, epoch by epoch, for the loops of others.
- `pad`: batches of the bucket's shape from the collators of others. `varlen`: where samples of packed rows begin.
- `weighted`, `mixtures`: samples whose tokens count differently, and several datasets as one.
"""
