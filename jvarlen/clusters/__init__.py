"""The cost of a plan on any layout of any devices, before training, and the choice of a layout.

A plan, a model and a cluster determine the seconds and bytes of every layout. In reading order:

- `cluster`: devices, memory and links, from presets or files.
- `links`: a cluster from measurements of the devices at hand.
- `layout_table`: many layouts as columns of numbers.
- `model_costs`: matrix products and collectives of a model. `step_seconds`: the time of a step on each layout.
- `memory_model`: the bytes of a step on many layouts at once. `model_file`: a model as JSON.
- `search`: every layout, and the cost of a plan on it. `choice`: the fastest that fits.
- `cutting`: layers of each stage.
- `operators`: splits of the operators of a layer.
- `noise`, `failures`: devices of uneven speed, and hosts that fail.
- `simulate`: a simulated run of a plan on a cluster.
"""
