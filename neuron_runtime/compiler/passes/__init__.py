"""Passes over the intermediate representation."""
