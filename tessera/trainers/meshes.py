"""Trainers for meshes: the autoencoder and the transformer of MeshGPT.

    autoencoder = MeshAutoencoderTrainer(
        MeshAutoencoder(MeshAutoencoderConfig()),
        dataset,
        num_train_steps=2000,
        batch_size=8,
        grad_accum_every=1,
        checkpoint_folder="runs/meshes-autoencoder",
    )
    autoencoder()                                       # calling a trainer trains

    vocab_size = autoencoder.model.vocab_size
    transformer = MeshTransformerTrainer(
        MeshTransformerConfig().build(vocab_size, corners=3, num_quantizers=2),
        dataset_with_texts,
        tokenizer="runs/meshes-autoencoder",
        num_train_steps=2000,
        batch_size=8,
        grad_accum_every=1,
        checkpoint_folder="runs/meshes-transformer",
    )
    transformer()

A dataset is a folder of meshes, or any object with a length whose items are tuples or dictionaries:
vertices (V, 3), faces (F, 3) or (F, 4) and, for the transformer, a text
(`trainers/in_memory_meshes.py`). The parameters are those of meshgpt-pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tessera.data.dataset import ExampleDataset, Split, Subset
from tessera.data.errors import UnreadableFile
from tessera.data.source import require_items
from tessera.engine.config import EngineConfig
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.modalities.mesh.autoencoder import MeshAutoencoder
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.generation import MeshGeneratorConfig
from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
from tessera.modalities.mesh.transformer import MeshTransformer
from tessera.recipes.registry import read_run
from tessera.run.config import Run, encode
from tessera.run.dependencies import find_dependencies
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_task
from tessera.trainers.arguments import (
    IN_MEMORY,
    build_engine_config,
    check_arguments,
    translate_ema_kwargs,
    translate_kwargs,
)
from tessera.trainers.base import AnyModel, LogFn, adopt_model
from tessera.trainers.foreign import ForeignRun, ForeignTask
from tessera.trainers.foreign_meshes import (
    ForeignMeshAutoencoderTask,
    ForeignMeshTransformerTask,
    build_meshes,
)
from tessera.trainers.in_memory_meshes import InMemoryMeshes, get_field_names
from tessera.trainers.schedulers import ScheduleArguments, parse_schedule
from tessera.trainers.tracked import TrackedTrainer

MeshSource = Sequence[object] | str | Path
"""A dataset in memory, or the path of a folder."""
OPTIMIZER_KWARGS = {"betas": "betas", "eps": "eps", "name": "name"}
"""The names that `optimizer_kwargs` may have, and the fields of OptimizerConfig; weight decay is a
parameter of its own."""


class MeshTrainer(TrackedTrainer[AnyModel]):
    """The base class of both trainers; calling one trains it."""

    tracking_method = "wandb_tracking"
    result_names = {
        "total_loss": ("model/loss",),
        "recon_loss": ("model/recon_loss", "model/coordinates"),
        "commit_loss": ("model/commit_loss", "model/commitment"),
    }

    def __call__(self, log_fn: LogFn | None = None) -> None:
        self.train(log_fn)

    def wandb_tracking(
        self, project: str, run: str | None = None, hps: Mapping[str, object] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which records are also logged to a project of Weights & Biases.

        `hps` are further settings to store with those of the run.
        """
        return self._track(project, run, hps)


