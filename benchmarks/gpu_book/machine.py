"""What the card can do: versions, matrix products, VGG-11's convolutions one by one, copies.

A rate in a table means little without the rate that the same card reaches on the same shapes. All
rates are medians of five rounds, each of ten calls between two waits for the GPU. Single layers are
replayed as CUDA graphs. Each measurement returns its numbers and the lines that the table shows.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models import build_model
from gpu_book.measuring import (
    DTYPES,
    choose_device,
    gemm_rate,
    kernel_seconds_of,
    parser,
    seconds_of,
)
from gpu_book.summaries import show

Shape = tuple[int, ...]
Found = tuple[dict[str, Any], list[str]]


def versions(device: torch.device) -> Found:
    """Return the versions of everything that the numbers depend on."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": card.name,
            "gpus": torch.cuda.device_count(),
            "memory_bytes": card.total_memory,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found, [", ".join(f"{name} {value}" for name, value in found.items())]


def gemm(device: torch.device) -> Found:
    """Return the rate of a large matrix product in each number type."""
    rates = {name: gemm_rate(dtype, device) for name, dtype in DTYPES.items()}
    rates["tf32"] = gemm_rate(torch.float32, device, tf32=True)
    text = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in rates.items())
    return {"flops_per_second": rates}, [f"TFLOP/s at 8192: {text}"]


def layer_inputs(kind: type[nn.Module], batch_size: int) -> list[tuple[Any, Shape]]:
    """Return VGG-11's layers of one kind, each with the shape of its input."""
    found: list[tuple[Any, Shape]] = []
    with torch.device("meta"):
        model = build_model("vgg11", 10)
        for layer in model.modules():
            if isinstance(layer, kind):
                layer.register_forward_pre_hook(
                    lambda layer, inputs: found.append((layer, tuple(inputs[0].shape)))
                )
        model(torch.empty(batch_size, 3, 32, 32))
    return found


def layers(device: torch.device) -> Found:
    """Return the rate of each convolution of VGG-11 alone, forward and backward, in bf16.

    The whole network cannot be faster than these together: "all" divides the operations of all
    convolutions by the sum of their seconds.
    """
    torch.backends.cudnn.benchmark = True
    rows, operations, seconds = [], 0.0, 0.0
    for layer, shape in layer_inputs(nn.Conv2d, _batch_size(device)):
        one_operations, one_seconds = _convolution(layer, shape, device)
        operations, seconds = operations + one_operations, seconds + one_seconds
        rows.append(
            {
                "input": shape,
                "output_channels": layer.out_channels,
                "seconds": one_seconds,
                "flops_per_second": one_operations / one_seconds,
            }
        )
    text = " ".join(f"{row['flops_per_second'] / 1e12:.0f}" for row in rows)
    lines = [
        f"TFLOP/s of each, bf16, batch {shape[0]}: {text}",
        f"all together: {operations / seconds / 1e12:.1f} TFLOP/s, {1000 * seconds:.2f} ms",
    ]
    numbers = {"all_flops_per_second": operations / seconds, "all_seconds": seconds}
    return numbers | {"layers": rows}, lines


def _convolution(layer: nn.Conv2d, shape: Shape, device: torch.device) -> tuple[float, float]:
    """Return operations and seconds of forward and backward of one convolution in bf16."""
    images = torch.randn(shape, device=device, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last)
    first = layer.in_channels == 3  # its input needs no gradient
    images.requires_grad_(not first)
    conv = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1, device=device)
    conv.to(torch.bfloat16, memory_format=torch.channels_last)
    gradient = torch.randn_like(conv(images))

    def run() -> None:
        conv(images).backward(gradient)
        conv.weight.grad = conv.bias.grad = images.grad = None

    products = gradient.numel() * layer.in_channels * 9  # multiply-adds of a forward pass
    return (2 if first else 3) * 2 * products, kernel_seconds_of(run, device)


def copy(device: torch.device) -> Found:
    """Return the bandwidth of copies: within the GPU's memory, and from the host."""
    count = 2**30 if device.type == "cuda" else 2**20
    host = torch.empty(count, dtype=torch.uint8)
    source = host.to(device)
    target = torch.empty_like(source)
    rates = {"within": 2 * count / seconds_of(lambda: target.copy_(source), device)}
    rates["from_pageable"] = count / seconds_of(lambda: target.copy_(host), device, calls=2)
    if device.type == "cuda":
        pinned = host.pin_memory()
        rates["from_pinned"] = count / seconds_of(
            lambda: target.copy_(pinned, non_blocking=True), device
        )
    text = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
    return {"bytes_per_second": rates}, [f"GB/s: {text}"]


def batchnorm(device: torch.device) -> Found:
    """Return the seconds of VGG-11's BatchNorm layers with torch's own kernel and with cuDNN's.

    Forward and backward, channels_last, float32 weights as under autocast. "native" switches cuDNN
    off; where both take the same time, torch has chosen its own kernel anyway.
    """
    shapes = [shape for _, shape in layer_inputs(nn.BatchNorm2d, _batch_size(device))]
    found = {}
    for name in ("bf16", "fp16"):
        for kernel in ("default", "native"):
            with torch.backends.cudnn.flags(enabled=kernel == "default"):
                found[f"{name} {kernel}"] = sum(
                    kernel_seconds_of(_normalise(shape, DTYPES[name], device), device)
                    for shape in shapes
                )
    text = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in found.items())
    return {"seconds": found, "batch_size": shapes[0][0]}, [f"ms of all layers: {text}"]


def _normalise(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    images = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    images.requires_grad_()
    channels = shape[1]
    weight, bias = (torch.ones(channels, device=device, requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    gradient = torch.randn_like(images)

    def run() -> Tensor:
        images.grad = weight.grad = bias.grad = None
        output = functional.batch_norm(images, mean, variance, weight, bias, training=True)
        output.backward(gradient)
        return output

    return run


def _batch_size(device: torch.device) -> int:
    return 1024 if device.type == "cuda" else 2


def main() -> None:
    """Make every measurement, and print all results after each; one that fails holds its error."""
    device = choose_device(parser(__doc__).parse_args().dry_run)
    results: dict[str, Any] = {}
    lines: list[str] = []
    for measurement in (versions, gemm, layers, copy, batchnorm):
        name = measurement.__name__
        try:
            results[name], found = measurement(device)
        except Exception as error:
            results[name], found = None, [f"{type(error).__name__}: {error}"[:300]]
        lines += [f"{name}: {line}" for line in found]
        show(results, *lines)
    raise SystemExit(1 if None in results.values() else 0)


if __name__ == "__main__":
    main()
