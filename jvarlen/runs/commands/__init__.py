"""The commands besides `train`. Each is imported for its settings, and imports its code only when it runs.

- `plan`, `compile`: a plan, and its steps compiled for devices that need not be here.
- `report`: runs, finished or not.
- `trained_model`, `sample`, `export`: continuations by a trained model, and its files for Hugging Face.
- `measure`: cost models of steps.
"""
