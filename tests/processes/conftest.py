"""`run`: a run of several processes."""

import pytest
from several import BOUNDS, DEVICES, SCRIPT, free_port, settings


@pytest.fixture
def run(launch):
    """run(workdir, method, steps, devices, processes, faults={index: FAULT}, **settings): the
    processes that ended, one for each.
    """

    def start(
        workdir, method="speed_rloo", steps=6, processes=2, devices=4, faults=None, flags=(), **more
    ):
        faults = faults or {}
        mesh = {"mesh.data": devices, **more}
        command = [
            SCRIPT,
            f"--config=configs/embedded.py:{method}",
            f"--workdir={workdir}",
            *settings(method, steps, **mesh),
            *BOUNDS,
            *flags,
        ]
        port, commands = free_port(), []
        for index in range(processes):
            place = [
                f"--coordinator=localhost:{port}",
                f"--processes={processes}",
                f"--process={index}",
            ]
            commands.append(command + (place if processes > 1 else []))
        environments = [
            {**DEVICES, **({"FAULT": faults[i]} if i in faults else {})} for i in range(processes)
        ]
        return launch.together(commands, environments, kill_after_s=60)

    return start
