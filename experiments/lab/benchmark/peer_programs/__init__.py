"""Programs that `peers.py` starts, each in a process and, where it needs one, an environment of its
own. Those of others import nothing of rl_speed but `turns.py`, which lies beside them.
"""
