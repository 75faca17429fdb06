"""Services of a run: checkpoints, metrics and their writers, signals, progress, plots, workdir
files, memory reports.
"""
