"""What `tessera check` reports about the split of a folder. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import tessera.modalities as modalities
from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.split import GroupReport, find_groupings, report_groups
from tessera.run.directory import Json
from tessera.run.errors import UserError


@dataclass(frozen=True)
class SplitReport:
    """The groups that are held out, or the groups that could be."""

    groups: GroupReport | None = None
    groupings: dict[str, int] = field(default_factory=dict)
    """The values of --data.group-by that give several groups, with their numbers."""

    def lines(self) -> list[str]:
        if self.groups is not None:
            return [self.groups.line()]
        if not self.groupings:
            return []
        found = ", ".join(f"{name} ({count:,} groups)" for name, count in self.groupings.items())
        return [f"split by file; --data.group-by can hold out groups as a whole: {found}"]

    def as_dict(self) -> Json:
        return asdict(self)


def describe_split(path: str, modality: modalities.Modality, group_by: str | None) -> SplitReport:
    """Describe the split of a folder by groups, or how its files could be grouped."""
    data_class: type[DataConfig] = modalities.resolve(modality.recipes[0].data)
    config = data_class(path=path)
    try:
        dataset: FileDataset = config.folder_dataset()
    except UserError:  # the report has the reason
        return SplitReport()
    if group_by is None:
        return SplitReport(groupings=find_groupings(dataset.files))
    groups = report_groups(dataset.files, group_by, config.val_fraction, config.split_seed)
    return SplitReport(groups)