class MeshAutoencoderTrainer(MeshTrainer[MeshAutoencoder]):
    """Train a mesh tokenizer.

    A step has `batch_size * grad_accum_every` meshes, divided between the processes. Validation
    evaluates the first `val_num_batches * grad_accum_every` batches of `val_dataset` every
    `val_every` steps, the same ones each time; without a `val_dataset` those of the training meshes
    with every checkpoint. Samples are made as often as checkpoints. `checkpoint_folder` is the run
    directory. Meshes of more than `max_faces` faces are skipped and listed. `workers` is the number
    of processes that load data.

    A model of another package is trained as it is if it is called like those of meshgpt-pytorch
    (`trainers/foreign_meshes.py`).
    """

    @check_arguments
    def __init__(
        self,
        model: MeshAutoencoder | nn.Module,
        dataset: MeshSource,
        num_train_steps: int,
        batch_size: int,
        grad_accum_every: int,
        val_dataset: MeshSource | None = None,
        val_every: int = 100,
        val_num_batches: int = 5,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        ema_kwargs: Mapping[str, object] | None = None,
        scheduler: Schedule | type[LRScheduler] | None = None,
        scheduler_kwargs: Mapping[str, object] | None = None,
        warmup_steps: int = 1000,
        accelerator_kwargs: Mapping[str, object] | None = None,
        optimizer_kwargs: Mapping[str, object] | None = None,
        checkpoint_every: int = 1000,
        checkpoint_folder: str | Path = "./checkpoints/mesh-autoencoder",
        data_kwargs: Sequence[str] = ("vertices", "faces", "face_edges"),
        use_wandb_tracking: bool = False,
        max_faces: int = 800,
        workers: int = 0,
    ) -> None:
        schedule = parse_schedule(scheduler, scheduler_kwargs, warmup_steps)
        optimizer = build_optimizer_config(
            schedule,
            lr=learning_rate,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            optimizer_kwargs=optimizer_kwargs,
        )
        engine = build_mesh_engine_config(
            steps=num_train_steps,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=val_every if val_dataset is not None else checkpoint_every,
            checkpoint_every=checkpoint_every,
            num_workers=workers,
            ema_kwargs=ema_kwargs,
            accelerator_kwargs=accelerator_kwargs,
        )
        num_validated = count_validated(val_num_batches, grad_accum_every, batch_size)
        self._data_kwargs = tuple(data_kwargs)
        if not isinstance(model, MeshAutoencoder):
            foreign = ForeignMeshAutoencoderTask(model, schedule.configure(optimizer))
            split = split_foreign_meshes(
                dataset, val_dataset, num_validated, data_kwargs, foreign, texts=False
            )
            arguments = {"optimizer": encode(optimizer), **schedule.settings}
            run = ForeignRun(foreign, split, engine, arguments)
            super().__init__(run, checkpoint_folder, use_wandb_tracking=use_wandb_tracking)
            return
        own_run = Run(
            recipe="meshes-autoencoder",
            task=MeshTokenizerConfig(model=model.config, optimizer=optimizer),
            data=MeshDataConfig(
                path=get_path(dataset),
                bins=model.config.bins,
                polygons=model.config.polygons,
                max_faces=max_faces,
                val_fraction=0.0,
            ),
            engine=engine,
        )
        own_split = build_split(own_run, dataset, val_dataset, num_validated, data_kwargs)
        task = build_task(own_run)
        adopt_model(task, model)
        schedule.apply(task)
        super().__init__(
            own_run,
            checkpoint_folder,
            task,
            own_split,
            extra_settings=schedule.settings,
            use_wandb_tracking=use_wandb_tracking,
        )

    @property
    def ema_tokenizer(self) -> MeshAutoencoder:
        """A copy of the autoencoder with the current EMA weights."""
        return self.ema_model

    def tokenize(self, *args: object, **kwargs: object) -> Tensor:
        """Encode meshes with the EMA weights.

        For a model of this package the argument is a sequence of items of a dataset, for another
        one the arguments are those of its own `tokenize`.

        Returns:
            Codes (B, F, K), or (B, F, K, L) of a residual quantizer. Faces are in canonical order,
            with -1 after the last face of smaller meshes.
        """
        tokenize: Callable[..., Tensor] = self._tokenize_items
        if isinstance(self.run, ForeignRun):
            tokenize = self.model.tokenize
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return tokenize(*args, **kwargs)

    def _tokenize_items(self, meshes: Sequence[object]) -> Tensor:
        assert isinstance(self.run, Run) and isinstance(self.run.data, MeshDataConfig)
        names = get_field_names(meshes, self._data_kwargs)
        dataset = InMemoryMeshes(meshes, names, self.run.data)
        examples = []
        for index in range(len(dataset)):
            try:
                examples.append(dataset.parse(index).example)
            except UnreadableFile as error:
                raise UserError(f"The mesh with index {index} cannot be used: {error}.") from None
        return self.model.tokenize(dataset.collate(examples).to(self.engine.device))


