"""Energies of molecules by message passing in Equinox: rows of several graphs, some of them without a bond.

Letters: B rows, N atoms and E bonds of a row, P graphs of a row, D width.

Run it: python examples/molecules.py
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen

NUM_FEATURES, NUM_BOND_TYPES, WIDTH, NUM_ROUNDS = 5, 3, 32, 2


def make_molecule(rng):
    """A tree of atoms, some with rings; the energy is a sum over atoms and bonds."""
    num_atoms = 1 + min(int(rng.geometric(0.12)) - 1, 30)
    kinds = rng.integers(NUM_FEATURES, size=num_atoms)
    bonds = [(rng.integers(max(0, i - 3), i), i) for i in range(1, num_atoms)]
    bonds += [(i, i + 5) for i in range(0, num_atoms - 5, 9)]
    bonds = np.array(bonds, np.int32).reshape(-1, 2)
    types = rng.integers(NUM_BOND_TYPES, size=len(bonds))
    energy = np.sum(kinds - 2.0) + np.sum((types - 1.0) * (kinds[bonds[:, 0]] != kinds[bonds[:, 1]]))
    atoms = np.eye(NUM_FEATURES, dtype=np.float32)[kinds]
    return {"atoms": atoms, "bonds": bonds, "bond_types": types, "energy": np.float32(energy)}


class Network(eqx.Module):
    embed_atoms: eqx.nn.Linear
    embed_bonds: eqx.nn.Embedding
    messages: list[eqx.nn.MLP]
    energy: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3 + NUM_ROUNDS)
        self.embed_atoms = eqx.nn.Linear(NUM_FEATURES, WIDTH, key=keys[0])
        self.embed_bonds = eqx.nn.Embedding(NUM_BOND_TYPES, WIDTH, key=keys[1])
        self.energy = eqx.nn.MLP(WIDTH, "scalar", WIDTH, 1, key=keys[2])
        self.messages = [eqx.nn.MLP(3 * WIDTH, WIDTH, WIDTH, 1, key=key) for key in keys[3:]]

    def __call__(self, atoms_NxF, bonds_Ex2, types_E, graph_of_atom_N, *, num_graphs):
        """The energies of the graphs of one row."""
        x_NxD = jax.vmap(self.embed_atoms)(atoms_NxF)
        types_ExD = jax.vmap(self.embed_bonds)(types_E)
        start_E, end_E = bonds_Ex2.T
        for message in self.messages:
            told_ExD = jax.vmap(message)(jnp.concatenate([x_NxD[start_E], x_NxD[end_E], types_ExD], axis=1))
            # Padding bonds join the place N, after the last atom: nothing is added there.
            x_NxD = x_NxD.at[start_E].add(told_ExD).at[end_E].add(told_ExD)
        # Segment 0 is padding.
        return jax.ops.segment_sum(jax.vmap(self.energy)(x_NxD), graph_of_atom_N, num_graphs + 1)[1:]


params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_array)


def loss_fn(params, batch):
    """Squared errors, summed over real graphs."""
    network = jax.vmap(functools.partial(eqx.combine(params, static), num_graphs=batch["energy"].shape[1]))
    energies_BxP = network(batch["atoms"], batch["bonds"], batch["bond_types"], batch["source_segment_ids"])
    errors_BxP = (energies_BxP - batch["energy"]) ** 2 * batch["is_real"]
    return jnp.sum(errors_BxP), jnp.sum(batch["is_real"])


rng = np.random.default_rng(0)
molecules = [make_molecule(rng) for _ in range(3_000)]
lengths = jvarlen.measure_lengths(molecules, ("atoms", "bonds"))

train_step = jvarlen.make_train_step(loss_fn, optax.adam(3e-3))
state = train_step.init(params)
batches = jvarlen.load(
    lambda epoch: jvarlen.make_plan(lengths, max_tokens=1024, packing="best_fit", epoch=epoch),
    molecules,
    lengths=lengths,
    # Bonds count the atoms of their own molecule, and in a batch those of the row.
    fields={"atoms": "source", "bonds": "target of source", "bond_types": "target", "energy": "row"},
    num_epochs=3,
)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
