"""Slurm's commands: sbatch, squeue, sinfo, scontrol, scancel, sacct, srun, salloc.

Each must answer within a few milliseconds, so nothing here imports more of the standard library
than it needs (a test holds a list of modules that may not be loaded).
"""
