"""Clusters: what a plan costs on any layout of any devices, before training, and which layout to take.

From a plan, a model and a cluster to seconds and bytes of every layout. In reading order:

- `cluster`: devices, memory and links, from presets or files.
- `links`: a cluster from measurements of the devices at hand.
- `layout_table`: many layouts as columns of numbers.
- `model_costs`: products of matrices and collectives of a model. `step_seconds`: what a step takes on each layout.
- `memory_model`: the bytes of a step on many layouts at once. `model_file`: a model as JSON.
- `search`: every layout, and what a plan takes on it. `choice`: the fastest that fits.
- `cutting`: layers of each stage.
- `operators`: splits of the operators of a layer.
- `noise`, `failures`: devices of uneven speed, and hosts that fail.
- `simulate`: a plan played out on a cluster.
"""
