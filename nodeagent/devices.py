"""The node's simulated devices: made at the agent's start, swept after abnormal ends."""

from __future__ import annotations

import logging
import os
import zlib

from nodeagent.taskenv import NodeConfig

log = logging.getLogger("nodeagent")


class Devices:
    """NODE_DIR/devices; a node without an instance type has none."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.path = os.path.join(config.dir, "devices")

    def prepare(self) -> list[int]:
        """Create the directory where it is missing; cores per device found, 0 for a lost one.

        Raises ``ValueError`` for an unknown instance type, ``OSError``, ``DeviceDirError``.
        """
        config = self.config
        if not config.instance_type:
            return []
        from neuron_runtime import devicedir

        seed = zlib.crc32(f"{config.cluster}/{config.node}".encode())
        devicedir.create(self.path, config.instance_type, config.node, seed)
        return list(devicedir.read_counts(self.path))

    def sweep(self) -> None:
        """Free what killed processes still hold in the device directory's books."""
        if not self.config.instance_type:
            return
        from neuron_runtime import devicedir

        try:
            cores = devicedir.sweep(self.path)
        except (OSError, ValueError, devicedir.DeviceDirError) as error:
            log.error("devices %s: %s", self.path, error)
            return
        if cores:
            log.info("devices: cleared what dead processes left on cores %s", cores)
