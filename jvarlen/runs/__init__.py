"""A whole training: from settings to a run directory.

- `config`, `data_config`, `plan_config`: the settings, frozen and checked. `data`, `task`: what is trained, on what.
- `epochs`: all steps of a training. `loop`, `evaluation`, `profiling`, `step_display`: one host loop around the step.
- `directory`, `trackers`, `charts`, `wandb_process`, `summary`: what a run leaves behind.
- `fit`: all of it, in order.
"""
