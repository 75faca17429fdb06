"""RPO's replay: one cached response per prompt (`cache`), where samples are cut from it (`cuts`),
both together (`source`).
"""
