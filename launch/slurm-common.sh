# shellcheck shell=bash
# Functions that the Slurm scripts share. The job's shell, on the job's first node, sources this
# file and calls them in this order: check_job, find_master, check_nodes, on_each_node COMMAND,
# end_job.
#
# The user's environment may set:
#   PYTHON        default: .venv/bin/python, else python3
#   MASTER        address of the first node
#   REQUEUES      how often the job may requeue itself (default: 20)
#   LAB_RUN_TOKEN  the run's token (default: a new one)
#   STAGE_DATA=1  copy the dataset to each node's own disk, TMPDIR
#   LAB_OUTPUT    for programs other than the parts: where the tasks' output goes (default: reports)

set -uo pipefail

# JOB also names a single job of an array: with the bare number, scancel and scontrol would act on
# the whole array.
JOB=${SLURM_JOB_ID-}
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || JOB=${SLURM_ARRAY_JOB_ID-}_$SLURM_ARRAY_TASK_ID
RESTARTS=${SLURM_RESTART_COUNT:-0}
SIGNALS=0

fail() {
    echo "error: $*" >&2
    exit 2
}

# need_number NAME LEAST [DEFAULT]: refuses a variable of Slurm that is no number. Bash would run
# parts of it where it computes with it.
need_number() {
    local value=${!1:-${3-}}
    [[ $value =~ ^(0|[1-9][0-9]{0,9})$ && $value -ge $2 ]] ||
        fail "Slurm's variable $1 is '$value', but it must be a whole number of at least $2: start the job with sbatch and leave Slurm's variables as they are"
}

