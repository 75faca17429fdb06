"""What two runs must agree in: their records without the clock."""


def untimed(value):
    """Without what is a time, or belongs to the process."""
    if isinstance(value, dict):
        return {
            k: untimed(v)
            for k, v in value.items()
            if not k.startswith(("time/", "process/")) and not k.endswith("train_s")
        }
    return [untimed(v) for v in value] if isinstance(value, list) else value
