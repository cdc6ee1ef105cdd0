# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
"""# From lengths to a plan: which shapes, which steps?

A plan says which samples form which step, in which of a few static shapes, at which learning rate. This notebook looks
at some lengths, chooses shapes, and draws what comes out. `jupytext --to ipynb examples/plan_notebook.py` makes a file
for Jupyter of it; editors that know the percent format open it as it is.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import jvarlen
from jvarlen.planning.compare import length_histogram

lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int).clip(1, 4096)  # in place of your own
print(length_histogram(lengths))

# %% [markdown]
# ## How many shapes?
#
# Every shape is compiled once. More of them leave less padding, with diminishing returns.

# %%
MAX_TOKENS = 16_384

padding = {}
for max_shapes in (1, 2, 4, 8, 16, 32):
    buckets = jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=max_shapes, length_multiple=8)
    padding[max_shapes] = jvarlen.make_plan(lengths, buckets, order="length").padding
    print(f"{max_shapes:>3} shapes: {padding[max_shapes]:.2%} padding")

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(list(padding), [100 * share for share in padding.values()], marker="o")
axis.set(xscale="log", xlabel="shapes", ylabel="padding, %", ylim=(0, None))
axis.set_xticks(list(padding), list(map(str, padding)))
plt.show()

# %% [markdown]
# ## The plan
#
# Twelve shapes: in order of length, as a curriculum, and shuffled, as usual.

# %%
buckets = jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=12, length_multiple=8)
plan = jvarlen.make_plan(lengths, buckets, order="shuffle")
by_length = jvarlen.make_plan(lengths, buckets, order="length")
print(plan.report())

# %% [markdown]
# Where the padding is: tokens and padding of each shape.

# %%
positions = np.bincount(plan.step_bucket, plan.padded_tokens_per_step, len(plan.buckets.shapes)) / 1e3
tokens = np.bincount(plan.step_bucket, plan.num_tokens, len(plan.buckets.shapes)) / 1e3
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.bar(list(map(str, plan.buckets.shapes)), positions, color="lightgray", label="padding")
axis.bar(list(map(str, plan.buckets.shapes)), tokens, label="tokens")
axis.set(ylabel="positions, thousands")
axis.tick_params(axis="x", rotation=60)
axis.legend()
plt.show()

# %% [markdown]
# ## Learning rates
#
# Short samples come many at a time, long ones few at a time. The rate follows the number of samples in a step, here by
# its square root, on top of a warm-up.


# %%
def base_rate(step):
    """Linear warm-up over 30 steps."""
    return 3e-3 * min((step + 1) / 30, 1.0)


figure, axes = plt.subplots(2, figsize=(6, 4), sharex=True, sharey=True, layout="constrained")
for axis, each, order in zip(axes, (plan, by_length), ("shuffled", "by length"), strict=True):
    rates = jvarlen.lr_sequence(each, base_rate, 100, rule="sqrt")
    axis.plot(1e3 * rates, ".", markersize=3)
    axis.set(title=order, ylabel="rate, 10⁻³")
    print(f"{order:>9}: rates {rates.min():.1e} to {rates.max():.1e}, digest {each.digest[:16]}…")
axes[1].set(xlabel="step")
plt.show()

# %% [markdown]
# ## Save it
#
# The plan is a file, and its digest says whether two are the same. `jvarlen plan --html` draws these pictures and more.

# %%
plan.save("plan.npz")
print(f"the same plan, read back: {jvarlen.Plan.load('plan.npz').digest == plan.digest}")