# Sets NODES, PYTHON, COMMAND (the user's, with the run's folder for a part), OUTPUT, LOGS, and the
# dataset of a part.
check_job() {
    [ -n "${SLURM_JOB_NODELIST-}" ] || fail "this script runs as a Slurm job: start it with sbatch, e.g. sbatch --nodes 2 $0 PartThree/main.py"
    need_number SLURM_JOB_ID 1
    need_number SLURM_JOB_NUM_NODES 1
    need_number SLURM_RESTART_COUNT 0 0
    [[ $JOB =~ ^[0-9]+(_[0-9]+)?$ ]] || fail "the job's number is $JOB, but it must be like 7 or 7_1: start the job with sbatch and leave Slurm's variables as they are"
    NODES=$SLURM_JOB_NUM_NODES
    case ${1-} in torchrun | python | python3) shift ;; esac
    [ $# -gt 0 ] || fail "no command: add it after the script's name, e.g. sbatch --nodes 2 ${0##*/} PartThree/main.py --epochs 5"
    # The variable must look like 1(x4): one task on each of four nodes.
    local tasks=${SLURM_TASKS_PER_NODE:-no number of}
    [[ $tasks =~ ^1(\(x[0-9]+\))?$ ]] || fail "$tasks tasks per node, but this script needs one:" \
        "remove --ntasks and --ntasks-per-node; slurm.sbatch --nproc-per-node 2 starts two ranks per node"
    local word
    for word in "$@"; do
        case ${word//_/-} in
            --nnodes* | --num-nodes* | --world-size* | -N | --node-rank* | --rank | --rank=* | -R | --master-* | -M | --dist-url*)
                fail "$word in the command: remove it; this script fills in the job's $NODES nodes, and sbatch --nodes sets their number" ;;
        esac
    done
    if [ -z "${PYTHON-}" ]; then
        PYTHON=python3
        [ ! -x .venv/bin/python ] || PYTHON=$PWD/.venv/bin/python
    fi
    command -v "$PYTHON" > /dev/null || fail "$PYTHON is not on $(hostname): set PYTHON to an interpreter that all nodes have, or run \`make setup\`"
    COMMAND=("$@")
    OUTPUT=$(realpath -m "${LAB_OUTPUT:-reports}")
    # The secret by which rank 0 knows the job's ranks: new at every start, and in no file. srun
    # gives the tasks this shell's environment.
    export LAB_RUN_TOKEN=${LAB_RUN_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
    RUN='' DATASET='' DATA='' MIRROR='' STAGE=''
    local first=0
    while [ $first -lt $# ] && [[ ${COMMAND[first]} != *Part*/main.py ]]; do first=$((first + 1)); done
    [ $first -eq $# ] || use_part "${COMMAND[@]:first}"
    LOGS=$OUTPUT/slurm-$JOB
    # After a backslash, srun would not replace %t by the task's number.
    [[ $LOGS != *\\* ]] || fail "$LOGS has a backslash: give --output-dir a folder without one"
    mkdir -p "$LOGS" || fail "$LOGS cannot be created: give --output-dir FOLDER, a folder that all nodes can write to"
}

# Lets the part check its flags, so that a wrong flag ends the job here and not on each node. The
# part also prints the folders of data and output.
use_part() {
    local settings previous='' word
    settings=$("$PYTHON" "$@" --print-config 2>&1) || fail "$1: ${settings#error: }"
    # The values are written as in JSON: one line each, with quotes and newlines escaped.
    setting() {
        local value
        value=$(sed -n "s/^$1 = \(\".*\"\)$/\1/p" <<< "$settings")
        [ -z "$value" ] || "$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1]), end="")' "$value"
    }
    DATASET=$(setting dataset)
    DATA=$(setting data_dir)
    MIRROR=$(setting mirror)
    DATA=$(realpath -m "${DATA:-data}")
    OUTPUT=$(setting output_dir)
    OUTPUT=$(realpath -m "${OUTPUT:-reports}")
    for word in "$@"; do
        case $previous in --run-name | --run_name) RUN=$word ;; esac
        case $word in --run-name=* | --run_name=*) RUN=${word#*=} ;; esac
        previous=$word
    done
    # Name the run's folder after the job, so that every start of this job resumes from the previous
    # one, and never from another job's run. A run that only measures saves nothing and starts
    # again.
    local name=slurm-$JOB measures=''
    ! grep -Eq '^measure_only = true|^compute = "[^r]' <<< "$settings" || measures=1
    [ -z "$measures" ] || [ "$RESTARTS" = 0 ] || name=$name-$RESTARTS
    [ -n "$RUN" ] || { RUN=$name; COMMAND+=(--run-name "$RUN"); }
    for word in "$OUTPUT"/*/"$RUN"/config.json; do
        [ -n "$measures" ] || [ ! -e "$word" ] || { COMMAND+=(--resume auto); break; }
    done
    # A part sets its threads itself; without this, torchrun prints a warning.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    [ -z "${STAGE_DATA-}" ] || { STAGE=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/slurm-$JOB-data; COMMAND+=(--data-dir "$STAGE"); }
}

# Sets MASTER and PORT. MASTER is the address from which this node, the first, reaches another node:
# a node's host name often resolves to 127.0.1.1, and its name in Slurm may not resolve at all.
# Slurm knows the address of each node.
# shellcheck disable=SC2034  # PORT is for the scripts that source this file
find_master() {
    # Derive the port from the job's number, so that two jobs on one node do not collide. It is
    # below the ports that the system assigns itself.
    PORT=$((10000 + SLURM_JOB_ID % 20000))
    [ -z "${MASTER-}" ] || return 0
    MASTER=127.0.0.1
    [ "$NODES" -gt 1 ] || return 0
    local other address
    other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)
    address=$(scontrol show node --oneliner "$other" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    MASTER=$("$PYTHON" -c '
import socket, sys
for name in sys.argv[1:]:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing: the system only chooses the route
            print(probe.getsockname()[0])
            break
    except OSError:
        continue' "$address" "$other")
    case $MASTER in '' | 127.*) fail "$(hostname) finds no route to $other (NodeAddr $address): set MASTER to this node's address," \
        "e.g. MASTER=10.0.0.1 sbatch ..." ;; esac
}

# Runs one process per node before the ranks start. Otherwise a hundred ranks would each report what
# is missing, or each download it.
check_nodes() {
    local complaints status said shared=$OUTPUT/.slurm-$JOB-$RESTARTS.token
    # A job that cannot be requeued needs no folder that all nodes see.
    scontrol show job --oneliner "$JOB" | grep -q ' Requeue=1' || shared=''
    [ -z "$shared" ] || touch "$shared" || fail "$OUTPUT cannot be written to: give --output-dir FOLDER"
    # Send the script's text, since a node without the checkout could not read the file.
    complaints=$(srun --nodes="$NODES" bash -c "$(< launch/slurm-node.sh)" slurm-node "$PWD" "$PYTHON" "$shared" "$LOGS" "$DATASET" \
        "$DATA" "$MIRROR" "$STAGE" 2>&1)
    status=$?
    rm -f "$shared"
    [ $status -ne 0 ] || return 0
    [ "$SIGNALS" -eq 0 ] || return 0
    # Show at most eight of the nodes' errors, or srun's output if the nodes report none.
    said=$(grep '^error: ' <<< "$complaints" | sort) || said=$complaints
    head -n 8 <<< "$said" >&2
    rmdir "$LOGS" 2> /dev/null
    fail "$(grep -c '^error: ' <<< "$complaints") of $NODES nodes cannot take part; nothing was trained"
}

# Removes the copies of the dataset.
remove_staged() {
    [ -z "$STAGE" ] || srun --nodes="$NODES" rm -rf "$STAGE"
}

# Runs a command as one task on each node. Sets STATUS: 75 if it was asked to stop and has saved.
on_each_node() {
    local before=0 log=$LOGS/task0.log step show cores
    [ "$SIGNALS" -eq 0 ] || { STATUS=75; return; }
    [ ! -e "$log" ] || before=$(wc -l < "$log")
    touch "$log"
    # Since Slurm 22.05 a step no longer takes this from its job and gives a task only one core; a
    # task needs all cores that the job has on the node.
    cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$cores} PYTHONUNBUFFERED=1 MASTER
    # Each task has its own file; only that of the first task, rank 0, is shown. --wait=300 ends
    # tasks that still run 300 s after the first task ended, since they wait in vain. The status
    # goes into a file, since bash may lose the status of a child that ends while bash handles a
    # signal (5.2 then returns -1).
    (
        trap : TERM
        {
            srun --nodes="$NODES" --output="${LOGS//%/%%}/task%t.log" --open-mode=append --wait=300 bash launch/slurm-task.sh "$@"
            ended=$?
        } 2> >(tee "$LOGS/srun-$RESTARTS.log" >&2)
        wait "$!"  # for tee: the end of srun's output names the task that failed first
        echo $ended > "$LOGS/status"
    ) &
    step=$!
    tail --lines=+$((before + 1)) --follow --pid=$step "$log" &
    show=$!
    # A trapped signal also ends a wait.
    while kill -0 $step 2> /dev/null; do wait $step; done
    STATUS=$(cat "$LOGS/status" 2> /dev/null) || STATUS=1
    rm -f "$LOGS/status"
    # A task exits with 143 if the signal arrived before slurm-task.sh could trap it.
    [ "$SIGNALS" -eq 0 ] || [ "$STATUS" -ne 143 ] || STATUS=75
    wait $show
    remove_staged
}

# Succeeds if Slurm itself is ending the job (cancelled, preempted or requeued). Slurm has then also
# sent the signal to the ranks.
slurm_ends_it() {
    case $(squeue --noheader --format=%T --job "$JOB") in
        CANCELLED | COMPLETING | NODE_FAIL | PENDING | PREEMPTED | REQUEUED | TIMEOUT) return 0 ;;
    esac
    return 1
}

# Slurm asks this shell to stop. The shell passes the signal on to the tasks, which save at the end
# of a step.
pass_on() {
    SIGNALS=$((SIGNALS + 1))
    echo "SIGTERM: the ranks save a checkpoint and stop"
    # While Slurm ends the job, it would refuse scancel, which would retry for a minute.
    slurm_ends_it || scancel --signal=TERM "$JOB" 2> /dev/null || true
}
trap pass_on TERM

end_job() {
    case $STATUS in
        0) exit 0 ;;
        75) go_on_later ;;
    esac
    tell_first_failure
    exit "$STATUS"
}

# Requeues the job from here, since few clusters set RequeueExit=75, which also has no limit.
go_on_later() {
    local most=${REQUEUES:-20} how="to resume, sbatch the same command${RUN:+ with --run-name $RUN}"
    ! slurm_ends_it || { echo "stopped after saving; Slurm has cancelled the job, or restarts it by itself; $how"; exit 75; }
    [ "$RESTARTS" -lt "$most" ] ||
        { echo "error: stopped after saving; the job has used all its requeues (REQUEUES=$most); $how" >&2; exit 1; }
    echo "stopped after saving; requeued, $((RESTARTS + 1)) of at most $most times"
    # Requeueing also ends this shell. If the shell exited first, Slurm could count the job as
    # ended.
    trap - TERM
    scontrol requeue "$JOB" && sleep 600
    echo "error: Slurm refused to requeue the job; $how" >&2
    exit 75
}

# Shows the end of the output of the task that srun named first; rank 0's is already shown.
tell_first_failure() {
    local task
    task=$(sed -n 's/^srun: error: .*tasks\? \([0-9]*\).*/\1/p' "$LOGS/srun-$RESTARTS.log" | head -n 1)
    [ "${task:-0}" = 0 ] || [ ! -e "$LOGS/task$task.log" ] ||
        { echo "task $task failed first; the end of its output:"; tail --lines=15 "$LOGS/task$task.log"; } >&2
    echo "error: the job failed with status $STATUS; output of all tasks: $LOGS; for the likely cause, run lab explain $(printf %q "$LOGS")/*.log" >&2
}
