"""What a run will take, before it is started: its own driver asks for samples that are drawn from
pass rates (`simulated.py`), and what it asks for is paid for at the target's prices (`prices.py`).
`predict.py` puts both together, `report.py` shows it.
"""
