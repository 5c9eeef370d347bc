"""Administration commands of ``clusterctl`` (typer)."""
