"""Images at their native resolution in Flax NNX: patches of several images share a row, as in NaViT.

Letters: B rows, T patches of a row, P images of a row, D width, S side of a patch.

Run it: python examples/native_images.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jvarlen

NUM_CLASSES, SIDE, WIDTH, MOST_PATCHES = 4, 4, 32, 12  # of a side


def make_image(rng):
    """Stripes in one of four directions, of any height and width, as patches with their places."""
    label, (height, width) = rng.integers(NUM_CLASSES), rng.integers(2, MOST_PATCHES + 1, 2)
    y, x = np.mgrid[: height * SIDE, : width * SIDE]
    along = (x, y, x + y, x - y)[label]
    pixels = np.sin(along * rng.uniform(0.7, 1.3) + rng.uniform(0, 6)) + rng.normal(0, 0.7, along.shape)
    patches = pixels.reshape(height, SIDE, width, SIDE).swapaxes(1, 2).reshape(-1, SIDE * SIDE)
    places = np.stack(np.divmod(np.arange(height * width), width), axis=1)
    return {"patches": patches.astype(np.float32), "places": places, "label": label}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BxTxD, mask_Bx1xTxT):
        x_BxTxD += self.attention(self.norms[0](x_BxTxD), mask=mask_Bx1xTxT)
        return x_BxTxD + self.down(nnx.gelu(self.up(self.norms[1](x_BxTxD))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Linear(SIDE * SIDE, WIDTH, rngs=rngs)
        self.rows, self.columns = (nnx.Embed(MOST_PATCHES, WIDTH, rngs=rngs) for _ in range(2))
        self.block, self.head = Block(rngs), nnx.Linear(WIDTH, NUM_CLASSES, rngs=rngs)

    def __call__(self, patches, places_BxTx2, image_BxT, num_images):
        """Logits of the images of each row. Attention and means stay within an image; padding is image 0."""
        x_BxTxD = self.patches(patches) + self.rows(places_BxTx2[..., 0]) + self.columns(places_BxTx2[..., 1])
        x_BxTxD = self.block(x_BxTxD, (image_BxT[:, :, None] == image_BxT[:, None])[:, None])
        is_in_BxPxT = (image_BxT[:, None] == jnp.arange(1, num_images + 1)[:, None]).astype(x_BxTxD.dtype)
        sizes_BxPx1 = jnp.maximum(jnp.sum(is_in_BxPxT, axis=2, keepdims=True), 1)
        return self.head(is_in_BxPxT @ x_BxTxD / sizes_BxPx1)


graphdef, params = nnx.split(Transformer(nnx.Rngs(0)), nnx.Param)


def loss_fn(params, batch):
    """Sums over real images; labels, too, are one an image: [B, P]."""
    labels_BxP, is_real_BxP = batch["label"], batch["is_real"]
    model = nnx.merge(graphdef, params)
    logits = model(batch["patches"], batch["places"], batch["segment_ids"], labels_BxP.shape[1])
    losses_BxP = optax.softmax_cross_entropy_with_integer_labels(logits, labels_BxP)
    return jnp.sum(losses_BxP * is_real_BxP), jnp.sum(is_real_BxP)


rng = np.random.default_rng(0)
images = [make_image(rng) for _ in range(1_200)]
plan = jvarlen.make_plan(jvarlen.measure_lengths(images, "patches"), [(8, 192)], packing="best_fit")
train_step = jvarlen.make_train_step(loss_fn, optax.adam(3e-3))
state = train_step.init(params)
batches = jvarlen.load(plan, images)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
