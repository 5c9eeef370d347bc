"""Importers: StableHLO text and JAX callables to the intermediate representation."""
