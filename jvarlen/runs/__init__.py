"""A whole training: from settings to a run directory.

- `config`, `plan_config`: frozen, checked settings. `data`, `task`: the data, and what is trained.
- `shape_choice`: the shapes of a run whose settings leave their number open.
- `epochs`: all steps of a training. `prepare`: everything before the first. `loop`, `steps`: one host loop
  around the step, and its figures.
- `directory`, `trackers`, `wandb_process`, `summary`: the files of a run.
- `fit`: all of it, in order.
- `page_commands`, `model_commands`, `measure_command`: `jvarlen plan` and `report`; `sample` and `export`; `measure`.
"""
