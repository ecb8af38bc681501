"""Automatic mixed precision (AMP): choose the number type of the forward pass, and apply it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def choose_amp(
    requested: bool | None,
    dtype: str | None,
    *,
    default: bool,
    device: torch.device,
    exact: bool = True,
) -> tuple[torch.dtype | None, str]:
    """Return the type for autocast (None: float32) and a notice for the user (may be empty).

    Parameters
    ----------
    requested : the flag; None means ``default`` on a GPU and float32 on a CPU.
    dtype : "fp16", "bf16", or None: fp16 on a GPU if ``exact``, else bf16. A CPU always uses bf16,
        and only if it has bf16 instructions. Without them, bf16 convolutions take 30 to 100 times
        as long as float32.
    exact : whether every step uses the exact mean gradient, which fp16's loss scaling needs.
    """
    on_gpu = device.type == "cuda"
    if requested is None:
        requested = on_gpu and default
    if not requested:
        return None, ""
    if not on_gpu:
        return _choose_on_cpu(dtype)
    if dtype is None:
        dtype = "fp16" if exact else "bf16"
    if dtype == "fp16":
        return torch.float16, ""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, ""
    if exact:
        return torch.float16, "this GPU has no fast bf16: AMP uses fp16 with a GradScaler"
    return None, (
        "this GPU has no fast bf16, and the strategy changes the gradients that fp16's loss "
        "scaling needs, so AMP is off and training runs in fp32"
    )


def _choose_on_cpu(dtype: str | None) -> tuple[torch.dtype | None, str]:
    if not cpu_has_fast_bf16():
        return None, (
            "this CPU has no bf16 instructions (AVX512-BF16 or AMX), so AMP is off and training "
            "runs in fp32"
        )
    if dtype == "fp16":
        return torch.bfloat16, "on a CPU AMP uses bf16, which needs no GradScaler"
    return torch.bfloat16, ""


def autocast(
    device: torch.device | str, dtype: torch.dtype | None
) -> AbstractContextManager[torch.autocast | None]:
    """Return torch's autocast context for a forward pass in ``dtype``; None disables it."""
    if dtype is None and not torch.is_autocast_enabled(torch.device(device).type):
        return nullcontext()  # entering torch's takes 4 us
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None)


def build_scaler(
    device: torch.device, dtype: torch.dtype | None, *, sharded: bool
) -> torch.amp.GradScaler:
    """Return the GradScaler of a training in ``dtype``, which fp16 alone needs.

    sharded : the ranks have different gradients, so they must tell each other of an overflow.
    """
    scales = dtype == torch.float16
    if not (sharded and scales):
        return torch.amp.GradScaler(device.type, enabled=scales)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # slow to import

    return ShardedGradScaler(device.type)


def precision_name(dtype: torch.dtype | None) -> str:
    """Return a forward pass's type for the user, e.g. "bfloat16"; "fp32" for None."""
    return "fp32" if dtype is None else str(dtype).removeprefix("torch.")


def cpu_has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bf16 natively, with AVX512-BF16 or AMX."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