class MeshTransformerTrainer(MeshTrainer[MeshTransformer]):
    """Train a mesh transformer on the tokens of a trained autoencoder.

    `tokenizer` is the run directory of the autoencoder, which is copied into that of this run.
    Meshes are preprocessed as for the autoencoder and tokenized once, before the first step.
    `cond_drop_prob` is the probability with which a text is dropped, for guidance. All else is as
    in MeshAutoencoderTrainer.
    """

    @check_arguments
    def __init__(
        self,
        model: MeshTransformer | nn.Module,
        dataset: MeshSource,
        num_train_steps: int,
        batch_size: int,
        grad_accum_every: int,
        val_dataset: MeshSource | None = None,
        val_every: int = 1,
        val_num_batches: int = 5,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 0.5,
        ema_kwargs: Mapping[str, object] | None = None,
        scheduler: Schedule | type[LRScheduler] | None = None,
        scheduler_kwargs: Mapping[str, object] | None = None,
        warmup_steps: int = 1000,
        accelerator_kwargs: Mapping[str, object] | None = None,
        optimizer_kwargs: Mapping[str, object] | None = None,
        checkpoint_every: int = 1000,
        checkpoint_folder: str | Path = "./checkpoints/mesh-transformer",
        data_kwargs: Sequence[str] = ("vertices", "faces", "face_edges", "texts"),
        use_wandb_tracking: bool = False,
        tokenizer: str | Path | None = None,
        cond_drop_prob: float = 0.25,
        workers: int = 0,
    ) -> None:
        schedule = parse_schedule(scheduler, scheduler_kwargs, warmup_steps)
        optimizer = build_optimizer_config(
            schedule,
            lr=learning_rate,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            optimizer_kwargs=optimizer_kwargs,
        )
        engine = build_mesh_engine_config(
            steps=num_train_steps,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=val_every if val_dataset is not None else checkpoint_every,
            checkpoint_every=checkpoint_every,
            num_workers=workers,
            ema_kwargs=ema_kwargs,
            accelerator_kwargs=accelerator_kwargs,
        )
        num_validated = count_validated(val_num_batches, grad_accum_every, batch_size)
        if not isinstance(model, MeshTransformer):
            foreign = ForeignMeshTransformerTask(model, schedule.configure(optimizer))
            split = split_foreign_meshes(
                dataset, val_dataset, num_validated, data_kwargs, foreign, texts=True
            )
            arguments = {"optimizer": encode(optimizer), **schedule.settings}
            run = ForeignRun(foreign, split, engine, arguments)
            super().__init__(run, checkpoint_folder, use_wandb_tracking=use_wandb_tracking)
            return
        if tokenizer is None:
            raise UserError(
                "tokenizer is missing: a transformer of this package needs the run directory of "
                "the autoencoder whose tokens it predicts, tokenizer=RUN."
            )
        directory = RunDirectory(checkpoint_folder)
        data = tokenizer_data_config(directory, tokenizer)
        own_run = Run(
            recipe="meshes-transformer",
            task=MeshGeneratorConfig(
                tokenizer=str(tokenizer),
                model=model.config,
                cond_drop_prob=cond_drop_prob,
                optimizer=optimizer,
            ),
            data=replace(data, path=get_path(dataset), val_fraction=0.0),
            engine=engine,
        )
        own_split = build_split(own_run, dataset, val_dataset, num_validated, data_kwargs)
        task = build_task(own_run, find_dependencies(own_run, directory))
        assert isinstance(task.model, MeshTransformer)
        check_model(model, task.model)
        adopt_model(task, model)
        schedule.apply(task)
        super().__init__(
            own_run,
            checkpoint_folder,
            task,
            own_split,
            extra_settings=schedule.settings,
            use_wandb_tracking=use_wandb_tracking,
        )


# ---- configurations from the arguments


def build_optimizer_config(
    schedule: ScheduleArguments,
    *,
    lr: float,
    weight_decay: float,
    max_grad_norm: float | None,
    optimizer_kwargs: Mapping[str, object] | None,
) -> OptimizerConfig:
    return OptimizerConfig(
        lr=lr,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        **schedule.fields,
        **translate_kwargs(optimizer_kwargs, "optimizer_kwargs", OPTIMIZER_KWARGS),
    )


