"""The public names of the engine: they and their parameters stay as they are."""

from __future__ import annotations

import inspect

import pytest

import tessera
from tessera import engine

PARAMETERS = {
    "Alarm": "name metric below above patience after hint",
    "Batch": "examples names seeds rejected scratch inputs",
    "BestMetric": "name higher_is_better",
    "EMAConfig": "decay update_after update_every",
    "Engine": "task training validation config directory on_log",
    "EngineConfig": "steps batch_size grad_accum_steps seed init_from num_workers nproc precision "
    "log_every validate_every sample_every sample_count checkpoint_every keep_last keep_every "
    "max_skipped_steps ema shard compile checkpoint_activations log_with",
    "Frozen": "network",
    "Loss": "terms metrics",
    "LossTask": "model optimizer find_unused",
    "OptimizerConfig": "name lr betas weight_decay eps max_grad_norm schedule warmup_steps "
    "warmup_start_lr min_lr_ratio decay_ratio",
    "Rows": "values",
    "TensorExamples": "data captions",
    "Update": "name trains loss optimizer start_step prepare find_unused also_train",
    "fit": "task data out validation val_fraction collate settings on_log engine",
    "load_weights": "model run weights",
}
"""Name -> its parameters. A new parameter goes at the end; removing one breaks tasks of others."""

METHODS = {
    "Engine": "open run steps evaluate checkpoint restore",
    "ProcessGroup": "all_reduce_sum all_gather_rows",
    "Source": "name item collate",
    "Task": "prepare_text eval_step compute_metrics sample",
    "TaskConfig": "build dependencies validate_data for_inference notice",
}


def test_every_public_name_is_exported_and_documented() -> None:
    assert set(engine.__all__) == PARAMETERS.keys() | METHODS.keys()
    for name in engine.__all__:
        assert inspect.getdoc(getattr(engine, name)), name
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        engine.Enginee  # noqa: B018


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_public_name_are_stable(name: str) -> None:
    assert " ".join(inspect.signature(getattr(engine, name)).parameters) == PARAMETERS[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_public_name_exist(name: str) -> None:
    for method in METHODS[name].split():
        assert callable(getattr(getattr(engine, name), method))


def test_the_most_used_names_are_exported_by_the_package_too() -> None:
    for name in ("Engine", "Frozen", "Loss", "LossTask", "Task", "Update", "fit", "load_weights"):
        assert getattr(tessera, name) is getattr(engine, name)
