"""Read checkpoints that the trainers of the research packages wrote.

They are loaded with `weights_only`, so nothing in them is executed; a pickled configuration is
ignored. Weights, EMA and the step are restored, and the optimizer's state where its order is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.engine.checkpoint import Snapshot
from tessera.engine.engine import Engine
from tessera.engine.updates import UpdateState
from tessera.run.directory import Json
from tessera.run.errors import UserError

EMA_PREFIX = "ema_model."


def read_package_checkpoint(path: Path, engine: Engine) -> Snapshot:
    """Convert a file to a snapshot for an engine whose task holds the model of that package."""
    content = load_file(path)
    model: nn.Module = engine.task.model
    weights = find_weights(content)
    own = model.state_dict()
    if set(own).isdisjoint(weights):
        raise UserError(
            f"{path} holds weights of another model: none of its {len(weights)} tensors has a name "
            f"of a {type(model).__name__}. Give the trainer a model of the class that was trained, "
            "built with the same arguments."
        )
    own_snapshot = engine.saver.snapshot(engine.global_step)
    tensors = dict(own_snapshot.tensors)
    tensors["model"] = {name: weights[name] for name in weights if name in own}
    tensors["ema"] = tensors["model"] | find_ema(content, own)
    tensors = {name: one for name, one in tensors.items() if not name.startswith("optimizer.")}
    keys: Mapping[str, str] = getattr(engine.task, "optimizer_keys", {})
    for name, state in engine.updates.items():
        stored = find_optimizer(content, keys.get(name))
        if stored is not None:
            tensors[f"optimizer.{name}"] = name_optimizer_state(stored, model, state, path)
    if not any(name.startswith("optimizer.") for name in tensors):
        engine.printer.print(
            f"{path} holds no state of the optimizer that can be restored, so it starts empty."
        )
    return Snapshot(find_step(content, path), tensors, own_snapshot.state)


def load_file(path: Path) -> Json:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the class of torch's error is one of pickle
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{path} cannot be read without running code that is in it ({reason}). It must hold "
            "only tensors and numbers: load it once with the program that wrote it, and store the "
            'weights alone, torch.save({"model": model.state_dict()}, path).'
        ) from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path} must hold a dictionary of weights, got {type(content).__name__}.")
    return dict(content)


def find_weights(content: Json) -> dict[str, Tensor]:
    """Return the weights of the model: an entry of the file, or the whole file."""
    for key in ("model", "model_state_dict"):
        if isinstance(content.get(key), Mapping):
            return dict(content[key])
    return strip_prefix(content, EMA_PREFIX) or dict(content)


def find_ema(content: Json, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = content.get("ema_model")
    ema = strip_prefix(stored, EMA_PREFIX) if isinstance(stored, Mapping) else {}
    return {name: value for name, value in ema.items() if name in own}


def strip_prefix(content: Mapping[str, object], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in content.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }


def find_optimizer(content: Json, key: str | None) -> Json | None:
    """Return the state dictionary of an optimizer; one of the packages nests it once more."""
    stored = content.get(key) if key is not None else None
    if isinstance(stored, Mapping) and "state" not in stored:
        stored = stored.get("optimizer")
    return dict(stored) if isinstance(stored, Mapping) and "state" in stored else None


def find_step(content: Json, path: Path) -> int:
    """Return the number of finished steps: an entry of the file, or the last number in its name.

    SoundStorm and MuLaN write the number of the step that was just finished into the name.
    """
    if "step" in content:
        return int(content["step"])
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) + 1 if numbers else 0


def name_optimizer_state(
    stored: Json, model: nn.Module, state: UpdateState, path: Path
) -> dict[str, Tensor]:
    """Return the state under names such as `exp_avg/layer.weight`.

    The file has the parameters by number: in the order of the model, or with weight decay the
    matrices first.
    """
    names = {id(one): name for name, one in state.update.trains.named_parameters()}
    ordered = [one for one in iterate_parameters(model) if id(one) in names]
    groups = [list(group["params"]) for group in stored["param_groups"]]
    count = sum(map(len, groups))
    if count != len(ordered):
        ordered = [one for one in ordered if one.requires_grad]
    if len(groups) > 1:
        ordered = [p for p in ordered if p.ndim >= 2] + [p for p in ordered if p.ndim < 2]
    numbers = [number for group in groups for number in group]
    if len(numbers) != len(ordered):
        raise UserError(
            f"{path} has the optimizer state of {len(numbers)} parameters, but the model has "
            f"{len(ordered)}: load with restore_optimizer=False."
        )
    tensors: dict[str, Tensor] = {}
    for number, parameter in zip(numbers, ordered, strict=True):
        for key, value in stored["state"].get(number, {}).items():
            tensor = torch.as_tensor(value, dtype=torch.float32)
            if tensor.ndim and tensor.shape != parameter.shape:
                raise UserError(
                    f"{path} has optimizer state of the shape {tuple(tensor.shape)} for a "
                    f"parameter of the shape {tuple(parameter.shape)}: load with "
                    "restore_optimizer=False."
                )
            if parameter.requires_grad:
                tensors[f"{key}/{names[id(parameter)]}"] = tensor
    return tensors


def iterate_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters in the order of the packages: those of `parameters()`, then all others.

    A model may define `parameters()` itself, without its discriminators.
    """
    first = list(model.parameters())
    known = set(map(id, first))
    return first + [one for _, one in model.named_parameters() if id(one) not in known]
