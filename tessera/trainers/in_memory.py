"""What the datasets of examples in memory share."""

from __future__ import annotations

from tessera.data.dataset import DataConfig, ExampleDataset, Split, Subset, split_names

IN_MEMORY = "a dataset in memory"
"""The path in the configuration of a run whose dataset was given as a Python object.

The model card states it, and commands that read the data report that there is no such folder.
"""


def split_dataset(
    dataset: ExampleDataset, data: DataConfig, validation: ExampleDataset | None = None
) -> Split:
    """Split a dataset as files are split.

    Args:
        dataset: The examples.
        data: The fraction held out and the seed of the split.
        validation: The same examples without augmentation; by default `dataset` itself.
    """
    names = [dataset.name(index) for index in range(len(dataset))]
    train, held_out = split_names(names, data.val_fraction, data.split_seed)
    without_augmentation = dataset if validation is None else validation
    return Split(Subset(dataset, train), Subset(without_augmentation, held_out))
