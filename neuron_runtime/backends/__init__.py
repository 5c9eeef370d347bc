"""Executors of compiled programs."""
