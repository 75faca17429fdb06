"""RPO's replay: the cache of one response per prompt (`cache`), the lengths of prefixes cut from it
(`cuts`), and both together (`source`).
"""
