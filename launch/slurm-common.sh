# shellcheck shell=bash
# What the Slurm scripts share, sourced by the job's shell, which runs on its first node. Order: check_job, find_master,
# check_nodes, on_each_node COMMAND, end_job.
#
# The user's environment may set PYTHON (default: .venv/bin/python, else python3), MASTER (address of the first node), REQUEUES
# (how often the job may go back to the queue by itself: 20), STAGE_DATA=1 (copy the dataset to each node's own disk, TMPDIR) and, for
# programs other than the parts, LAB_OUTPUT (default: reports), where the tasks' output goes.

set -uo pipefail

# Also Slurm's own name of one job of an array: with the bare number scancel and scontrol would take all of them.
JOB=${SLURM_JOB_ID-}
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
RESTARTS=${SLURM_RESTART_COUNT:-0}
SIGNALS=0

fail() {
    echo "error: $*" >&2
    exit 2
}

# Sets NODES, PYTHON, COMMAND (the user's, with the run's folder for a part), OUTPUT, LOGS, and what a part is trained on.
check_job() {
    [ -n "${SLURM_JOB_NODELIST-}" ] || fail "this is a job's script: start it with sbatch, e.g. sbatch --nodes 2 $0 PartThree/main.py"
    NODES=$SLURM_JOB_NUM_NODES
    case ${1-} in torchrun | python | python3) shift ;; esac
    [ $# -gt 0 ] || fail "no command: give it behind the script, e.g. sbatch --nodes 2 ${0##*/} PartThree/main.py --epochs 5"
    # Such as 1(x4): one task on each of four nodes.
    [[ $SLURM_TASKS_PER_NODE =~ ^1(\(x[0-9]+\))?$ ]] || fail "$SLURM_TASKS_PER_NODE tasks a node, and each would take a whole" \
        "node's place: leave out --ntasks and --ntasks-per-node; slurm.sbatch --nproc-per-node 2 starts two ranks a node"
    local word
    for word in "$@"; do
        case ${word//_/-} in
            --nnodes* | --num-nodes* | --world-size* | -N | --node-rank* | --rank | --rank=* | -R | --master-* | -M | --dist-url*)
                fail "$word in the command: leave it out; this job's $NODES nodes are filled in, and sbatch --nodes asks for more" ;;
        esac
    done
    if [ -z "${PYTHON-}" ]; then
        PYTHON=python3
        [ ! -x .venv/bin/python ] || PYTHON=$PWD/.venv/bin/python
    fi
    command -v "$PYTHON" > /dev/null || fail "$PYTHON is not on $(hostname): set PYTHON to one that all nodes have, or run \`make setup\`"
    COMMAND=("$@")
    OUTPUT=$(realpath -m "${LAB_OUTPUT:-reports}")
    RUN='' DATASET='' DATA='' MIRROR='' STAGE=''
    local first=0
    while [ $first -lt $# ] && [[ ${COMMAND[first]} != *Part*/main.py ]]; do first=$((first + 1)); done
    [ $first -eq $# ] || use_part "${COMMAND[@]:first}"
    LOGS=$OUTPUT/slurm-$JOB
    mkdir -p "$LOGS" || fail "$LOGS cannot be made: give --output-dir FOLDER, one that all nodes can write to"
}

# The part checks its flags, so that a wrong one ends the job here and not on each node, and says where data and output lie.
use_part() {
    local settings previous='' word
    settings=$("$PYTHON" "$@" --print-config 2>&1) || fail "$1: ${settings#error: }"
    setting() { sed -n "s/^$1 = \"\(.*\)\"$/\1/p" <<< "$settings"; }
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
    # The run's folder is named after the job, so that every start finds the one before; what an earlier job left is not taken up.
    # A run that only measures saves nothing, and begins anew.
    local name=slurm-$JOB measures=''
    ! grep -Eq '^measure_only = true|^compute = "[^r]' <<< "$settings" || measures=1
    [ -z "$measures" ] || [ "$RESTARTS" = 0 ] || name=$name-$RESTARTS
    [ -n "$RUN" ] || { RUN=$name; COMMAND+=(--run-name "$RUN"); }
    [ -n "$measures" ] || [ -z "$(compgen -G "$OUTPUT/*/$RUN/config.json")" ] || COMMAND+=(--resume auto)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # a part sets its threads itself; torchrun would say that it chose
    [ -z "${STAGE_DATA-}" ] || { STAGE=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/slurm-$JOB-data; COMMAND+=(--data-dir "$STAGE"); }
}

# Sets MASTER and PORT. The address is the one from which this node, the first, reaches another: a node's own name often stands
# for 127.0.1.1, and its name in Slurm for nothing. Slurm knows where each node can be reached.
# shellcheck disable=SC2034  # PORT is for the scripts that source this file
find_master() {
    # From the job's number, so that two jobs on one node don't collide; below the ports that the system gives away by itself.
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
            probe.connect((name, 9))  # sends nothing: the system chooses the way
            print(probe.getsockname()[0])
            break
    except OSError:
        continue' "$address" "$other")
    case $MASTER in '' | 127.*) fail "$other (NodeAddr $address) leads nowhere from $(hostname): set MASTER to this node's address," \
        "e.g. MASTER=10.0.0.1 sbatch ..." ;; esac
}

# One process a node, before the ranks: a hundred ranks would say a hundred times what is missing, or download it as often.
check_nodes() {
    local complaints status said shared=$OUTPUT/.slurm-$JOB-$RESTARTS.token
    # A job that does not go back to the queue needs no folder that all see.
    scontrol show job --oneliner "$JOB" | grep -q ' Requeue=1' || shared=''
    [ -z "$shared" ] || touch "$shared" || fail "$OUTPUT cannot be written to: give --output-dir FOLDER"
    # The text itself is sent: a node without the checkout could not read it.
    complaints=$(srun --nodes="$NODES" bash -c "$(< launch/slurm-node.sh)" slurm-node "$PWD" "$PYTHON" "$shared" "$LOGS" "$DATASET" \
        "$DATA" "$MIRROR" "$STAGE" 2>&1)
    status=$?
    rm -f "$shared"
    [ $status -ne 0 ] || return 0
    [ "$SIGNALS" -eq 0 ] || return 0
    # What the nodes say, of many a few; where they say nothing, what srun does.
    said=$(grep '^error: ' <<< "$complaints" | sort) || said=$complaints
    head -n 8 <<< "$said" >&2
    rmdir "$LOGS" 2> /dev/null
    fail "$(grep -c '^error: ' <<< "$complaints") of $NODES nodes cannot take part; nothing was trained"
}

# Removes the copies of the dataset.
remove_staged() {
    [ -z "$STAGE" ] || srun --nodes="$NODES" rm -rf "$STAGE"
}

# Runs a command as one task on each node; sets STATUS, 75 where it was asked to stop and has saved.
on_each_node() {
    local before=0 log=$LOGS/task0.log step show cores
    [ "$SIGNALS" -eq 0 ] || { STATUS=75; return; }
    [ ! -e "$log" ] || before=$(wc -l < "$log")
    touch "$log"
    # Since 22.05 a step no longer takes this over from its job, and gives a task one core: all that the job has there are meant.
    cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$cores} PYTHONUNBUFFERED=1 MASTER
    # A file a task; only the first one's, rank 0's, is shown. --wait: those that outlive the first to end by minutes wait in vain.
    # Its status goes into a file: bash may lose that of a child which ends while a signal is trapped (5.2 says -1 then).
    (
        trap : TERM
        {
            srun --nodes="$NODES" --output="$LOGS/task%t.log" --open-mode=append --wait=300 bash launch/slurm-task.sh "$@"
            ended=$?
        } 2> >(tee "$LOGS/srun-$RESTARTS.log" >&2)
        wait "$!"  # for tee: srun's last words name who failed first
        echo $ended > "$LOGS/status"
    ) &
    step=$!
    tail --lines=+$((before + 1)) --follow --pid=$step "$log" &
    show=$!
    # A trapped signal ends a wait, too.
    while kill -0 $step 2> /dev/null; do wait $step; done
    STATUS=$(cat "$LOGS/status" 2> /dev/null) || STATUS=1
    rm -f "$LOGS/status"
    # A task ends with 143 where the signal met it before slurm-task.sh could trap it.
    [ "$SIGNALS" -eq 0 ] || [ "$STATUS" -ne 143 ] || STATUS=75
    wait $show
    remove_staged
}

# Whether Slurm itself is ending the job: it was cancelled, preempted or requeued. Then Slurm has told the ranks, too.
slurm_ends_it() {
    case $(squeue --noheader --format=%T --job "$JOB") in
        CANCELLED | COMPLETING | NODE_FAIL | PENDING | PREEMPTED | REQUEUED | TIMEOUT) return 0 ;;
    esac
    return 1
}

# Slurm asks this shell to stop; it passes that on to the tasks, which save at the end of a step.
pass_on() {
    SIGNALS=$((SIGNALS + 1))
    echo "SIGTERM: the ranks are asked to save and stop"
    # While Slurm ends the job, scancel would be refused, and try again for a minute.
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

# By the job itself: RequeueExit=75 is a setting that few clusters have, and knows no limit.
go_on_later() {
    local most=${REQUEUES:-20} how="to go on, sbatch the same command${RUN:+ with --run-name $RUN}"
    ! slurm_ends_it || { echo "stopped and saved; Slurm has cancelled the job, or starts it again by itself; $how"; exit 75; }
    [ "$RESTARTS" -lt "$most" ] ||
        { echo "error: stopped and saved; the job has gone back to the queue $most times (REQUEUES); $how" >&2; exit 1; }
    echo "stopped and saved; back to the queue, time $((RESTARTS + 1)) of at most $most"
    # It ends this shell, too; one that ended by itself could be taken for the end of the job.
    trap - TERM
    scontrol requeue "$JOB" && sleep 600
    echo "error: Slurm does not take the job back; $how" >&2
    exit 75
}

# The last words of the task that srun named first; rank 0's have been shown.
tell_first_failure() {
    local task
    task=$(sed -n 's/^srun: error: .*tasks\? \([0-9]*\).*/\1/p' "$LOGS/srun-$RESTARTS.log" | head -n 1)
    [ "${task:-0}" = 0 ] || [ ! -e "$LOGS/task$task.log" ] ||
        { echo "task $task, which ended first, wrote:"; tail --lines=15 "$LOGS/task$task.log"; } >&2
    echo "error: the job failed with status $STATUS; all tasks' output: $LOGS; the likely cause: lab explain $LOGS/*.log" >&2
}
