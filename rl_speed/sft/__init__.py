"""Supervised fine-tuning on packed rows: settings (`config`), examples (`data`),
update and loop (`train`), a run of them (`build`).
"""
