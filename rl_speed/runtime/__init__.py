"""Services around a run: checkpoints, metrics and their writers, signals, progress, plots, workdir
files, memory reports.
"""
