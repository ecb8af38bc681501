"""This project's PartThree, with DDP.

finds: nothing
ranks: 2 3
command: python {repo}/PartThree/main.py
    --dataset digits --model tiny --max-steps 8 --batch-size 24 --threads 1
    --master-ip {master} --master-port {port} --num-nodes {nodes} --rank {rank}
verdict: yes
"""
