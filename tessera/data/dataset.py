"""Datasets: files of a folder or synthetic examples, their split, and the base of data
configurations.

A dataset is indexed by integers. `item(index, rng)` returns one example, everything random about it
drawn from `rng`, and `collate` makes a batch of several. Whether an example is held out depends on
its name alone, so a folder can grow without moving a held-out file to the training set.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from tessera.data.arrays import is_array
from tessera.data.collection import FileCollection
from tessera.data.discovery import SourceOptions, find_files
from tessera.data.errors import guard_reading
from tessera.data.split import group_names, read_groups, release_freed_memory, split_names
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:  # datasets can be listed and inspected without torch
    from tessera.data.sample_metrics import SampleMetric
    from tessera.engine.task import Examples

Example = TypeVar("Example")

LARGE = 50_000
"""The number of files from which on listing them leaves much memory that is free, but not returned
to the system."""
FIRST_HELD_OUT = 1 << 32
"""The number of the first held-out synthetic example, far beyond those of the training set."""


class ExampleDataset(Generic[Example]):
    """Base class of datasets."""

    num_without_caption: int = 0
    """The number of examples left out because they have no caption, where captions are needed."""
    reads_files: bool = False
    """Whether examples are read from files, whose content may cause any error."""

    @property
    def notices(self) -> Sequence[str]:
        """What cannot be used of the data as a whole, in sentences."""
        return ()

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def item(self, index: int, rng: np.random.Generator) -> Example:
        """Return one example, or raise UnreadableFile."""
        raise NotImplementedError

    def collate(self, examples: list[Example]) -> Examples:
        raise NotImplementedError

    def location(self, index: int) -> str:
        """Return what identifies an example in error messages: its name, or the path of its
        file."""
        return self.name(index)

    def signature(self, index: int) -> str:
        """Return a string that changes when the example does."""
        raise NotImplementedError

    def all_captions(self, index: int) -> list[str]:
        """Return all captions of an example, without opening its file."""
        return []

    def caption(self, index: int) -> str:
        """Return the first caption of an example, or ""."""
        return next(iter(self.all_captions(index)), "")

    def sample_caption(self, index: int, rng: np.random.Generator) -> str:
        """Return one caption; only if there are several is a number drawn from `rng`."""
        return choose_caption(self.all_captions(index), rng)

    def classes(self) -> list[str]:
        """Return the class names if the captions are names of folders, else nothing."""
        return []

    def without_captions(self) -> Self:
        """Return the same dataset with empty captions; no caption file is opened."""
        return self


def read_item(dataset: ExampleDataset[Example], index: int, rng: np.random.Generator) -> Example:
    """Return one example; raise UnreadableFile for every error that the content of a file causes.

    This is the only place from which examples are loaded for batches. Parsers raise nearly every
    type of exception for damaged files, and one file must not end a run. Errors of data in memory
    are defects and keep their traceback.
    """
    if not dataset.reads_files:
        return dataset.item(index, rng)
    with guard_reading(dataset.location(index)):
        return dataset.item(index, rng)


def choose_caption(captions: list[str], rng: np.random.Generator) -> str:
    if len(captions) > 1:
        return captions[int(rng.integers(len(captions)))]
    return "".join(captions)


@dataclass(frozen=True)
class Extent:
    """How long a medium with a time axis is."""

    length: int
    """The number of samples or frames."""
    rate_hz: float
    """Samples or frames per second."""

    @property
    def seconds(self) -> float:
        return self.length / self.rate_hz


@dataclass(frozen=True)
class Split:
    train: ExampleDataset
    """The training set, augmented as its configuration specifies."""
    validation: ExampleDataset
    """The held-out set, never augmented."""


class Subset(ExampleDataset[Example]):
    """Some examples of a dataset."""

    def __init__(self, dataset: ExampleDataset[Example], indices: Iterable[int]):
        self.dataset = dataset
        self.indices = [i for i in indices if i < len(dataset)]
        self.num_without_caption = dataset.num_without_caption
        self.reads_files = dataset.reads_files

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.dataset.name(self.indices[index])

    def location(self, index: int) -> str:
        return self.dataset.location(self.indices[index])

    def all_captions(self, index: int) -> list[str]:
        return self.dataset.all_captions(self.indices[index])

    def caption(self, index: int) -> str:
        return self.dataset.caption(self.indices[index])

    def classes(self) -> list[str]:
        return self.dataset.classes()

    def signature(self, index: int) -> str:
        return self.dataset.signature(self.indices[index])

    def item(self, index: int, rng: np.random.Generator) -> Example:
        return self.dataset.item(self.indices[index], rng)

    def collate(self, examples: list[Example]) -> Examples:
        return self.dataset.collate(examples)

    def without_captions(self) -> Self:
        return type(self)(self.dataset.without_captions(), self.indices)


@dataclass(frozen=True)
class FileDataset(ExampleDataset[Example]):
    """Files, with or without their captions; a modality adds `item`."""

    files: FileCollection
    config: DataConfig
    reads_files = True
    piece_length: ClassVar[int | None] = None
    """The samples or frames that are loaded at a time of a whole file; None for media without a
    time axis."""

    @property
    def names(self) -> Sequence[str]:
        return self.files.names

    def __len__(self) -> int:
        return len(self.files)

    @property
    def notices(self) -> Sequence[str]:
        return self.files.notices

    def select(self, indices: Iterable[int]) -> Self:
        return replace(self, files=self.files.select(indices))

    def name(self, index: int) -> str:
        return self.files.names[index]

    def groups(self, group_by: str, flag: str) -> dict[str, str]:
        """Return the group of each file by its name; `flag` is named in errors."""
        return dict(zip(self.names, read_groups(self.files, group_by, flag), strict=True))

    def location(self, index: int) -> str:
        return str(self.files.file(index))

    def extent(self, index: int) -> Extent:
        """Return the length of a file by its header, at the rate of the data."""
        raise NotImplementedError

    def declared_extent(self, index: int) -> Extent:
        """Return the extent that a file would have if it was not cut short."""
        return self.extent(index)

    def load_piece(self, index: int, start: int, count: int) -> Example:
        """Load `count` samples or frames from `start` on, preprocessed; fewer at the end."""
        raise NotImplementedError

    def all_captions(self, index: int) -> list[str]:
        return self.files.captions(index)

    def classes(self) -> list[str]:
        return self.files.classes()

    def with_captions(self) -> Self:
        return replace(self, files=self.files.with_captions())

    def without_captions(self) -> Self:
        return replace(self, files=self.files.without_captions())

    def collate(self, examples: list[Example]) -> Examples:
        return self.config.collate(examples)

    def signature(self, index: int) -> str:
        """Return size and modification time; of a folder of frames, those of all frames."""
        return self.files.signature(index)


@dataclass(frozen=True)
class SyntheticDataset(ExampleDataset[Example]):
    """Synthetic examples number `first` to `first + count - 1`; a modality generates them."""

    count: int
    _: KW_ONLY
    seed: int = 0
    first: int = 0

    def __len__(self) -> int:
        return self.count

    def number(self, index: int) -> int:
        return self.first + index

    def name(self, index: int) -> str:
        return f"synthetic-{self.number(index):06d}"

    def caption(self, index: int) -> str:
        raise NotImplementedError

    def all_captions(self, index: int) -> list[str]:
        return [self.caption(index)]


@dataclass(frozen=True)
class Proposal:
    """Settings of the data that suit the files of a folder."""

    settings: dict[str, object]
    reason: str
    """What was found in the files: the beginning of a sentence that names the settings."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Base class of data configurations: a folder of files, or synthetic data.

    Subclasses declare the fields that can be set, because their order is that of the flags and of
    config.json. Only those of where files are read from are fields here, and the first of all of
    them; the other values are used for those that a subclass leaves out.
    """

    path: str | None = None
    """The folder, or None for synthetic data."""
    columns: tuple[str, ...] = ()
    """The columns of a table to read: first that of the files, then those of their captions. By
    default they are chosen by their types and names."""
    download: bool = False
    """Download data at http, https or s3 addresses to the local cache. Without it, only what is
    there already is read."""
    val_fraction = 0.05
    split_seed = 0
    group_by = "file"
    balance_by = "file"
    num_synthetic = 2000
    batch_ndim: ClassVar[int | None] = None
    """The dimensions of an array of several examples in [-1, 1]; None if examples are not such
    arrays."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """The suffixes of the files that are read, the preferred ones first."""
    noun: ClassVar[str] = "files"
    """What the files are called in messages."""

    proposes: ClassVar[tuple[str, ...]] = ()
    """The settings that `propose` chooses if a command leaves them out."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"val_fraction must be at least 0 and below 1, got {self.val_fraction}."
            )
        if self.path is not None and not self.path.strip():
            raise ValueError("path must not be empty: give a folder, or leave it out.")
        if not self.group_by.strip():
            raise ValueError(
                "group_by must not be empty: use file, folder, prefix or a column of the metadata."
            )
        if not self.balance_by.strip():
            raise ValueError(
                "balance_by must not be empty: use file, folder, prefix or a column of the "
                "metadata."
            )
        if self.num_synthetic < 1:
            raise ValueError(f"num_synthetic must be at least 1, got {self.num_synthetic}.")

    def folder_dataset(self) -> FileDataset:
        """Return all files of the path, in order and without captions."""
        raise NotImplementedError

    def find_files(self) -> FileCollection:
        """Find the files of the path, whatever it is: a folder, shards, a table or a list."""
        options = SourceOptions(self.columns, self.download)
        return find_files(str(self.path), self.suffixes, self.noun, options)

    def synthetic_dataset(self) -> SyntheticDataset:
        """Return the synthetic training set."""
        raise UserError("This modality has no synthetic data: give a folder with --data PATH.")

    def without_augmentation(self) -> Self:
        return self

    def preprocessing(self) -> dict[str, object]:
        """Return the settings that an example's tokens depend on."""
        return {}

    def inherited(self) -> dict[str, object]:
        """Return the settings that a generator takes from its tokenizer if it is given none."""
        return self.preprocessing()

    def propose(self, task: Any) -> Proposal | None:
        """Read some files of the path, and return settings that suit them and the task.

        The values in this configuration are those of the preset. None leaves them as they are.
        """
        return None

    def collate(self, examples: list[Any]) -> Examples:
        """Make a batch of examples."""
        raise NotImplementedError

    def split_batch(self, media: object) -> list[object]:
        """Return the examples of an array or tensor of several of them, and [media] otherwise."""
        if is_array(media) and media.ndim == self.batch_ndim:
            return list(media)
        return [media]

    def is_input_shape(self, shape: Sequence[int]) -> bool:
        """Return whether this can be the shape of a batch as the model takes it."""
        return self.batch_ndim in (None, len(shape))

    def example_from_media(self, media: object) -> object:
        """Preprocess a medium or an array in memory, without augmentation."""
        raise NotImplementedError

    def example_from_file(self, path: str) -> object:
        """Preprocess a single file, without augmentation."""
        dataset = replace(self, path=path).full(captions=False)
        if len(dataset) != 1:
            raise UserError(f"{path} has {len(dataset)} examples, expected a single file.")
        return read_item(dataset, 0, np.random.default_rng(0))

    def sample_metrics(self) -> Sequence[SampleMetric]:
        """Return the metrics of generated samples."""
        return ()

    def check_libraries(self) -> None:
        """Raise ModuleNotFoundError if a package that these data need is not installed."""

    def build(self, captions: bool = True) -> Split:
        """Return the training set and the held-out set, with or without captions."""
        self.require_libraries()
        if self.path is None:
            return self.synthetic_split()
        dataset = self.folder_dataset()
        return self.split_files(dataset.with_captions() if captions else dataset)

    def full(self, captions: bool = True) -> ExampleDataset:
        """Return all examples in order, without augmentation."""
        self.require_libraries()
        if self.path is None:
            return self.synthetic_dataset()
        dataset = self.without_augmentation().folder_dataset()
        return dataset.with_captions() if captions else dataset

    def split_files(self, dataset: FileDataset) -> Split:
        """Hold out a fraction of the files, or of groups of them."""
        groups = group_names(dataset.files, self.group_by)
        train, held_out = split_names(groups, self.val_fraction, self.split_seed)
        validation = replace(dataset.select(held_out), config=self.without_augmentation())
        split = Split(train=dataset.select(train), validation=validation)
        del train, held_out
        if len(dataset) >= LARGE:
            release_freed_memory()
        return split

    def balanced_groups(self, train: ExampleDataset) -> dict[str, str] | None:
        """Return the group of each training example by its name, or None if all examples are
        drawn equally often."""
        if self.balance_by == "file":
            return None
        if not isinstance(train, FileDataset):
            raise UserError(
                f"--data.balance-by {self.balance_by} needs files in groups, but the data are "
                "synthetic or in memory: give files with --data PATH, or leave it out."
            )
        return train.groups(self.balance_by, "--data.balance-by")

    def synthetic_split(self) -> Split:
        train = self.synthetic_dataset()
        if self.val_fraction == 0:
            return Split(train, train)
        held_out = max(1, round(self.num_synthetic * self.val_fraction))
        return Split(train, replace(train, count=held_out, first=FIRST_HELD_OUT))

    def require_libraries(self) -> None:
        """Check at the start, for synthetic data too, since samples need the packages later."""
        with as_user_error(ModuleNotFoundError):
            self.check_libraries()


