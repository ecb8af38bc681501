"""This project's PartTwo with --sync overlapped.

finds: nothing
ranks: 2 3
command: python {repo}/PartTwo/main.py --sync overlapped
    --dataset digits --model tiny --max-steps 8 --batch-size 24 --threads 1
    --master-ip {master} --master-port {port} --num-nodes {nodes} --rank {rank}
verdict: yes
"""
