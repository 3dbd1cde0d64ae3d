"""What every test begins with: a seed, and a Dynamo that has compiled nothing."""

from __future__ import annotations

import logging

import pytest

pytest.register_assert_rewrite("flambeau.tests.support")


def pytest_configure(config):
    # torch traces its own compilation there: pages of it with every failure.
    logging.getLogger("torch.__trace").propagate = False
    config.addinivalue_line("markers", "full: full-size models; only run with -m full")


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr:
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]


@pytest.fixture(autouse=True)
def _fresh():
    import torch
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
