"""Tests of the sources of captions: text files, metadata and names of folders."""

from __future__ import annotations

import json
import pickle

import pytest

from tessera.data.captions import Captions, match_name, read_captions
from tessera.data.collection import FolderFiles
from tessera.data.discovery import list_files
from tessera.data.errors import UnreadableFile
from tessera.run.errors import UserError


def count_sources(captions: Captions, names: list[str]) -> dict[str, int]:
    """Return how many files have a caption, by its source."""
    return FolderFiles(captions.root, names, [], captions).count_captions()


def read_folder(folder) -> Captions:
    files = list_files(folder)
    images = [file for file in files if file.endswith(".png")]
    return read_captions(folder, images, [file for file in files if not file.endswith(".png")])


def write(folder, **files: str) -> None:
    """Write files; "__" in a keyword is a slash, and the last "_" is the dot."""
    for name, text in files.items():
        stem, suffix = name.replace("__", "/").rsplit("_", 1)
        path = folder / f"{stem}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def jsonl(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_text_file_beside_an_image_is_its_caption(tmp_path):
    write(
        tmp_path,
        a_png="",
        a_txt="\ufeff a red\n circle \n",
        sub__b_png="",
        sub__b_txt="größer",
        c_png="",
    )
    captions = read_folder(tmp_path)
    assert [captions.get(name) for name in ("a.png", "sub/b.png", "c.png")] == [
        "a red circle",
        "größer",
        "",
    ]
    assert count_sources(captions, ["a.png", "sub/b.png", "c.png"]) == {"text files": 2}


def test_undecodable_text_file_makes_only_its_image_unreadable(tmp_path):
    write(tmp_path, a_png="", b_png="", b_txt="fine")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    captions = read_folder(tmp_path)
    assert captions.get("b.png") == "fine"
    with pytest.raises(UnreadableFile, match="a.txt: the caption cannot be read"):
        captions.get("a.png")


@pytest.mark.parametrize("column", ["text", "caption"])
def test_metadata_in_json_lines_is_read(tmp_path, column):
    rows = jsonl(
        {"file_name": "a.png", column: "one"},
        {"file_name": "./sub/b.png", column: "two", "width": 3},
    )
    write(tmp_path, a_png="", sub__b_png="", c_png="", metadata_jsonl=rows + "\n")
    captions = read_folder(tmp_path)
    assert [captions.get(name) for name in ("a.png", "sub/b.png", "c.png")] == ["one", "two", ""]


def test_metadata_in_csv_is_read_with_commas_and_quotes(tmp_path):
    write(
        tmp_path,
        a_png="",
        b_png="",
        metadata_csv='file_name,text\na.png,"red, and ""round"""\nb.png,\n',
    )
    captions = read_folder(tmp_path)
    assert captions.get("a.png") == 'red, and "round"'
    assert captions.get("b.png") == ""
    assert count_sources(captions, ["a.png", "b.png"]) == {"metadata": 1}


def test_metadata_of_a_subfolder_applies_to_that_subfolder(tmp_path):
    inner = jsonl({"file_name": "a.png", "text": "inner"})
    outer = "file_name,text\na.png,outer\n"
    write(tmp_path, a_png="", sub__a_png="", metadata_csv=outer, sub__metadata_jsonl=inner)
    captions = read_folder(tmp_path)
    assert (captions.get("a.png"), captions.get("sub/a.png")) == ("outer", "inner")


def test_text_file_takes_precedence_over_metadata(tmp_path):
    rows = jsonl(
        {"file_name": "a.png", "text": "general"}, {"file_name": "b.png", "text": "general"}
    )
    write(tmp_path, a_png="", a_txt="specific", b_png="", metadata_jsonl=rows)
    captions = read_folder(tmp_path)
    assert (captions.get("a.png"), captions.get("b.png")) == ("specific", "general")


def test_names_of_several_folders_are_captions(tmp_path):
    write(tmp_path, golden_retriever__1_png="", cats__2_png="", loose_png="")
    captions = read_folder(tmp_path)
    assert captions.get("cats/2.png") == "cats"
    assert captions.get("golden_retriever/1.png") == "golden retriever"
    assert captions.get("loose.png") == ""


def test_folder_names_keep_their_spelling(tmp_path):
    for name in ("T-shirt", "ankle boot", "robe_d'été"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
    captions = read_folder(tmp_path)
    names = ("T-shirt/1.png", "ankle boot/1.png", "robe_d'été/1.png")
    assert [captions.get(name) for name in names] == ["T-shirt", "ankle boot", "robe d'été"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t-shirt", "t-shirt"),
        ("T shirt", "t-shirt"),
        ("TSHIRT!", "t-shirt"),
        ("robe d ete", "robe d'été"),
        ("c++", "C++"),
        ("C", "C"),
        ("c?", None),  # C and C++ are equal without punctuation
        ("skirt", None),
        ("???", None),
    ],
)
def test_name_is_matched_without_case_and_punctuation(text, name):
    assert match_name(text, ["t-shirt", "robe d'été", "C", "C++", "😀"]) == name


@pytest.mark.parametrize(
    "files",
    [
        {"one__1_png": "", "one__2_png": ""},
        {"0001__1_png": "", "0002__2_png": ""},
        {"train__1_png": "", "val__2_png": ""},
        {"cats__1_png": "", "dogs__2_png": "", "dogs__2_txt": "a dog"},
        {
            "cats__1_png": "",
            "dogs__2_png": "",
            "metadata_csv": "file_name,text\ndogs/2.png,a dog\n",
        },
    ],
    ids=["a single folder", "numbers", "train and val", "a text file exists", "metadata exists"],
)
def test_uninformative_folder_names_are_not_captions(tmp_path, files):
    write(tmp_path, **files)
    captions = read_folder(tmp_path)
    assert captions.get(next(iter(files)).replace("__", "/").replace("_png", ".png")) == ""


