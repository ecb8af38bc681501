#!/bin/bash
# Run a node's task: the command with {rank} and {gpus} filled in. slurm-common.sh starts this with
# srun.

# Slurm sends SIGTERM to this shell and to all processes that it has started. The ranks save and
# exit with 75, but torchrun turns that into 1. So a task that was asked to stop and did not finish
# exits with 75: the job can resume.
stopped=
trap 'stopped=1' TERM

# The number of GPUs that Slurm gave to this node; one rank if there are none.
gpus=${SLURM_GPUS_ON_NODE:-1}
# For torchrun: the first node hosts the rendezvous, and others connect to its address. The names of
# the other nodes only determine the order; they sort after the address.
first=0 sorted=$(printf 'node%06d' "$SLURM_PROCID")
[ "$SLURM_PROCID" -gt 0 ] || first=1 sorted=$MASTER
words=()
for word in "$@"; do
    word=${word//'{rank}'/$SLURM_PROCID}
    word=${word//'{gpus}'/$gpus}
    word=${word//'{first}'/$first}
    words+=("${word//'{sorted}'/$sorted}")
done

[ -z "$stopped" ] || exit 75  # a command started now would not get the signal
"${words[@]}"
status=$?
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then
    exit 75
fi
exit "$status"
