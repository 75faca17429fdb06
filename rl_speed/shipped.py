"""Commands and configurations that ship with the package. Standard library only."""

from pathlib import Path

# Files in experiments/ that are commands of rl-speed and part of a wheel.
COMMANDS = ("train", "evaluate", "sft", "serve", "data", "report", "compare")


def folder(name: str) -> Path:
    """Path of the folder "configs" or "experiments". It is inside the package in a wheel, and next
    to it in a checkout.
    """
    package = Path(__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
