"""Seeded fault simulation: the controller's core and the agents' cores in one process.

Real: ``scheduler.core``, ``nodeagent.core``, the messages and their codec, the store (SQLite in
memory), the builder of launches.  Made up: clock, wire, machines, processes, people.

:mod:`~scheduler.sim.acts` draws what is done to the cluster from a seed, :mod:`~.cluster` lets
it happen, :mod:`~.auditor` computes from what happened which outcomes are allowed,
:mod:`~.shrink` finds a short list of acts that still fails.  ``python -m scheduler.sim``.
"""
