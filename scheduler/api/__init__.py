"""Shared types of clusterctl: records, wire messages, frames, host lists, times, errors."""
