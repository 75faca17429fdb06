"""RPO's memory: one cached response per question (`cache`), where samples are cut from it (`cuts`),
both together (`source`).
"""
