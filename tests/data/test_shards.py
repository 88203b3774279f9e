"""Tests of tar shards: the same examples as in a folder, for every medium, and damaged archives."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tessera.data import shard_index
from tessera.data.dataset import DataConfig, read_item
from tessera.data.discovery import expand_braces, find_files
from tessera.data.errors import UnreadableFile
from tessera.data.shard_index import build_index, escape, load_index, unescape
from tessera.data.shards import ShardFiles
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import SUFFIXES
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.media_folders import MEDIA, write_captioned_images, write_images

every_medium = pytest.mark.parametrize("medium", MEDIA)


def at(config: DataConfig, path: Path | str) -> DataConfig:
    return dataclasses.replace(config, path=str(path))


def png(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    pairs = members.items() if isinstance(members, dict) else members
    with tarfile.open(path, "w") as archive:
        for name, content in pairs:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def find_images(path: Path | str) -> ShardFiles:
    found = find_files(path, SUFFIXES, "images")
    assert isinstance(found, ShardFiles)
    return found.with_captions()


def values(example: object) -> dict[str, Any]:
    return {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}


def assert_same_examples(one: DataConfig, other: DataConfig) -> None:
    """Assert equal splits, names and captions, and equal examples for equal random numbers."""
    for left, right in zip(vars(one.build()).values(), vars(other.build()).values(), strict=True):
        assert list(left.names) == list(right.names) and len(left) > 0
        assert left.classes() == right.classes()
        for index in range(len(left)):
            assert left.all_captions(index) == right.all_captions(index)
            found = (read_item(d, index, np.random.default_rng(index)) for d in (left, right))
            for a, b in zip(*(values(example).values() for example in found), strict=True):
                np.testing.assert_array_equal(a, b)


# ---- shards of a folder


@every_medium
def test_shards_have_the_examples_of_the_folder(medium, tmp_path):
    MEDIA[medium].write(tmp_path / "folder", 7)
    result = tessera(
        "pack", tmp_path / "folder", "--out", tmp_path / "shards", "--shard-mb", "0.005"
    )
    assert result.code == 0 and f"use --data {tmp_path / 'shards'}" in result.text
    assert len(list((tmp_path / "shards").glob("*.tar"))) > 1
    config = MEDIA[medium].config
    assert_same_examples(at(config, tmp_path / "folder"), at(config, tmp_path / "shards"))
    folder, shards = (tessera("check", tmp_path / one) for one in ("folder", "shards"))
    assert folder.code == shards.code == 0
    numbers = [
        result.out.replace(str(tmp_path / name), "").partition("captions:")[0]
        for name, result in (("folder", folder), ("shards", shards))
    ]
    assert numbers[0] == numbers[1] and "7 usable" in numbers[0]


def test_packing_twice_writes_the_same_bytes(tmp_path):
    write_captioned_images(tmp_path / "folder")
    for name in ("one", "two"):
        assert tessera("pack", tmp_path / "folder", "--out", tmp_path / name).code == 0
    one, two = ((tmp_path / name / "shards-00000.tar").read_bytes() for name in ("one", "two"))
    assert one == two


def test_files_that_differ_in_the_suffix_stay_two_examples(tmp_path):
    write_images(tmp_path / "folder", 2)
    picture = PIL.Image.new("RGB", (8, 8))
    picture.save(tmp_path / "folder/dogs/photo.00.jpg")
    (tmp_path / "folder/broken.png").symlink_to(tmp_path / "nowhere.png")
    result = tessera("pack", tmp_path / "folder", "--out", tmp_path / "shards")
    assert result.code == 0 and "3 images" in result.text
    assert "1 file(s) differ from others in the suffix only" in result.text
    assert "Skipped broken.png" in result.text
    names = list(find_images(tmp_path / "shards").names)
    assert names == ["cats/photo.01.png", "dogs/photo.00.jpg", "dogs/photo.00.png.png"]


def test_packing_into_a_folder_with_files_changes_nothing(tmp_path):
    write_images(tmp_path / "folder", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    assert "is not empty" in run_invalid("pack", tmp_path / "folder", "--out", tmp_path / "out")
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["mine"]
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


@pytest.mark.parametrize("stem", ["a", "a.b", "100%", "%2E", "%252E.", "ä.1"])
def test_escaped_names_have_no_dot_and_are_restored(stem):
    assert "." not in escape(stem) and unescape(escape(stem)) == stem


# ---- captions


def test_captions_are_texts_then_json_then_classes(tmp_path):
    shard = write_tar(
        tmp_path / "a.tar",
        {
            "1.png": png(),
            "1.txt": b"from\ntext ",
            "1.json": b'{"text": "unused"}',
            "2.json": b'{"caption": ["one", "two"], "tags": ["t"]}',
            "2.jpg": png(),
            "3.cls": b"cat",
            "3.webp": png(),
            "4.png": png(),
            "5.json": b'{"tags": "slow, calm"}',
            "5.png": png(),
        },
    )
    found = find_images(shard)
    assert [found.captions(i) for i in range(4)] == [["from text"], ["one", "two"], ["cat"], []]
    assert found.captions(4)[0] == "slow, calm" and found.tags(4) == ("slow", "calm")
    assert found.captions(0, lines=True) == ["from", "text"] and found.tags(1) == ("t",)
    counts = {"text files": 1, "metadata": 2, "class labels": 1}
    assert found.count_captions() == counts and found.classes() == []
    assert found.without_captions().captions(0) == []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{", b'{"text": 3}'])
def test_an_unreadable_caption_costs_one_example(text, tmp_path):
    suffix = "txt" if text.startswith(b"\xff") else "json"
    shard = write_tar(tmp_path / "a.tar", {"1.png": png(), f"1.{suffix}": text, "2.png": png()})
    found = find_images(shard)
    with pytest.raises(UnreadableFile, match=rf"a\.tar/1\.{suffix}: "):
        found.captions(0)
    assert found.captions(1) == []


def test_numbers_in_class_files_are_classes(tmp_path):
    members = {f"{i}.png": png() for i in range(4)} | {
        f"{i}.cls": b"%d" % (i % 2) for i in range(4)
    }
    assert find_images(write_tar(tmp_path / "a.tar", members)).classes() == ["0", "1"]


# ---- names and patterns


def test_examples_are_in_the_order_of_shards_and_members(tmp_path):
    write_tar(tmp_path / "s-1.tar", {"b.png": png(1), "a.png": png(2)})
    write_tar(tmp_path / "s-0.tar", {"./z.png": png(3)})
    for path in (tmp_path, tmp_path / "s-{0..1}.tar", tmp_path / "s-*.tar"):
        assert list(find_images(path).names) == ["z.png", "b.png", "a.png"]
    assert list(find_images(tmp_path / "s-{1,0}.tar").names) == ["b.png", "a.png", "z.png"]


def test_equal_names_in_two_shards_begin_with_the_shard(tmp_path):
    for shard in ("x", "y"):
        write_tar(tmp_path / f"{shard}.tar", {"a.png": png(), "cats/b.png": png()})
    found = find_images(tmp_path)
    assert list(found.names) == ["x/a.png", "x/cats/b.png", "y/a.png", "y/cats/b.png"]
    assert found.count_captions() == {}  # the name of a shard is no caption


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("a{b}", ["a{b}"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_are_expanded_as_in_a_shell(pattern, expanded):
    assert expand_braces(pattern) == expanded


def test_missing_shards_of_a_pattern_are_counted(tmp_path):
    write_tar(tmp_path / "s-0.tar", {"a.png": png()})
    message = run_invalid("train", "images-vqgan", "--data", tmp_path / "s-{0..2}.tar")
    assert "2 of them do not exist" in message and "s-1.tar" in message


# ---- the index


def test_the_index_is_made_once_and_again_when_the_shard_changes(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", {"a.png": png()})
    built: list[Path] = []

    def count(path: Path) -> Any:
        built.append(path)
        return build_index(path)

    monkeypatch.setattr(shard_index, "build_index", count)
    assert len(find_images(shard)) == len(find_images(shard)) == 1 and len(built) == 1
    write_tar(shard, {"a.png": png(), "b.png": png()})
    found = find_images(shard)
    assert len(found) == 2 and len(built) == 2
    assert "describes a file of another size or modification time" in found.notices[0]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "other shard", "text"])
def test_a_damaged_or_foreign_index_is_made_again(damage, tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"a.png": png(), "b.png": png()})
    expected = list(find_images(shard).names)
    index = tmp_path / "a.tar.index"
    content = bytearray(index.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
    elif damage == "truncated":
        del content[-9:]
    elif damage == "text":
        content = bytearray(b"no index")
    else:
        other = write_tar(tmp_path / "b.tar", {"other.png": png()})
        find_images(other)
        content = bytearray((tmp_path / "b.tar.index").read_bytes())
    index.write_bytes(content)
    found = find_images(shard)
    assert list(found.names) == expected and "a.tar.index is not the index" in found.notices[0]
    assert find_images(shard).notices == found.notices, "a command opens shards more than once"
    shard_index._replaced.clear()  # as in another process
    assert find_images(shard).notices == ()


def test_check_reports_the_index_of_another_shard(tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"a.png": png(), "b.png": png()})
    (tmp_path / "other").mkdir()
    find_images(write_tar(tmp_path / "other" / "a.tar", {"other.png": png()}))
    shutil.copy(tmp_path / "other" / "a.tar.index", tmp_path / "a.tar.index")
    text = tessera("check", shard).text
    assert "2 usable" in text and "a.tar.index is not the index of a.tar" in text


def test_an_index_that_cannot_be_beside_the_shard_is_in_the_cache(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", {"a.png": png()})
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.tar.index").mkdir()  # root may write to any folder
    _, notices = load_index(shard)
    assert len(list((tmp_path / "cache/indexes").iterdir())) == 1 and len(notices) == 1
    assert len(find_images(shard)) == 1


# ---- bad archives: good examples beside them are used


def test_a_truncated_shard_is_used_up_to_the_end(tmp_path):
    shard = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(5)})
    shard.write_bytes(shard.read_bytes()[:2600])
    good = write_tar(tmp_path / "b.tar", {"good.png": png()})
    found = find_images(tmp_path)
    assert list(found.names) == ["0.png", "1.png", "good.png"] and good.exists()
    assert found.notices == ("a.tar: it ends within 2.png; the 2 members before are used.",)
    result = tessera("check", tmp_path)
    assert result.code == 0 and "3 usable" in result.text and "ends within 2.png" in result.text


@pytest.mark.parametrize("where", [1024, 0])
def test_a_damaged_header_ends_a_shard_with_a_notice(where, tmp_path):
    shard = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(5)})
    content = bytearray(shard.read_bytes())
    content[where : where + 512] = b"\x55" * 512
    shard.write_bytes(content)
    write_tar(tmp_path / "b.tar", {"good.png": png()})
    found = find_images(tmp_path)
    assert list(found.names) == (["0.png"] if where else []) + ["good.png"]
    assert len(found.notices) == 1 and "damaged" in found.notices[0]


def test_a_shard_without_an_end_is_reported(tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"0.png": png(), "1.png": png()})
    shard.write_bytes(shard.read_bytes()[:2048])
    found = find_images(shard)
    assert len(found) == 2 and "cut short at byte 2,048" in found.notices[0]


def test_members_that_lead_out_and_links_are_left_out(tmp_path):
    outside = tmp_path / "outside.png"
    PIL.Image.new("RGB", (8, 8)).save(outside)
    shard = tmp_path / "data" / "a.tar"
    shard.parent.mkdir()
    names = ["../outside.png", "/outside.png", "a/../../outside.png", "good.png"]
    write_tar(shard, [(name, png()) for name in names])
    with tarfile.open(shard, "a") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        archive.addfile(link)
    found = find_images(shard)
    assert list(found.names) == ["good.png"]
    assert "1 links, devices and sparse files are left out" in found.notices[0]
    assert "3 members whose names lead out of it are left out" in found.notices[1]
    assert sorted(one.name for one in shard.parent.iterdir()) == ["a.tar", "a.tar.index"]


def test_two_images_of_one_name_are_reported_and_one_is_used(tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"a.jpg": png(1), "a.png": png(2), "b.png": png(3)})
    found = find_images(shard)
    assert list(found.names) == ["a.png", "b.png"]
    assert found.notices == (
        "a.tar: 1 names have two or more images, such as a.png and a.jpg; a.png is used.",
    )


def test_a_member_that_is_no_image_costs_one_example(tmp_path):
    members = {f"{i}.png": png(i) for i in range(6)} | {"3.png": b"no image"}
    shard = write_tar(tmp_path / "a.tar", members)
    result = tessera("check", shard)
    assert result.code == 0 and "6 images, 5 usable" in result.text and "3.png:" in result.text
    dataset = ImageDataConfig(path=str(shard), size=8).full()
    with pytest.raises(UnreadableFile, match=r"a\.tar/3\.png: "):
        read_item(dataset, 3, np.random.default_rng(0))


def test_a_large_member_is_not_read(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", {"a.png": bytes(2_000_000)})
    monkeypatch.setenv("TESSERA_MAX_DECODED_MB", "1")
    dataset = ImageDataConfig(path=str(shard)).full()
    with pytest.raises(UnreadableFile, match="at most 1 MB are read"):
        read_item(dataset, 0, np.random.default_rng(0))


def test_a_member_that_ends_the_process_that_reads_it_is_reported(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(3)})
    from tessera.modalities.image import inspect

    decode, parent = inspect.decode, os.getpid()

    def crash(data: bytes) -> Any:
        if data == png(1) and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(data)

    monkeypatch.setattr(inspect, "decode", crash)
    result = tessera("check", shard)
    assert result.code == 0 and "3 images, 2 usable" in result.text
    assert "1.png: the process that read it died (SIGSEGV)" in result.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", b"", "has no images"),
        ("a.tar", b"text", "has no images"),
        ("a.tar.gz", b"\x1f\x8b", "is a compressed archive"),
        ("a.zip", b"PK", "is a file of another kind"),
    ],
)
def test_files_that_are_no_shards_are_rejected(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_files(tmp_path / name, SUFFIXES, "images")


def test_shards_of_another_medium_are_rejected_with_what_they_hold(tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"a.wav": b"", "b.wav": b"", "a.txt": b"x"})
    with pytest.raises(UserError, match=r"has no images: .* found 2 \.wav, 1 \.txt"):
        find_files(shard, SUFFIXES, "images")


# ---- lists of paths


def test_a_list_of_paths_is_read_in_its_order(tmp_path):
    write_captioned_images(tmp_path / "folder", 4)
    names = ["folder/dogs/photo.00.png", str(tmp_path / "folder/cats/photo.01.png")]
    (tmp_path / "list.txt").write_text("# photos\n" + "\r\n".join([*names, "", names[0], "x.mp3"]))
    dataset = ImageDataConfig(path=str(tmp_path / "list.txt"), size=8).full()
    assert list(dataset.names) == names
    assert dataset.caption(0) == "a photo, number 00"
    assert read_item(dataset, 1, np.random.default_rng(0)).pixels.shape == (3, 8, 8)
    result = tessera("check", tmp_path / "list.txt")
    assert result.code == 0 and "2 images, 2 usable" in result.text


def test_a_list_without_paths_is_rejected_with_what_was_found(tmp_path):
    (tmp_path / "list.txt").write_text("just a text\n")
    message = run_invalid("train", "images-vqgan", "--data", tmp_path / "list.txt")
    assert "lists no images" in message and "just a text" in message
