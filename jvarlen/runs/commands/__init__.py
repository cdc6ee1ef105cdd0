"""The commands besides `train`. Each is imported for its settings, and imports what it runs when it runs.

- `plan`, `compile`: a plan, and its steps compiled for devices that need not be here.
- `report`: runs, finished or not.
- `trained_model`, `sample`, `export`: what a model continues, and its files for Hugging Face.
- `measure`: cost models of steps.
"""