def split_dataset(
    dataset: ExampleDataset,
    val_fraction: float,
    split_seed: int = 0,
    validation: ExampleDataset | None = None,
) -> Split:
    """Hold out a fraction of a dataset by the names of its examples.

    `validation` has the same examples without augmentation; by default it is `dataset` itself.
    """
    names = [dataset.name(index) for index in range(len(dataset))]
    train, held_out = split_names(names, val_fraction, split_seed)
    without_augmentation = dataset if validation is None else validation
    return Split(Subset(dataset, train), Subset(without_augmentation, held_out))


def spread_examples(dataset: ExampleDataset, count: int) -> list[int]:
    """Return `count` indices spread evenly over the folders and, within each, over its examples.

    A folder is often a class: each has samples, whatever the numbers of their files. With fewer
    examples, all are returned.
    """
    by_folder: dict[str, list[int]] = {}
    for index in range(len(dataset)):
        by_folder.setdefault(posixpath.dirname(dataset.name(index)), []).append(index)
    folders = list(by_folder.values())
    quotas = divide_evenly(count, [len(members) for members in folders])
    return sorted(
        members[i]
        for members, quota in zip(folders, quotas, strict=True)
        for i in spread_indices(len(members), quota)
    )


def divide_evenly(count: int, sizes: Sequence[int]) -> list[int]:
    """Divide a count into parts that are as equal as their maximum sizes allow."""
    quotas, left = [0] * len(sizes), min(count, sum(sizes))
    while left:
        unfilled = [i for i, size in enumerate(sizes) if quotas[i] < size]
        for i in spread_indices(len(unfilled), left):
            quotas[unfilled[i]] += 1
        left -= min(left, len(unfilled))
    return quotas


def spread_indices(total: int, count: int) -> list[int]:
    """Return `count` indices spread evenly over `total`, or all of them if there are fewer."""
    count = min(count, total)
    return [i * total // count for i in range(count)]
