"""Supervised fine-tuning on packed rows: examples (`data`), update and loop (`train`), from flags to a run (`build`)."""
