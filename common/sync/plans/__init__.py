"""What a step of each strategy sends and what a rank holds: one file a family of plans. No torch.

base.py is the contract. A plan states its messages in lines (lines.py) for each piece of the
gradients (pieces.py); it belongs to one strategy or to several that send the same.
"""
