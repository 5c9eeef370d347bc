"""jax with the devices tests/conftest.py asks for."""

from __future__ import annotations

from types import ModuleType

import pytest

DEVICES = 4


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    """jax with four devices."""
    module: ModuleType = pytest.importorskip("jax")
    assert len(module.devices()) >= DEVICES, "jax was started before tests/conftest.py was read"
    return module
