"""Values that must not change: plans, rates, training steps and the figures of pages.

`calls.py` is the only file here that calls the library. `record.py` writes `values/`.
"""
