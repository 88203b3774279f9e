"""Copies of tensors to a device that do not make the host wait for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

Data = TypeVar("Data")

PINNED = "cuda"
"""The type of device to which only pinned memory is copied without waiting."""
BLOCKING = ("cpu", "mps")
"""The types of devices to which copies wait: a tensor on the CPU is read at once."""


def can_read(tensor: Tensor) -> bool:
    """Return whether values can be read at once: on the CPU, and not in a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the copy is ordered before later work of the device."""
    if tensor.device == device:
        return tensor
    if device.type == PINNED and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type not in BLOCKING)


def move_tensors(data: Data, device: torch.device | str) -> Data:
    """Copy all tensors in nested tuples, lists, dictionaries and dataclasses; other values stay."""
    device = torch.device(device)
    if isinstance(data, Tensor):
        return copy_to_device(data, device)  # type: ignore[return-value]
    if isinstance(data, Mapping):
        return {name: move_tensors(one, device) for name, one in data.items()}  # type: ignore[return-value]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_tensors(value, device) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(move_tensors(value, device) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data) if field.init]
        moved = {name: move_tensors(getattr(data, name), device) for name in names}
        return dataclasses.replace(data, **moved)
    return data
