"""jax, where it is installed, gets four host devices before it starts."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

DEVICES = 4

if "jax" not in sys.modules:
    _flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in _flags:
        os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    """jax with four devices."""
    module: ModuleType = pytest.importorskip("jax")
    if len(module.devices()) < DEVICES:
        pytest.skip("jax was started with one device by another test; run this folder alone")
    return module
