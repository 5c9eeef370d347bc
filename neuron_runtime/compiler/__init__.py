"""Compiler: importers, intermediate representation, passes and the emitter of NEFF files."""
