"""Tests find the project's files from any working directory; slow ones run only on request."""
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"   # kernels run on the CPU, in Python: set before triton is imported

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (minutes)")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; runs only with --slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
