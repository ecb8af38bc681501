"""How each command of the pages is checked: ``COMMANDS``, by the exact text of the command.

An entry is a list of checks: ``quick`` runs the command in `make test`, ``slow`` in `make
test-slow`, ``long`` in `make test-long`, each in an empty clone, in the order of the pages.
``Elsewhere`` says why the command cannot run here. In addition `make test` parses the flags of
every command.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Run the command once.

    Parameters
    ----------
    tier : "quick", "slow" or "long".
    more : flags after the command, which make it short.
    prints : a pattern that its output contains.
    cifar : whether it reads CIFAR-10.
    """

    tier: str
    more: str = ""
    prints: str = ""
    cifar: bool = False
    statuses: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Elsewhere:
    """The command does not run in a clone on one machine."""

    reason: str


def quick(more="", **rest):
    """Return a check of `make test`: seconds."""
    return Check("quick", more, **rest)


def slow(more="", **rest):
    """Return a check of `make test-slow`: less than a minute on two idle cores."""
    return Check("slow", more, **rest)


def long(more="", **rest):
    """Return a check of `make test-long`: minutes."""
    return Check("long", more, **rest)


SMALL = "--dataset digits --batch-size 16 --max-steps 2"
EQUAL = r"equal weights +yes"
FAST = "--recipe vgg11-cifar10-fast"
ON_FOUR = "--master-ip 10.0.0.1 --num-nodes 4"
IN_CLUSTER = "--master-ip {master} --num-nodes {nodes} --rank {rank}"
REFERENCE = "--calibration lab/predict/reference_calibration.json"
FAR = f"--rate 10gbit --latency 50us {REFERENCE}"
TINY_RUN = "--dataset digits --batch-size 64 --max-steps 8"
EMULATED = (
    "--compute measured --dataset digits --steps 6 --warmup 2 --sync gather_scatter all_reduce "
    "overlapped ddp"
)
PLAN = "reports/compare-2026-11-21T21-44-45"