@pytest.mark.parametrize(
    "name", ["../a.png", "/etc/a.png", "sub/../../a.png", "..", "..\\a.png", "C:\\a.png"]
)
def test_metadata_cannot_name_files_outside_of_its_folder(tmp_path, name):
    write(
        tmp_path,
        a_png="",
        in__a_png="",
        in__metadata_jsonl=jsonl({"file_name": "a.png"}, {"file_name": name}),
    )
    with pytest.raises(UserError, match=r"metadata.jsonl, line 2: .* leads out of the folder"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"file_name": "a.png"}\n\n{"file_name": "b.png", oops\n', "line 3: is not JSON"),
        ("[1, 2]\n", "line 1: must be an object like"),
        ("[" * 100_000 + "\n", "line 1: is not JSON"),
        ('{"file": "a.png", "text": "x"}\n', 'line 1: needs a "file_name".* found file, text'),
        ('{"file_name": 3}\n', 'line 1: needs a "file_name"'),
        ('{"file_name": "a.png", "text": ["x", 3]}\n', "line 1: the caption must be a text"),
        (
            '{"file_name": "a.png"}\n{"file_name": "./a.png"}\n',
            "line 2: 'a.png' was named before, in .*line 1",
        ),
    ],
)
def test_malformed_json_line_is_rejected_with_its_number(tmp_path, metadata, message):
    write(tmp_path, a_png="", b_png="", metadata_jsonl=metadata)
    with pytest.raises(UserError, match=f"metadata.jsonl, {message}"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            "file_name,text\na.png,red, and round\n",
            "line 2: has 3 fields, but the first line has 2",
        ),
        ("file_name,text\na.png,x\nb.png\n", "line 3: has 1 fields, but the first line has 2"),
        ("name,text\na.png,x\n", 'line 2: needs a "file_name"'),
        ('file_name,text\na.png,"x" y\n', "line 2: is not CSV"),
    ],
)
def test_malformed_csv_line_is_rejected_with_its_number(tmp_path, metadata, message):
    write(tmp_path, a_png="", b_png="", metadata_csv=metadata)
    with pytest.raises(UserError, match=f"metadata.csv, {message}"):
        read_folder(tmp_path)


def test_metadata_that_is_not_utf8_is_rejected(tmp_path):
    write(tmp_path, a_png="")
    (tmp_path / "metadata.csv").write_bytes("file_name,text\na.png,größer\n".encode("latin-1"))
    with pytest.raises(UserError, match="metadata.csv: cannot be read .*UTF-8"):
        read_folder(tmp_path)


def test_metadata_is_rejected_if_none_of_its_files_exists(tmp_path):
    write(tmp_path, a_png="", metadata_jsonl=jsonl({"file_name": "a", "text": "x"}))
    with pytest.raises(UserError, match="names 1 files, none of which exists .*'a'"):
        read_folder(tmp_path)


def test_metadata_of_some_missing_files_is_accepted_and_they_are_listed(tmp_path):
    rows = jsonl({"file_name": "a.png", "text": "x"}, {"file_name": "lost.png", "text": "y"})
    write(tmp_path, a_png="", metadata_jsonl=rows)
    assert read_folder(tmp_path).unmatched == ("lost.png",)


def test_captions_can_be_pickled_for_a_worker(tmp_path):
    write(tmp_path, a_png="", a_txt="red")
    assert pickle.loads(pickle.dumps(read_folder(tmp_path))).get("a.png") == "red"


def test_first_of_several_captions_is_the_caption(tmp_path):
    lines = '{"file_name": "a.png", "text": ["red", " ", "round  thing"]}\n'
    lines += '{"file_name": "b.png", "tags": ["blue", "flat", "old"]}\n'
    write(tmp_path, a_png="", b_png="", c_png="", c_txt="one\ntwo", metadata_jsonl=lines)
    captions = read_folder(tmp_path)
    assert captions.get_all("a.png") == ["red", "round thing"] and captions.get("a.png") == "red"
    assert captions.get_all("b.png") == [
        "blue, flat, old",
        "with blue, flat and old",
        "with old, flat and blue",
    ]
    assert captions.get_all("c.png") == ["one two"] and captions.get_all("c.png", lines=True) == [
        "one",
        "two",
    ]
    assert count_sources(captions, ["a.png", "b.png", "c.png"]) == {"text files": 1, "metadata": 2}


def test_source_of_each_caption_is_reported(tmp_path):
    rows = jsonl({"file_name": "b.png", "text": "blue"}, {"file_name": "c.png", "tags": ["old"]})
    rows += jsonl({"file_name": "d.png", "text": " "})
    write(tmp_path, a_png="", a_txt="red", b_png="", c_png="", d_png="", metadata_jsonl=rows)
    captions = read_folder(tmp_path)
    sources = [captions.source(f"{name}.png") for name in "abcd"]
    assert sources == ["text files", "metadata", "metadata", "none"]


def test_empty_captions_open_no_file(tmp_path):
    write(tmp_path, a_png="")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    files = FolderFiles(tmp_path, ["a.png"], ["a.txt"])
    assert (files.captions(0), files.caption_source(0)) == ([], "none")
    assert files.count_captions() == {} and files.unmatched_captions() == ()
    assert files.with_captions().caption_source(0) == "text files"
