"""Supervised fine-tuning on packed rows: settings (`config`), examples (`data`), update and loop
(`train`), and setup of a run (`build`).
"""
