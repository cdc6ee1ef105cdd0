"""The train step: its model, loss, learning rate and compilation.

- `decoder`, `hugging_face`: the decoder, and its files.
- `targets`, `train`: next-token targets, and one update. `batch_sizes`, `lr`, `adamw`: batch sizes of steps, and the
  learning rates and moments that follow from them. `growing_batches`: batches that grow where a schedule decays.
- `graphs`, `compile`, `unplanned`: one graph a bucket, no other, and how a batch differs from every bucket.
"""
