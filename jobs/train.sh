#!/bin/bash
# Data-parallel training on two nodes: the template for a job of your own.
#
#   sbatch jobs/train.sh                       # as it stands
#   sbatch jobs/train.sh --steps 600           # options go to jobs/train.py (--help lists them)
#   sbatch --nodes=1 jobs/train.sh             # sbatch's options come before the script
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2        # ranks a node; one NeuronCore each
#SBATCH --gres=neuron:1            # devices a node; a Trainium1 device has two cores
#SBATCH --time=00:20:00
#SBATCH --requeue                  # a lost node: start again, from the newest checkpoint
#SBATCH --output=%x-%j.out

set -euo pipefail

# The Python that has clusterctl installed; the compile step needs its jax extra, the ranks do not.
PYTHON=${CLUSTERCTL_PYTHON:-python3}

# The program: your own train.py where you call sbatch, else the one that is installed.
if [ -f "$SLURM_SUBMIT_DIR/train.py" ]; then
    TRAIN=("$SLURM_SUBMIT_DIR/train.py")
    echo "running ${TRAIN[0]}"
else
    TRAIN=(-m jobs.train)
fi

# Everything this run writes, on a disk that all nodes share. The job id stays the same when the job
# is requeued, so the second attempt finds the checkpoints of the first.
OUT=${TRAIN_OUT:-$SLURM_SUBMIT_DIR/train-out/$SLURM_JOB_ID}

# How long one execution may wait for its peers, in seconds. A rank that never comes ends the job
# with NRT_EXEC_HW_ERR_COLLECTIVES instead of keeping the others waiting for ever.
export NEURON_RT_EXEC_TIMEOUT=${NEURON_RT_EXEC_TIMEOUT:-600}

RANKS=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}

if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    echo "attempt $((SLURM_RESTART_COUNT + 1)) of job $SLURM_JOB_ID"
fi

# 1. Compile once, here on the job's first node. The compile cache makes every later run quick.
"$PYTHON" "${TRAIN[@]}" compile --ranks "$RANKS" --out "$OUT" "$@"

# 2. Train on all ranks. The step ends when one rank fails, and the script with its exit code.
srun "$PYTHON" "${TRAIN[@]}" run --out "$OUT" "$@"