def build_mesh_engine_config(
    *,
    checkpoint_every: int,
    ema_kwargs: Mapping[str, object] | None,
    accelerator_kwargs: Mapping[str, object] | None,
    **settings: int,
) -> EngineConfig:
    """Build the engine configuration, with samples as often as checkpoints.

    Validation may be due at every step, and writing meshes as often would take most of the time.
    """
    config = build_engine_config(
        checkpoint_every=checkpoint_every,
        ema=translate_ema_kwargs(ema_kwargs),
        accelerate_kwargs=accelerator_kwargs,
        parameter="accelerator_kwargs",
        **settings,
    )
    return replace(config, sample_every=checkpoint_every)


def get_path(dataset: MeshSource) -> str:
    return str(dataset) if isinstance(dataset, (str, Path)) else IN_MEMORY


def count_validated(val_num_batches: int, grad_accum_every: int, batch_size: int) -> int:
    if val_num_batches < 1:
        raise UserError(
            "val_num_batches is less than 1, but the last step is always validated: use 1 or more."
        )
    return val_num_batches * grad_accum_every * batch_size


def split_foreign_meshes(
    dataset: MeshSource,
    val_dataset: MeshSource | None,
    num_validated: int,
    data_kwargs: Sequence[str],
    task: ForeignTask,
    *,
    texts: bool,
) -> Split:
    """Return all training meshes and the first `num_validated` meshes to validate on."""
    sources = [dataset] if val_dataset is None else [dataset, val_dataset]
    for source in sources:
        if isinstance(source, (str, Path)):
            raise UserError(
                f"The dataset is the folder {source}, but a model of another package takes its "
                "meshes as tensors: give a dataset with vertices and faces."
            )
    pad_id = task.model.pad_id
    built = [
        build_meshes(require_items(source), data_kwargs, pad_id, texts=texts) for source in sources
    ]
    return Split(built[0], Subset(built[-1], range(num_validated)))


def build_split(
    run: Run,
    dataset: MeshSource,
    val_dataset: MeshSource | None,
    num_validated: int,
    data_kwargs: Sequence[str],
) -> Split:
    """Return all training meshes and the first `num_validated` meshes to validate on."""
    train = build_dataset(run, dataset, data_kwargs)
    held_out = train
    if val_dataset is not None:
        held_out = build_dataset(run, val_dataset, data_kwargs)
        if not len(held_out):
            raise UserError(
                "val_dataset is empty, but validation needs meshes: add some, or leave it out to "
                "validate on the training meshes."
            )
    return Split(train, Subset(held_out, range(num_validated)))


def build_dataset(run: Run, dataset: MeshSource, data_kwargs: Sequence[str]) -> ExampleDataset:
    data = run.data
    assert isinstance(data, MeshDataConfig)
    if isinstance(dataset, (str, Path)):
        return replace(data, path=str(dataset)).full(captions=run.task.uses_captions)
    data.require_libraries()
    require_items(dataset)
    field_names = get_field_names(dataset, data_kwargs)
    is_tokenized = bool(run.task.dependencies())  # before the first step, by the autoencoder
    return InMemoryMeshes(dataset, field_names, data, keep_parsed=is_tokenized)


def tokenizer_data_config(directory: RunDirectory, tokenizer: str | Path) -> MeshDataConfig:
    """Return the data configuration of the autoencoder, of its copy if there is one."""
    copy = directory.dependencies / "tokenizer"
    run = read_run(RunDirectory(copy if copy.exists() else tokenizer))
    if not isinstance(run.data, MeshDataConfig):
        raise UserError(
            f"The run in {tokenizer} is of the recipe {run.recipe!r}, but a mesh transformer needs "
            "a mesh tokenizer: give a run of meshes-autoencoder."
        )
    return run.data.without_augmentation()


def check_model(model: MeshTransformer, expected: MeshTransformer) -> None:
    """Raise UserError unless a transformer was built for the tokens of the autoencoder."""
    built, required = describe_tokens(model), describe_tokens(expected)
    if built != required:
        raise UserError(
            f"The transformer was built for {built}, but its tokenizer has {required}: build it "
            "with the vocab_size, corners and num_quantizers of the tokenizer."
        )


def describe_tokens(model: MeshTransformer) -> str:
    return f"{model.vocab_size} codes and {model.tokens_per_position} tokens per face"
