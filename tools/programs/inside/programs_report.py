"""A pytest plugin: one line for each phase of each test, written at once, so that a process that dies has told what it did."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["PROGRAMS_REPORT"], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        with open(os.environ["PROGRAMS_REPORT"], "a") as file:
            file.write(json.dumps([report.nodeid, "not collected"]) + "\n")