_HERE = {
    # README.md
    "make demo": [long(prints="PartThree: ddp")],
    ".venv/bin/python PartTwo/main.py --distributed --world-size 2 --sync all_reduce --dataset "
    "digits --batch-size 64 --epochs 2": [
        quick("--batch-size 16 --max-steps 1", prints=EQUAL),
        long(prints=EQUAL),
    ],
    "source .venv/bin/activate": [quick()],
    "lab calibrate": [long(prints="calibration.json")],
    f"lab compare --nodes 1 4 --rate 1gbit {EMULATED}": [long(prints="report.html")],
    # docs/assignment.md
    "python PartOne/main.py --learning-rate 0.1 --schedule constant --no-nesterov --weight-decay "
    "1e-4 --max-steps 40": [long(prints="of 10,000 images", cifar=True)],
    f"python PartTwo/main.py --distributed --world-size 2 --sync gather_scatter {TINY_RUN} "
    "--timeline --run-name mine": [slow(prints=EQUAL)],
    f"python PartThree/main.py --distributed --world-size 2 {TINY_RUN} --timeline --run-name "
    "mine": [slow(prints=EQUAL)],
    "lab report reports/PartTwo-gather_scatter/mine reports/PartThree-ddp/mine": [
        slow(prints="report.html")
    ],
    # docs/cluster.md
    f"lab cluster run --nodes 4 --rate 200mbit -- python PartTwo/main.py --sync gather_scatter "
    f"{IN_CLUSTER} --dataset digits --batch-size 32 --max-steps 5": [long(prints=EQUAL)],
    f"lab cluster run --nodes 4 --rate 200mbit -- python PartThree/main.py {IN_CLUSTER} --dataset "
    "digits --batch-size 32 --max-steps 5": [long(prints=EQUAL)],
    # docs/auditing.md
    "lab audit -- python docs/examples/wrong_divisor.py --master-ip {master} --port {port} "
    "--num-nodes {nodes} --rank {rank}": [
        slow(prints=r"Wrong: gradients are divided by a constant(.|\n)*Speed", statuses=(1,))
    ],
    f"lab audit -- torchrun --nproc-per-node 2 PartThree/main.py {TINY_RUN}": [
        slow(prints=r"averages: yes")
    ],
    # docs/comparing.md
    "lab compare --nodes 1 2 --sync gather_scatter all_reduce ddp --dataset digits --batch-size 32 "
    "--steps 4 --warmup 1 --repeats 2": [long(prints="report.html")],
    # docs/correctness.md
    "python docs/examples/check_strategy.py": [
        slow(
            prints=r"2 ranks: equal to one process .*\n3 ranks, step 1: head.bias on rank 0",
            statuses=(1,),
        )
    ],
    ".venv/bin/python docs/examples/check_strategy.py": [
        slow(
            prints=r"2 ranks: equal to one process .*\n3 ranks, step 1: head.bias on rank 0",
            statuses=(1,),
        )
    ],
    # docs/dashboards.md
    "python PartThree/main.py --recipe resnet50-cifar100 --log-wandb --log-tensorboard": [
        long(f"{SMALL} --no-validate", prints="test accuracy")
    ],
    # docs/elastic.md
    "python PartThree/main.py --distributed --world-size 2 --dataset digits --batch-size 64 "
    "--epochs 2 --checkpoint-every 10 --run-name job1 --resume auto": [long(prints=EQUAL)],
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": [quick()],
    "torchrun --standalone --nproc-per-node 2 --max-restarts 3 PartThree/main.py --recipe "
    "resnet-cifar10-ema --checkpoint-every 100": [
        long(f"{SMALL} --no-amp --no-validate", prints=EQUAL)
    ],
    # docs/emulation.md
    f"lab compare --nodes 4 --rate 200mbit 1gbit {EMULATED}": [long(prints="report.html")],
    "python PartThree/main.py --distributed --world-size 2 --compute measured --dataset digits "
    "--max-steps 6": [long(prints="EMULATED")],
    "lab calibrate --profile my-machine": [long(prints="my-machine.json")],
    # docs/functions.md
    "python my_training.py": [long(prints="of 360 test images are right")],
    "torchrun --nproc-per-node 2 my_training.py PartOne": [
        long(prints="of 360 test images are right")
    ],
    "torchrun --nproc-per-node 2 my_training.py PartTwo": [
        slow(prints=r"Rank: 0, Epoch: 2.*\n[23]\d\d of 360 test images are right")
    ],
    # docs/kubernetes.md
    "lab cluster run --nodes 2 -- env PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={rank} "
    "PET_MASTER_ADDR={master} PET_MASTER_PORT={port} torchrun PartThree/main.py "
    f"{FAST} --dataset digits --max-steps 5 --threads 1": [long(prints=EQUAL)],
    # docs/lossy.md
    "lab compare --nodes 2 --sync all_reduce ddp_fp16 ddp_powersgd topk local_sgd --dataset digits "
    "--batch-size 64 --until-accuracy 1.0 --epochs 4": [long(prints="report.html")],
    # docs/predicting.md, docs/strategies.md
    f"lab predict --nodes 8 --rate 1gbit --latency 0.2ms {REFERENCE}": [quick(prints="bound by")],
    "lab predict --nodes 8 --rate 1gbit --latency 0.2ms --sync all": [quick(prints="bound by")],
    "lab predict --nodes 4 --rate 1gbit --latency 0.2ms": [quick(prints="bound by")],
    # docs/recipes.md and its pages
    f"python PartThree/main.py {FAST}": [long(f"{SMALL} --no-amp", prints="test accuracy")],
    f"python PartThree/main.py {FAST} --print-config": [quick(prints="learning_rate = 0.05")],
    f"python PartThree/main.py {FAST} --distributed --world-size 2": [
        slow(f"{SMALL} --no-amp", prints=EQUAL)
    ],
    f"torchrun --nproc-per-node 2 PartThree/main.py {FAST}": [
        long(f"{SMALL} --no-amp", prints=EQUAL)
    ],
    f"python -m torch.distributed.launch --nproc-per-node 2 PartThree/main.py {FAST}": [
        long(f"{SMALL} --no-amp", prints=EQUAL)
    ],
    "python PartThree/main.py --recipe resnet-cifar10-ema --distributed --world-size 4 --epochs "
    "200 --local-batch-size 128 --lr 0.1 --use-amp --use-ema": [
        long(
            "--dataset digits --local-batch-size 4 --max-steps 2 --no-amp --no-validate",
            prints=EQUAL,
        )
    ],
    "torchrun --nproc_per_node=2 PartThree/main.py --recipe wide-resnet-cifar100 --batch-size 512 "
    "--epochs 5 --base-lr 0.01 --target-accuracy 0.85 --patience 2": [
        long(f"{SMALL} --model wide_resnet16_4 --no-amp", prints=EQUAL)
    ],
    # docs/running.md
    f"python PartTwo/main.py --distributed --world-size 2 --sync all_reduce {TINY_RUN}": [
        long(prints=EQUAL)
    ],
    f"torchrun --nproc-per-node 2 PartThree/main.py {TINY_RUN}": [slow(prints=EQUAL)],
    f"part-one {TINY_RUN}": [long(prints="test accuracy")],
    f"part-two --distributed --world-size 2 --sync all_reduce {TINY_RUN}": [long(prints=EQUAL)],
    "part-three --recipe vgg11-cifar10-fast": [long(f"{SMALL} --no-amp", prints="test accuracy")],
    "lab compare --dataset digits --nodes 1 2": [long(prints="report.html")],
    f"torchrun --nproc-per-node 2 -m common.cli PartThree {TINY_RUN}": [long(prints=EQUAL)],
    "lab predict --nodes 4 --rate 1gbit --sync ddp ddp-9 ddp-auto": [
        quick(prints=r"ddp-auto takes (the default buckets|buckets of \d+ MiB)")
    ],
    # docs/scaling*.md
    f"lab predict --nodes 100000 --scaling weak {FAR}": [quick(prints="bound by")],
    f"lab predict --nodes 100000 --scaling weak {FAR} --figure docs/images/scaling-weak.png": [
        slow(prints="bound by")
    ],
    "lab predict --nodes 10000 --scaling weak --sync ddp ddp_fp16 local_sgd --bucket-mb 100 "
    f"--averaging-period 64 {FAR}": [slow(prints="bound by")],
    "lab predict --nodes 256 --batch-size 8192 --sync none ddp all_reduce_flat halving_doubling "
    f"local_sgd {FAR}": [slow(prints="bound by")],
    "lab predict --nodes 1000 --batch-size 8 --scaling weak --sync none all_reduce ddp "
    f"all_reduce_flat halving_doubling local_sgd {FAR}": [slow(prints="bound by")],
    # docs/slurm-compare.md
    "lab compare --plan --nodes 1 2 4 --sync all_reduce ddp --dataset digits --batch-size 64 "
    "--steps 5 --repeats 1": [slow(prints="sbatch --nodes=4 --array=0-4%1")],
    # docs/troubleshooting.md; doctor: 1 if something else holds the port
    "lab doctor --dataset digits": [quick(prints="scikit-learn(.|\n)*ready", statuses=(0, 1))],
    "lab explain rank0.txt rank1.txt rank2.txt": [quick(prints=r"1\. (.|\n)*cause:")],
    # benchmarks/README.md
    ".venv/bin/python benchmarks/train_step.py": [long(cifar=True)],
    ".venv/bin/python benchmarks/loader.py": [long(cifar=True)],
    ".venv/bin/python benchmarks/startup.py": [long()],
    ".venv/bin/python benchmarks/heartbeat.py": [long("--pairs 2")],
    ".venv/bin/python benchmarks/audit_overhead.py": [long("--pairs 1 --steps 2")],
    ".venv/bin/python benchmarks/sync.py": [long("--rounds 2 --pairs 2")],
    ".venv/bin/python benchmarks/cluster.py": [long("--rounds 2")],
    # docs/memory.md
    "lab compare --nodes 1 2 4 --sync ddp ddp_zero1 sharded fsdp --dataset digits --batch-size 32 "
    "--steps 3 --repeats 1 -- --opt adamw": [long(prints="report.html")],
    ".venv/bin/python benchmarks/memory.py": [
        long(
            "--models vgg11 --ranks 2 --sync ddp",
            prints=r"vgg11 \| adamw \| ddp \| 2 .* 147\.72 \| 147\.72",
        )
    ],
    "python3 benchmarks/gpu.py --out reports/gpu-dry --dry-run": [long(prints="vgg11 +ok")],
    ".venv/bin/python benchmarks/emulation.py": [long("--nodes 4 --rate 1gbit --steps 2")],
}

