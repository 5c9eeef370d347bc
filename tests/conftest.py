"""jax, where it is installed, gets four host devices: the flag counts only before jax starts."""

from __future__ import annotations

import os

_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
