"""A second attempt: a wrong answer is told so. With `environment.max_turns=1` it may be mended
once.
"""

from rl_speed.environments import Reply, Trajectory


def tell(trajectory: Trajectory, correct: bool) -> Reply:
    """Says so in words; in the user's turn of a chat template, if the prompt has one."""
    if correct:
        return Reply(done=True)
    return Reply("\nThat answer is not correct. Try once more.\n", role="user")


def ask(trajectory: Trajectory, correct: bool) -> Reply:
    """Puts the question again, for policies without words, such as the embedded ones."""
    return Reply(done=True) if correct else Reply(f"{trajectory.question}=")
