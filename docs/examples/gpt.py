"""Train a GPT of 10.9 million parameters on this project's pages, byte by byte.

    python docs/examples/gpt.py                      # a process for each GPU, or one on the CPU
    python docs/examples/gpt.py --ranks 2 --size tiny --epochs 2    # a minute on a laptop
    python docs/examples/gpt.py --resume reports/gpt/last.pt --epochs 20

bf16 where the device is fast at it, two micro-batches a step, a warm-up by step, an average of the
weights, and a metric of its own. The global batch is the same on any number of ranks, so are the
losses, up to rounding.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.training_engine import TrainingEngine, launch_distributed_training

ACCUMULATION_STEPS = 2
WARM_UP_STEPS = 100
BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class Size:
    """A model's numbers, and the sequences of a global batch."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int


SIZES = {
    "10m": Size(layers=6, heads=6, width=384, context=256, batch=48),
    "tiny": Size(layers=2, heads=2, width=32, context=32, batch=24),
}


class Block(nn.Module):
    """Causal attention, then an MLP, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, width), as the result
        batch, context, width = x.shape
        qkv = self.qkv(self.before_attention(x))
        heads = qkv.view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Logits of the next byte, (batch, context, 256), from bytes (batch, context)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


class Text(Dataset):
    """Sequences of a text: {"tokens": (context,), "next": (context,)}, ``count`` from ``first``."""

    def __init__(self, text: bytes, context: int, first: int, count: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context, self.first, self.count = context, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = (self.first + index) * self.context
        piece = self.bytes[begin : begin + self.context + 1]
        return {"tokens": piece[:-1], "next": piece[1:]}


def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Return the loss, a mean over bytes, the logits, and the number of bytes."""
    logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())
    return loss, logits, batch["next"].numel()


def in_top5(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return how many bytes are among the five likeliest, and how many there are."""
    found = logits.topk(5).indices == batch["next"].unsqueeze(2)
    return found.sum(), batch["next"].numel()


def train(rank: int, ranks: int, settings: argparse.Namespace) -> dict[str, list[float]]:
    """Train on one rank; every rank calls it. Return the history."""
    size = SIZES[settings.size]
    text = b"".join(path.read_bytes() for path in sorted(settings.text.glob("*.md")))
    steps = (len(text) - 1) // size.context // size.batch
    validated = size.batch * max(1, steps // 10)  # whole global batches, on any number of ranks
    trained = size.batch * steps - validated
    per_rank = size.batch // ACCUMULATION_STEPS // ranks

    def loader(data: Dataset, *, shuffle: bool) -> DataLoader:
        sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=settings.seed)
        return DataLoader(data, batch_size=per_rank, sampler=sampler)

    torch.manual_seed(settings.seed)
    engine = TrainingEngine(
        GPT(size),
        "cuda" if torch.cuda.is_available() else "cpu",
        distributed=ranks > 1,
        local_rank=rank,
        use_amp=not settings.fp32,
        amp_dtype=torch.bfloat16 if torch.cuda.is_available() and not settings.fp32 else None,
        use_ema=True,
        ema_decay=0.99,
        accumulation_steps=ACCUMULATION_STEPS,
        clip_norm=1.0,
        output_dir=settings.output_dir,
        experiment_name="gpt",
    )
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3, weight_decay=0.1)

    def rate(step: int) -> float:  # of 1e-3: a linear rise, then 1 / sqrt(step)
        return min((step + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (step + 1)))

    return engine.train(
        loader(Text(text, size.context, 0, trained), shuffle=True),
        loader(Text(text, size.context, trained, validated), shuffle=False),
        optimizer,
        None,  # the loss is forward_step's
        num_epochs=settings.epochs,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        scheduler_by_epoch=False,  # by step
        seed=settings.seed,
        resume=settings.resume,
        forward_step=forward_step,
        metrics={"top5": in_top5},
    )


def main() -> dict[str, list[float]]:
    """Start the ranks, and print the best epoch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    pages = Path(__file__).resolve().parents[1]
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), choices=range(9))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fp32", action="store_true", help="no mixed precision")
    parser.add_argument("--resume", type=Path, help="a last.pt or best.pt")
    parser.add_argument("--text", type=Path, default=pages, help="a folder of *.md (default: docs)")
    parser.add_argument("--output-dir", type=Path, default=Path("reports"))
    settings = parser.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    history = launch_distributed_training(train, max(1, settings.ranks), backend, settings=settings)
    best = max(history["ema_val_top5"])
    print(f"best epoch: {best:.1%} of the bytes are among the five likeliest")
    return history


if __name__ == "__main__":
    main()
