"""A device that stands in for a GPU: its tensors are on the CPU, and it counts what would make the
host wait for a GPU.

`stand_in` is a device of torch's PrivateUse1 kind without kernels. Its tensors are `DeviceTensor`s,
each of which holds a CPU tensor. Every operator that gets one runs on the CPU and is recorded if a
GPU would have to finish before the host can go on: reading a value, copying to the host, a blocking
copy from the host, and operators whose output has a size that depends on values. An operator that
gets tensors of both devices raises an error, as on a GPU.

Call `register_device` once in a process of its own: other tests must not find an accelerator.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "stand_in"
SIZE_DEPENDS_ON_VALUES = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "masked_scatter",
    "masked_scatter_",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
"""Operators that read values on the host, whatever their arguments are."""
COPIES = ("_to_copy", "copy_", "_copy_from")
IN_PLACE_VIEWS = ("unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "swapaxes_")
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")

waits: list[str] = []
"""The operators that made the host wait, each with the line of the package that called it."""


def record_wait(what: str) -> None:
    frames = [one for one in traceback.extract_stack() if "/tessera/" in one.filename]
    where = f"{frames[-1].filename.partition('/tessera/')[2]}:{frames[-1].lineno}" if frames else ""
    waits.append(f"{what} at {where}")


class DeviceTensor(Tensor):
    """A tensor of the stand-in device; `on_host` is the CPU tensor that holds its values."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.on_host = inner.detach()
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def tolist(self) -> Any:
        record_wait("tolist")
        return self.on_host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_stand_in(func, args, kwargs or {})


class StandInFunctionMode(TorchFunctionMode):
    """Make `torch.tensor` on the device a copy from the host, which it is below dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        makes_tensor = func in (torch.tensor, torch.as_tensor) and device is not None
        if makes_tensor and torch.device(device).type == NAME:
            del kwargs["device"]
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(device_of())
        return func(*args, **kwargs)


def device_of() -> torch.device:
    return torch.device(NAME, 0)


class StandInMode(TorchDispatchMode):
    """Handle operators without tensor arguments, such as torch.zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == NAME:
            return run_on_stand_in(func, args, kwargs)
        return func(*args, **kwargs)


def run_on_stand_in(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    on_device = [one for one in tensors if isinstance(one, DeviceTensor)]
    on_host = [one for one in tensors if not isinstance(one, DeviceTensor)]
    source = tensors[0] if tensors else None
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if name in COPIES:
        blocking = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if isinstance(args[1] if name == "copy_" else args[0], DeviceTensor):
            to_host = to_host or (name == "copy_" and not isinstance(args[0], DeviceTensor))
            if to_host:
                record_wait(f"{name} to the host")
        elif blocking:
            record_wait(f"blocking {name} to the device")
    else:
        if on_device and any(one.ndim for one in on_host) and name not in INDEXING:
            raise RuntimeError(f"{func} got tensors of {NAME} and of the CPU.")
        if name in SIZE_DEPENDS_ON_VALUES and on_device:
            record_wait(name)
        if name == "repeat_interleave" and not kwargs.get("output_size"):
            record_wait(name)
        if name in INDEXING:
            indices = [one for one in args[1] if one is not None]
            values = args[2] if len(args) > 2 else None
            is_fill = values is not None and values.numel() == 1
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices) and not is_fill:
                record_wait(f"{name} by a boolean mask")
            if any(not isinstance(one, DeviceTensor) for one in indices):
                record_wait(f"{name} by an index on the host")
    inner = {id(one.on_host): one for one in on_device}

    def unwrap(one: Any) -> Any:
        if isinstance(one, DeviceTensor):
            return one.on_host
        if isinstance(one, torch.device) and one.type == NAME:
            return torch.device("cpu")
        return one

    if name in IN_PLACE_VIEWS:  # they change the shape of the wrapper too
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    args, kwargs = tree_map(unwrap, (args, kwargs))
    if name == "_to_copy":
        kwargs["non_blocking"] = False
    results = func(*args, **kwargs)

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) in inner:
            return inner[id(one)]
        return one if to_host else DeviceTensor(one)

    made = tree_map(wrap, results)
    if name in ("_to_copy", "detach") and not to_host:  # Module.to makes new parameters
        marks = {k: v for k, v in vars(source).items() if k not in ("on_host", "_is_param")}
        vars(made).update(marks)
    return made


class BackendModule(ModuleType):
    """What torch asks a device for."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda index: None)
    is_bf16_supported = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


def register_device() -> torch.device:
    _setup_privateuseone_for_python_backend(NAME, backend_module=BackendModule(NAME))
    return torch.device(NAME, 0)


@contextmanager
def counting_waits() -> Iterator[list[str]]:
    """Run everything on the stand-in device that names it, and collect what waits for it."""
    waits.clear()
    with StandInFunctionMode(), StandInMode():
        yield waits
