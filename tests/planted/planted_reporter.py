"""A pytest plugin of `run.py`: tests in the order of the files on the command line,
and what came of them as JSON.

PLANTED_REPORT names the file: {"passed": tests, "failed": id of the first test that failed or null,
"said": why, "broken": whether tests could not be collected, "cpu_s": seconds of processor time,
children included}.
"""

import json
import os
from pathlib import Path

import pytest

_found = {"passed": 0, "failed": None, "said": "", "broken": False}


@pytest.hookimpl(trylast=True)  # behind tests/conftest.py, which sorts for two processes
def pytest_collection_modifyitems(config, items):
    places = {
        str(Path(config.invocation_params.dir, name).resolve()): place
        for place, name in enumerate(config.args)
    }
    items.sort(key=lambda item: places.get(str(item.path), len(places)))


def pytest_collectreport(report):
    if report.failed:
        _found.update(broken=True, said=str(report.longrepr).strip().splitlines()[-1])


def pytest_runtest_logreport(report):
    if report.passed and report.when == "call":
        _found["passed"] += 1
    if report.failed and _found["failed"] is None:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash else str(report.longrepr)
        _found.update(
            failed=report.nodeid, said=said.strip().splitlines()[0] if said.strip() else ""
        )


def pytest_sessionfinish(session):
    Path(os.environ["PLANTED_REPORT"]).write_text(
        json.dumps({**_found, "cpu_s": sum(os.times()[:4])})
    )