_ELSEWHERE = {
    "CI: .ci/run does it in a clean clone": ["make setup", "make test", "make lint"],
    "sets a variable; tests/hostile/test_store.py starts ranks with and without it": [
        "export LAB_RUN_TOKEN=$(openssl rand -hex 16)"
    ],
    "these tests are part of make test, test-slow and test-engines": [
        'python -m pytest -m "not slow" tests/faults',
        "python -m pytest -m slow tests/faults",
        "python -m pytest tests/engines/test_kubernetes.py",
        "python -m pytest -m slow tests/lab/audit/test_matrix.py "
        "tests/lab/audit/test_right_scripts.py",
    ],
    "needs a package index": ["pip install -e '.[wandb]'", "pip install -e '.[tensorboard]'"],
    "runs until you stop it": ["tensorboard --logdir reports"],
    "needs scripts of others; tests/lab/audit does the same with its own cases": [
        'for folder in submissions/*/; do (cd "$folder" && rm -f audit.json && lab audit '
        "--json audit.json -- python main.py --master-ip {master} --num-nodes {nodes} --r"
        'ank {rank}) > "$folder/audit.txt" 2>&1; echo "$? $folder $(head -1 "$folder/audi'
        't.txt")"; done',
        "python -c \"import glob, json; [print(c['status'], path, c['headline'], *(one['na"
        "me'] for one in c['findings'] if one['severity'] == 'fault')) for path in sorted"
        "(glob.glob('submissions/*/audit.json')) for c in [json.load(open(path))]]\"",
        "lab audit --ranks 2 3 4 --html audit.html --json audit.json -- torchrun --nproc-per-node "
        "{nodes} train.py",
    ],
    "needs several machines; tests/lab/cluster and tests/engines start the same on emulated ones": [
        f"python PartTwo/main.py --sync all_reduce {ON_FOUR} --rank 0",
        f"python PartTwo/main.py --sync all_reduce {ON_FOUR} --rank 1",
        "torchrun --nnodes 4 --nproc-per-node 1 --node-rank 0 --master-addr 10.0.0.1 --master-port "
        "29500 PartThree/main.py",
        "torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 10 --rdzv-backend c10d --rdzv-id "
        "job --rdzv-endpoint 10.0.0.1:29400 --local-addr 10.0.0.2 PartTwo/main.py --sync "
        "all_reduce --checkpoint-every 50",
        f"python PartThree/main.py {FAST} --master-ip 10.0.0.1 --num-nodes 2 --rank 0",
        f"python PartThree/main.py {FAST} --dist-url tcp://10.0.0.1:23456 --world-size 2 --rank 0",
        f"lab calibrate {ON_FOUR} --rank 0",
        "lab doctor --master-ip 10.0.0.1 --num-nodes 3 --rank 0",
    ],
    "needs a cluster that runs; tests/lab/cluster does it": [
        "lab cluster shell --node 2 -- ss -tn",
        "lab cluster fault --node 2 --slow 10mbit",
        "lab cluster fault --node 2 --restore",
    ],
    "needs a GPU; tests/test_gpu_run_book.py does the same on the CPU, with --dry-run": [
        "python3 benchmarks/gpu.py --out reports/gpu --data data",
        "python3 benchmarks/gpu.py --out reports/gpu --data data --recipe resnet50-cifar100-fast",
    ],
    "needs the GPUs that it names": [
        "python PartThree/main.py --recipe resnet18-transfer-cifar10 --epochs 50 "
        "--local-batch-size 32 --learning_rate 0.001 --accumulation_steps 4 --gpu_ids 0,1 "
        "--dist_url tcp://127.0.0.1:23456 --checkpoint model_checkpoint.pth",
        "torchrun --nproc_per_node=2 PartThree/main.py --recipe resnet50-cifar100 -b 128 --cuda "
        "6,7 --log-wandb",
    ],
    "needs hosts with sshd; tests/engines/test_ssh.py makes them": [
        "ssh node1 hostname -I",
        "lab launch --hosts node1,node2,node3 -- hostname -I",
        "lab launch --hosts node1,node2,node3 --check -- python PartTwo/main.py --sync "
        "gather_scatter --dataset digits --max-steps 5",
        "lab launch --hosts node1,node2,node3 -- python PartTwo/main.py --sync all_reduce "
        "--dataset digits --max-steps 5 --run-name reduced",
        "lab launch --hosts node1,node2,node3 -- torchrun --nproc-per-node 1 PartThree/main.py "
        "--dataset digits --max-steps 5 --run-name ddp",
        "lab collect",
        "lab report reports/PartTwo-all_reduce/reduced reports/PartThree-ddp/ddp",
        "lab collect --hosts node1,node2,node3 PartTwo-all_reduce/reduced",
    ],
    "needs Slurm; tests/engines/test_slurm.py and test_slurm_compare.py make it": [
        "sinfo",
        "squeue --me",
        "cat slurm-1.out",
        "cat slurm-2.out",
        "cat slurm-3.out",
        "sbatch --nodes 2 --time 10 launch/slurm-assignment.sbatch -m lab doctor --dataset digits",
        "sbatch --nodes 2 --time 10 launch/slurm.sbatch PartThree/main.py --dataset digits "
        "--epochs 2",
        "sbatch --nodes 2 --time 10 launch/slurm-assignment.sbatch PartTwo/main.py --sync "
        "all_reduce --dataset digits --epochs 2",
        "scancel --batch --signal=TERM 3",
        "lab report reports/PartThree-ddp/slurm-2 reports/PartTwo-all_reduce/slurm-3",
        "sbatch --nodes 4 --gpus-per-node 4 --cpus-per-task 32 --time 12:00:00 launch/slurm.sbatch "
        "PartThree/main.py --recipe resnet-cifar10-ema --checkpoint-every 100",
        "STAGE_DATA=1 sbatch --nodes 4 launch/slurm.sbatch PartThree/main.py",
        f"sbatch --nodes=4 --array=0-4%1 --time=0:15:00 launch/slurm-compare.sbatch {PLAN}",
        f"lab report {PLAN}",
        f"lab cluster run --nodes 2 -- python -m lab run-cell {PLAN} --run 1 {IN_CLUSTER}",
    ],
    "needs a registry and a Kubernetes cluster; test_kubernetes.py checks the files": [
        "docker build -f launch/Dockerfile -t registry.example.com/data-parallel-lab:1 .",
        "docker push registry.example.com/data-parallel-lab:1",
        "kubectl apply -f launch/volume.yaml",
        "kubectl apply -f launch/trainjob.yaml",
        "kubectl get trainjob vgg11-cifar10",
        "kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=vgg11-cifar10,"
        "batch.kubernetes.io/job-completion-index=0",
        'kubectl patch trainjob vgg11-cifar10 --type merge --patch \'{"spec":{"suspend":true}}\'',
        'kubectl patch trainjob vgg11-cifar10 --type merge --patch \'{"spec":{"suspend":false}}\'',
        "kubectl delete -f launch/trainjob.yaml",
        "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer --namespace "
        "kubeflow-system --create-namespace --version 2.3.0 --set runtimes.defaultEnabled=true",
    ],
}

COMMANDS: dict[str, list[Check | Elsewhere]] = _HERE | {
    command: [Elsewhere(reason)] for reason, group in _ELSEWHERE.items() for command in group
}
