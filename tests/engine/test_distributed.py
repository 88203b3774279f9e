"""Collective operations: one process gets its arguments back, two processes agree on results,
errors, tensors and gradients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera.engine.distributed import Distributed
from tessera.run.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


# ---- one process


def test_with_one_process_every_operation_returns_its_argument():
    dist = Distributed()
    tensor, items = torch.randn(3, 2), [1, "two"]
    tensors = {"model": {"weight": tensor}}
    assert dist.is_main and dist.world_size == 1
    assert dist.all_reduce_sum(tensor) is tensor and dist.all_gather_rows(tensor) is tensor
    assert dist.all_gather_json(items) is items and dist.broadcast_tensors(tensors) is tensors
    assert dist.all_reduce_any(True) is True and dist.all_reduce_any(False) is False
    assert dist.all_reduce_max(7) == 7
    assert dist.on_main(lambda: 5) == 5
    network = nn.Linear(1, 1)
    assert dist.wrap_ddp(network) is network


def test_with_one_process_errors_of_on_main_are_raised_unchanged():
    def fail() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        Distributed().on_main(fail)
    with pytest.raises(ZeroDivisionError):
        Distributed().on_main(lambda: 1 / 0)


def test_without_a_launcher_there_is_one_process():
    dist = Distributed.from_environment()
    assert (dist.rank, dist.world_size) == (0, 1)


# ---- two processes

CHILD = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from tessera.engine.distributed import Distributed
from tessera.run.errors import UserError

dist = Distributed.from_environment()
rank = dist.rank
results = {"rank": rank, "world_size": dist.world_size, "is_main": dist.is_main}

own = torch.tensor([1.0, 2.0]) * (rank + 1)
results["sum"], results["own after sum"] = dist.all_reduce_sum(own).tolist(), own.tolist()
# Of six examples rank 0 has 0, 2, 4 and rank 1 has 1, 3, 5.
rows = torch.arange(rank, 6, 2)[:, None] * torch.tensor([[1, 10]])
results["rows"] = dist.all_gather_rows(rows).tolist()
results["any"] = [dist.all_reduce_any(rank == 1), dist.all_reduce_any(False)]
results["max"] = dist.all_reduce_max(15 if rank == 1 else 2)
results["objects"] = dist.all_gather_json([f"from {rank}"] * (rank + 1))

called = []
results["result"] = dist.on_main(lambda: called.append(rank) or {"path": "found"})
results["called"] = called
def fail():
    raise UserError("an error for all processes")
try:
    dist.on_main(fail)
except UserError as error:
    results["error"] = str(error)

files = {
    "model": {
        "weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(2).bfloat16(),
        "started": torch.tensor(True),
    },
    "optimizer.model": {"step/weight": torch.tensor(12.0), "counter": torch.tensor([1, 2])},
}
received = dist.broadcast_tensors(files if dist.is_main else None)
results["broadcast"] = {
    file: {
        name: [str(tensor.dtype), list(tensor.shape), tensor.float().flatten().tolist()]
        for name, tensor in tensors.items()
    }
    for file, tensors in received.items()
}

torch.manual_seed(rank)
network = nn.Linear(2, 1, bias=False)
network.register_buffer("count", torch.zeros(()))
objective = dist.wrap_ddp(network)
network.count.fill_(rank + 5)
results["initial weight"] = network.weight.flatten().tolist()
objective(torch.tensor([[1.0, 0.0]] if rank == 0 else [[0.0, 3.0]])).sum().backward()
results["gradient"] = network.weight.grad.flatten().tolist()
results["buffer"] = network.count.item()
with objective.no_sync():
    network.weight.grad = None
    objective(torch.full((1, 2), rank + 1.0)).sum().backward()
results["local gradient"] = network.weight.grad.flatten().tolist()
Path(sys.argv[1]).write_text(json.dumps(results))
os._exit(0)  # threads of gloo may abort a process that exits normally
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two processes, which are launched only once."""
    folder, port = tmp_path_factory.mktemp("two"), free_port()
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder / f"{rank}.json")],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [child.communicate(timeout=1200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_have_different_ranks_and_one_main(two):
    assert [(one["rank"], one["world_size"], one["is_main"]) for one in two] == [
        (0, 2, True),
        (1, 2, False),
    ]


def test_a_sum_is_equal_on_both_and_keeps_its_inputs(two):
    assert [one["sum"] for one in two] == [[3.0, 6.0]] * 2
    assert [one["own after sum"] for one in two] == [[1.0, 2.0], [2.0, 4.0]]


def test_gathered_rows_have_the_order_of_the_global_batch(two):
    assert [one["rows"] for one in two] == [[[i, 10 * i] for i in range(6)]] * 2


def test_reductions_and_gathered_objects_are_equal_on_both(two):
    assert [one["any"] for one in two] == [[True, False]] * 2
    assert [one["max"] for one in two] == [15, 15]
    assert [one["objects"] for one in two] == [["from 0", "from 1", "from 1"]] * 2


def test_on_main_runs_once_and_its_result_or_error_reaches_both(two):
    assert [one["called"] for one in two] == [[0], []]
    assert [one["result"] for one in two] == [{"path": "found"}] * 2
    assert [one["error"] for one in two] == ["an error for all processes"] * 2


def test_only_the_main_process_needs_to_read_the_checkpoint(two):
    expected = {
        "model": {
            "weight": ["torch.float32", [2, 3], [0, 1, 2, 3, 4, 5]],
            "half": ["torch.bfloat16", [2], [1, 1]],
            "started": ["torch.bool", [], [1]],
        },
        "optimizer.model": {
            "step/weight": ["torch.float32", [], [12]],
            "counter": ["torch.int64", [2], [1, 2]],
        },
    }
    assert [one["broadcast"] for one in two] == [expected] * 2


def test_gradients_are_averaged_except_inside_no_sync(two):
    assert two[0]["initial weight"] == two[1]["initial weight"], "rank 0 broadcasts its weights"
    assert [one["gradient"] for one in two] == [[0.5, 1.5]] * 2
    assert [one["local gradient"] for one in two] == [[1.0, 1.0], [2.0, 2.0]]


def test_buffers_are_not_broadcast_during_training(two):
    """A broadcast at each forward pass would cost time; `commit` keeps them equal."""
    assert [one["buffer"] for one in two] == [5.0, 6.0]
