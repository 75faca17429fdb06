"""What a run stands on: checkpoints, metrics and who writes them, signals, progress, plots,
the workdir's files, memory.
"""
