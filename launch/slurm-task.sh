#!/bin/bash
# One task of the step, a node's: runs the command with {rank} and {gpus} filled in. srun starts it, by slurm-common.sh.

# Slurm sends SIGTERM to this shell and to all that it has started. The ranks save and end with 75, but torchrun makes 1 of it:
# what was asked to stop and did not come to its own end is to be gone on with.
stopped=
trap 'stopped=1' TERM

# Cards that Slurm gave to this node; without any, one rank.
gpus=${SLURM_GPUS_ON_NODE:-1}
# For torchrun: the first node holds the meeting, and its address is called; the others' names are but sorted, behind it.
first=0 sorted=$(printf 'node%06d' "$SLURM_PROCID")
[ "$SLURM_PROCID" -gt 0 ] || first=1 sorted=$MASTER
words=()
for word in "$@"; do
    word=${word//'{rank}'/$SLURM_PROCID}
    word=${word//'{gpus}'/$gpus}
    word=${word//'{first}'/$first}
    words+=("${word//'{sorted}'/$sorted}")
done

[ -z "$stopped" ] || exit 75  # the command, started now, would not hear of it
"${words[@]}"
status=$?
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then
    exit 75
fi
exit "$status"
