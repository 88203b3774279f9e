"""How processes come together: alone everything is as it was; two agree on sums, rows, answers,
refusals and weights."""

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
from tessera.run.directory import UserError

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------------- alone


def test_alone_everything_comes_back_as_it_was_given():
    alone = Distributed()
    tensor, items = torch.randn(3, 2), [1, "two"]
    tensors = {"model": {"weight": tensor}}
    assert alone.main and alone.world_size == 1
    assert alone.sum(tensor) is tensor and alone.rows(tensor) is tensor
    assert alone.lists(items) is items and alone.handed_out(tensors) is tensors
    assert alone.any(True) is True and alone.any(False) is False and alone.largest(7) == 7
    assert alone.on_main(lambda: 5) == 5
    network = nn.Linear(1, 1)
    assert alone.wrapped(network) is network


def test_alone_a_refusal_or_an_accident_passes_through():
    def refuse() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        Distributed().on_main(refuse)
    with pytest.raises(ZeroDivisionError):
        Distributed().on_main(lambda: 1 / 0)


def test_without_a_launcher_a_run_is_alone():
    here = Distributed.from_environment()
    assert (here.rank, here.world_size) == (0, 1)


# --------------------------------------------------------------------------------------------------------------- two

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from tessera.engine.distributed import Processes
from tessera.run.directory import Refused
from tessera.cli.launch import leave

here = Processes.of_this_run()
rank = here.rank
told = {"rank": rank, "processes": here.processes, "main": here.main}

own = torch.tensor([1.0, 2.0]) * (rank + 1)
told["sum"], told["own after sum"] = here.sum(own).tolist(), own.tolist()
# Six examples dealt like cards: rank 0 holds 0, 2, 4 and rank 1 holds 1, 3, 5.
told["rows"] = here.rows(torch.arange(rank, 6, 2)[:, None] * torch.tensor([[1, 10]])).tolist()
told["any"] = [here.any(rank == 1), here.any(False)]
told["largest"] = here.largest(15 if rank == 1 else 2)
told["lists"] = here.lists([f"from {rank}"] * (rank + 1))

acted = []
told["answer"] = here.main_does(lambda: acted.append(rank) or {"path": "found"})
told["acted"] = acted
def refuse():
    raise Refused("a letter to everybody")
try:
    here.main_does(refuse)
except Refused as refused:
    told["refusal"] = str(refused)

files = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2).bfloat16(), "started": torch.tensor(True)},
    "optimizer.model": {"step/weight": torch.tensor(12.0), "counter": torch.tensor([1, 2])},
}
handed = here.handed_out(files if here.main else None)
told["handed out"] = {
    file: {name: [str(tensor.dtype), list(tensor.shape), tensor.float().flatten().tolist()] for name, tensor in tensors.items()}
    for file, tensors in handed.items()
}

torch.manual_seed(rank)
network = nn.Linear(2, 1, bias=False)
network.register_buffer("seen", torch.zeros(()))
objective = here.wrapped(network)
network.seen.fill_(rank + 5)
told["start"] = network.weight.flatten().tolist()
objective(torch.tensor([[1.0, 0.0]]) if rank == 0 else torch.tensor([[0.0, 3.0]])).sum().backward()
told["gradient"] = network.weight.grad.flatten().tolist()
told["buffer"] = network.seen.item()
with objective.no_sync():
    network.weight.grad = None
    objective(torch.full((1, 2), rank + 1.0)).sum().backward()
told["gradient apart"] = network.weight.grad.flatten().tolist()
Path(sys.argv[1]).write_text(json.dumps(told))
leave(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found out, in one launch: starting them is what costs."""
    place, port = tmp_path_factory.mktemp("two"), free_port()
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(place / f"{rank}.json")],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_know_each_other(two):
    assert [(one["rank"], one["processes"], one["main"]) for one in two] == [
        (0, 2, True),
        (1, 2, False),
    ]


def test_a_sum_is_the_same_on_both_and_leaves_its_parts_alone(two):
    assert [one["sum"] for one in two] == [[3.0, 6.0]] * 2
    assert [one["own after sum"] for one in two] == [[1.0, 2.0], [2.0, 4.0]]


def test_rows_come_back_in_the_order_of_the_global_batch(two):
    assert [one["rows"] for one in two] == [[[i, 10 * i] for i in range(6)]] * 2


def test_both_hear_the_same_answer(two):
    assert [one["any"] for one in two] == [[True, False]] * 2
    assert [one["largest"] for one in two] == [15, 15]
    assert [one["lists"] for one in two] == [["from 0", "from 1", "from 1"]] * 2


def test_only_the_main_process_acts_and_its_answer_or_refusal_is_everybodys(two):
    assert [one["acted"] for one in two] == [[0], []]
    assert [one["answer"] for one in two] == [{"path": "found"}] * 2
    assert [one["refusal"] for one in two] == ["a letter to everybody"] * 2


def test_only_the_main_process_needs_to_have_read_the_checkpoint(two):
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
    assert [one["handed out"] for one in two] == [expected] * 2


def test_gradients_are_averaged_over_both_unless_they_wait(two):
    assert two[0]["start"] == two[1]["start"], "replicas start from the main process's weights"
    assert [one["gradient"] for one in two] == [[0.5, 1.5]] * 2
    assert [one["gradient apart"] for one in two] == [[1.0, 1.0], [2.0, 2.0]]


def test_buffers_are_left_alone_during_training(two):
    """DDP would send the main process's at each forward, which costs time; `commit` keeps them
    equal."""
    assert [one["buffer"] for one in two] == [5.0, 6.0]
