"""State of the calling thread that changes what a trace would record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# private torch names, tried on 2.13.0
_C = torch._C

_FULL = {"none": "ieee"}
"""A backend that nobody set computes in full precision, as one that was set to."""


@dataclass(frozen=True, slots=True)
class Ambient:
    """One reading of the thread's state, comparable and cheap.

    Gradient and inference mode are not here: they choose the mode of the call
    (`train` or `infer`), and count in a key only where code asks for them.
    """

    autocast: tuple[bool, str, bool]
    default_dtype: torch.dtype
    default_device: str
    deterministic: tuple[bool, bool]
    float32: tuple[str, str]
    sdpa: tuple[bool, bool, bool, bool]

    def items(self) -> list[tuple[str, str]]:
        """Named texts for the key."""
        enabled, dtype, cache = self.autocast
        return [
            ("autocast", f"{dtype} cache={cache}" if enabled else "off"),
            ("default_dtype", str(self.default_dtype)),
            ("default_device", self.default_device),
            ("deterministic", f"{self.deterministic[0]} warn_only={self.deterministic[1]}"),
            ("float32_precision", "matmul={} conv={}".format(*self.float32)),
            ("sdpa", "flash={} efficient={} math={} cudnn={}".format(*self.sdpa)),
        ]


def read(device_type: str) -> Ambient:
    """The state of this thread, for work on `device_type`. About 2 microseconds."""
    return Ambient(*read_tuple(device_type))


def read_tuple(
    device_type: str,
) -> tuple[
    tuple[bool, str, bool],
    torch.dtype,
    str,
    tuple[bool, bool],
    tuple[str, str],
    tuple[bool, bool, bool, bool],
]:
    """As `read`, as a bare tuple: the form that the dispatcher compares at every call."""
    enabled = torch.is_autocast_enabled(device_type)
    return (
        (
            (enabled, str(torch.get_autocast_dtype(device_type)), torch.is_autocast_cache_enabled())
            if enabled
            else (False, "", False)
        ),
        torch.get_default_dtype(),
        _default_device(),
        (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        _float32_precision("cuda" if device_type == "cuda" else "mkldnn"),
        (
            _C._get_flash_sdp_enabled(),
            _C._get_mem_efficient_sdp_enabled(),
            _C._get_math_sdp_enabled(),
            _C._get_cudnn_sdp_enabled(),
        ),
    )


def _float32_precision(backend: str) -> tuple[str, str]:
    # torch.get_float32_matmul_precision() raises once fp32_precision of a single backend was set;
    # this sees both ways of setting it.
    read = _C._get_fp32_precision_getter
    return (
        _FULL.get(found := read(backend, "matmul"), found),
        _FULL.get(found := read(backend, "conv"), found),
    )


def _default_device() -> str:
    # torch.get_default_device() pushes through Python; only a mode can change it.
    return torch.get_default_device().type if _C._len_torch_function_stack() else "cpu"


def foreign_mode() -> str | None:
    """The name of a mode that wants to see single operators, or None.

    Under a dispatch mode, a function mode other than the default-device one, a
    functorch transform or forward-mode gradients an artifact cannot stand for the
    region: its operators are not dispatched one by one.
    """
    if _C._len_torch_dispatch_stack():
        return f"dispatch mode {type(_C._get_dispatch_stack_at(_C._len_torch_dispatch_stack() - 1)).__name__}"
    for i in range(_C._len_torch_function_stack()):
        mode = type(_C._get_function_stack_at(i)).__name__
        if mode != "DeviceContext":
            return f"function mode {mode}"
    if _C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform (vmap, grad, jvp, ...)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode gradients"
    return None
