#!/bin/bash
# Check what a node needs before its ranks start. slurm-common.sh sends this text to every node, and
# each node reports what it lacks.
folder=$1 python=$2 shared=$3 logs=$4 dataset=$5 data=$6 mirror=$7 stage=$8

fail() {
    echo "error: $(hostname): $*"
    exit 2
}

cd "$folder" 2> /dev/null || fail "no folder $folder: submit from a disk that all nodes see, or copy the checkout to each node"
[ -e launch/slurm-task.sh ] || fail "no checkout in $folder: copy it to each node, or submit from a disk that all see"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || fail "$python does not exist, or is older than 3.11: run" \
    "\`make setup\` on a disk that all nodes see, or set PYTHON"
# Networked file systems take a moment to show a new file.
for _ in 1 2 3 4 5; do
    [ -z "$shared" ] || [ -e "$shared" ] || sleep 1
done
[ -z "$shared" ] || [ -e "$shared" ] || fail "${shared%/*} is another folder here than on the job's first node, so a restart on other" \
    "nodes would find no checkpoint: give --output-dir FOLDER on a disk that all nodes see, or sbatch --no-requeue"

# On a node's own disk, this folder does not exist yet.
mkdir -p "$logs" || fail "$logs cannot be created: give --output-dir FOLDER"

case $dataset in
    cifar10) names=(cifar-10-batches-py) ;;
    cifar100) names=(cifar-100-python) ;;
    folder) names=(train test) ;;
    *) exit 0 ;;
esac
for name in "${names[@]}"; do
    [ -e "$data/$name" ] && continue
    # Download the dataset (one process at a time if several nodes share the folder), or report why
    # that is impossible.
    said=$("$python" -c 'import sys, common.data as d; d.load_dataset(*sys.argv[1:3], mirror=sys.argv[3] or None)' "$dataset" "$data" \
        "$mirror" 2>&1) || fail "$(tail -n 1 <<< "${said/*UserError: /}")"
done
# An incomplete copy has another name.
if [ -n "$stage" ] && [ ! -e "$stage" ]; then
    said=$(mkdir -p "$stage.part" && cp -r "${names[@]/#/$data/}" "$stage.part" && mv "$stage.part" "$stage" 2>&1) ||
        fail "$data cannot be copied to $stage (${said##*: }): unset STAGE_DATA, or set TMPDIR to a larger disk"
fi
