#!/bin/sh
# The whole way once: a local cluster, the training job on two of its nodes, the result.
#
#   jobs/demo.sh FOLDER     # FOLDER gets train.out and the run's files; the cluster is removed
#
# BIN is the folder of the Python environment that has clusterctl (default: the one on PATH).
set -eu

top=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
result=${1:?usage: jobs/demo.sh FOLDER}
mkdir -p "$result"
result=$(CDPATH='' cd -- "$result" && pwd)
[ -z "${BIN:-}" ] || PATH=$BIN:$PATH
CLUSTERCTL_HOME=$result/.cluster
TRAIN_OUT=$result/run
NEURON_COMPILE_CACHE_URL=$result/compile-cache
mkdir -p "$NEURON_COMPILE_CACHE_URL"
export PATH CLUSTERCTL_HOME TRAIN_OUT NEURON_COMPILE_CACHE_URL

finish() {
    code=$?
    trap - EXIT INT TERM
    clusterctl down --quiet || code=1
    rm -rf "$CLUSTERCTL_HOME"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

rm -rf "$TRAIN_OUT" "$result/train.out"
clusterctl up
cd "$top"
if ! clusterctl sbatch --wait --output="$result/train.out" jobs/train.sh; then
    echo "demo: the training job failed; the end of $result/train.out:" >&2
    tail -n 30 "$result/train.out" >&2 || true
    exit 1
fi
echo
tail -n 12 "$result/train.out"
echo
echo "All output is in $result"
