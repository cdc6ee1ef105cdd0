"""A plan in ten lines: from the lengths of samples to a few static shapes and the steps of an epoch.

Run it: python examples/ten_line_plan.py
"""

import numpy as np

import jvarlen

lengths = np.random.default_rng(0).lognormal(5, 1, 50_000).astype(int).clip(1, 4096)  # tokens of each sample
buckets = jvarlen.make_buckets(lengths, max_tokens=32_768, max_shapes=12, length_multiple=8)
plan = jvarlen.make_plan(lengths, buckets, order="shuffle", seed=0)
rates = jvarlen.lr_sequence(plan, 3e-3, 256, rule="sqrt")
print(plan.report(rates))
print(f"\n{plan.num_samples:,} samples, each in one of {plan.num_steps:,} steps; digest {plan.digest[:16]}…")
print(f"padding: {plan.padding:.2%}; padded to the longest, it would be {1 - lengths.mean() / lengths.max():.2%}")
for step in range(3):
    bucket = plan.buckets.shapes[plan.step_bucket[step]]
    print(f"step {step}: {plan.num_sequences[step]} samples in {bucket}, learning rate {rates[step]:.2e}")
