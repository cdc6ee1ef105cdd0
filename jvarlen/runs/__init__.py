"""A whole training: from settings to a run directory.

- `config`, `data_config`, `plan_config`: frozen, checked settings. `data`, `task`: the data, and what is trained.
- `shape_choice`: the shapes of a run whose settings leave their number open.
- `epochs`: all steps of a training. `prepare`: everything before the first. `loop`, `profiling`, `step_display`: one
  host loop around the step.
- `directory`, `trackers`, `charts`, `wandb_process`, `summary`: the files of a run.
- `fit`: all of it, in order. `model_commands`: samples and exports the trained model.
"""
