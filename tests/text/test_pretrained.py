"""Text encoders of others: their states are their own, what is frozen stays so, and what was
computed is kept.

They are tiny and random here, with tokenizers that know a dozen words, made and saved as anybody
would.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from tessera.text import encoder as module
from tessera.text.encoder import PretrainedText, PretrainedTextConfig
from tests.texts import CAPTIONS, real

WORDS = "<pad> </s> <unk> a red blue two three circle square squares small above Red".split()


def tokenizer(**how: Any) -> Any:
    """Whole words; an end is added as T5 does, or a beginning and an end as BERT does."""
    whole = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    whole.pre_tokenizer = Whitespace()
    whole.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    if how.pop("lowers", False):
        whole.normalizer = normalizers.Lowercase()
    if how.pop("adds_nothing", False):
        whole.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", **how
    )


SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def t5_settings(**settings: Any) -> Any:
    return transformers.T5Config(
        **{"vocab_size": 16, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        | settings
    )


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=32))


def bart() -> Any:
    layers = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    return transformers.BartModel(
        transformers.BartConfig(
            vocab_size=16,
            d_model=16,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
            **layers,
        )
    )


def clip() -> Any:
    sight = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 1},
            vision_config={**sight, "image_size": 8, "patch_size": 4},
            projection_dim=16,
        )
    )


MODELS = {
    "t5": lambda: transformers.T5EncoderModel(t5_settings()),
    "t5 with its decoder": lambda: transformers.T5ForConditionalGeneration(t5_settings()),
    "bert": bert,
    "bart": bart,
    "clip": clip,
}


def states_by_hand(model: Any, text: str) -> Tensor:
    ids = torch.tensor([tokenizer()(text)["input_ids"]])
    encoder = (
        model.get_encoder()
        if model.config.is_encoder_decoder
        else getattr(model, "text_model", model)
    )
    with torch.no_grad():
        return encoder(input_ids=ids).last_hidden_state[0]


def saved(folder: Path, model: Any, **how: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer(**how).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    made = {}
    for kind, make in MODELS.items():
        torch.manual_seed(3)
        made[kind] = make().eval()
    return made


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: saved(tmp_path_factory.mktemp("encoders") / "one", model)
        for kind, model in models.items()
    }


@pytest.fixture
def t5(folders: dict[str, Path]) -> PretrainedText:
    return found(folders["t5"])


def found(folder: Path, **settings: Any) -> PretrainedText:
    return PretrainedTextConfig(name=str(folder), **{"longest": 12} | settings).build()


@pytest.mark.parametrize("kind", MODELS)
def test_states_are_those_of_the_model_itself(kind, folders, models):
    encoder = found(folders[kind])
    for text in CAPTIONS:
        by_hand = states_by_hand(models[kind], text)
        assert encoder.dim == by_hand.shape[1] == 16
        torch.testing.assert_close(real(encoder, [text]), by_hand, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_a_text_does_not_depend_on_its_neighbours_there_either(kind, folders):
    encoder = found(folders[kind])
    states = encoder(CAPTIONS)
    assert states.mask.sum(1).tolist() == [4, 4, 4, 8, 1] and not states.values[~states.mask].any()
    for number, text in enumerate(CAPTIONS):
        torch.testing.assert_close(
            real(encoder, CAPTIONS, number), real(encoder, [text]), rtol=0, atol=1e-5
        )


def test_it_is_frozen_and_in_nobodys_weights(t5):
    task = nn.Module()
    task.encoder = t5
    task.train()
    assert not list(task.parameters()) and not task.state_dict()
    assert not any(part.training for part in t5.network.modules())
    assert not any(parameter.requires_grad for parameter in t5.network.parameters())
    assert not t5(["a red circle"]).values.requires_grad


def test_it_follows_its_task_to_another_device(t5):
    task = nn.Module()
    task.encoder = t5
    task.to(torch.device("meta"))
    assert t5.device == torch.device("meta")


def test_half_precision_around_it_changes_nothing(t5):
    plain = t5(CAPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(t5(CAPTIONS).values, plain.values)
    assert plain.values.dtype == torch.float32


def test_weights_stored_in_half_precision_compute_in_whole(folders, models, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(folders["t5"], folder)
    transformers.T5EncoderModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    encoder = found(folder)
    assert {tensor.dtype for tensor in encoder.network.state_dict().values()} == {torch.float32}
    assert torch.allclose(
        real(encoder, ["a red circle"]), states_by_hand(models["t5"], "a red circle"), atol=0.1
    )


def test_a_long_text_is_cut_before_the_symbol_that_ends_it(folders, models):
    encoder = found(folders["t5"], max_len=3)
    assert encoder.fits("a red") and not encoder.fits("a red circle")
    assert encoder.cut(["a red circle", "a", "a red circle"]) == ["a red circle"]
    torch.testing.assert_close(
        real(encoder, ["a red circle"]), states_by_hand(models["t5"], "a red"), rtol=0, atol=1e-6
    )


def test_a_text_of_nothing_has_something_to_look_at_whatever_the_tokenizer_makes_of_it(
    models, tmp_path
):
    encoder = found(saved(tmp_path, models["t5"], adds_nothing=True))
    states = encoder(["", "a red circle"])
    assert states.mask.sum(1).tolist() == [1, 3] and states.values.isfinite().all()


def test_a_t5_as_it_was_published_with_nothing_but_a_sentencepiece_file_is_read(models, tmp_path):
    models["t5"].save_pretrained(tmp_path)
    tmp_path.joinpath("tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0})
    )
    with tmp_path.joinpath("spiece.model").open("wb") as file:
        special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a ab b ba"] * 9),
            model_writer=file,
            vocab_size=8,
            minloglevel=2,
            **special,
        )
    encoder = found(tmp_path)
    assert encoder.tokens("") == [1] and encoder.tokens("ab ba")[-1] == 1
    assert encoder(["ab ba", ""]).values.isfinite().all()


def test_half_a_character_in_a_prompt_is_read(t5):
    assert torch.equal(t5(["caf\udce9 red"]).values, t5(["caf? red"]).values)


def test_nothing_is_printed_and_the_library_is_left_as_it_was(folders, capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    found(folders["bert"])
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# ------------------------------------------------------------------------------------------------- what it has computed


def computed(encoder: PretrainedText) -> list[str]:
    """From now on, every text that the network is asked for."""
    texts: list[str] = []
    compute = encoder.compute

    def noted(some: list[str]) -> list[Tensor]:
        texts.extend(some)
        return compute(some)

    encoder.compute = noted
    return texts


def test_captions_are_computed_once_and_come_from_the_disk_afterwards(folders, tmp_path):
    first = found(folders["t5"])
    live = first(CAPTIONS)
    asked = computed(first)
    first.prepare_text(CAPTIONS * 3, tmp_path)
    assert sorted(asked) == sorted(CAPTIONS)

    second = found(folders["t5"])
    asked = computed(second)
    second.prepare_text(iter(CAPTIONS), tmp_path)
    kept = second(CAPTIONS)
    assert not asked
    assert torch.equal(kept.mask, live.mask) and torch.equal(kept.values, first(CAPTIONS).values)
    torch.testing.assert_close(kept.values, live.values, rtol=0, atol=1e-5)


def test_a_text_that_nobody_met_is_computed_when_it_comes(t5, tmp_path):
    alone = real(t5, ["three red squares"])
    t5.prepare_text(CAPTIONS, tmp_path)
    asked = computed(t5)
    torch.testing.assert_close(
        real(t5, ["a red circle", "three red squares"], 1), alone, rtol=0, atol=1e-6
    )
    assert asked == ["three red squares"]


def test_new_captions_are_added_to_the_old_ones(folders, tmp_path):
    found(folders["t5"]).prepare_text(CAPTIONS[:2], tmp_path)
    again = found(folders["t5"])
    asked = computed(again)
    again.prepare_text(CAPTIONS, tmp_path)
    assert sorted(asked) == sorted(CAPTIONS[2:])
    third = found(folders["t5"])
    asked = computed(third)
    third.prepare_text(CAPTIONS, tmp_path)
    assert not asked


def test_without_a_place_nothing_is_kept(t5):
    t5.prepare_text(CAPTIONS, None)
    asked = computed(t5)
    t5(CAPTIONS)
    assert sorted(asked) == sorted(CAPTIONS)


def test_work_that_is_interrupted_goes_on_where_it_stopped(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 1)
    monkeypatch.setattr(module, "TEXTS_IN_A_FILE", 2)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    found(folders["t5"]).prepare_text(CAPTIONS, whole)

    encoder, asked = found(folders["t5"]), []
    compute = encoder.compute

    def stops_at_the_fourth(texts: list[str]) -> list[Tensor]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.extend(texts)
        return compute(texts)

    encoder.compute = stops_at_the_fourth
    with pytest.raises(KeyboardInterrupt):
        encoder.prepare_text(CAPTIONS, torn)
    again = found(folders["t5"])
    rest = computed(again)
    again.prepare_text(CAPTIONS, torn)
    assert len(rest) == 3 and not set(rest) & set(asked[:2])
    assert [path.name for path in sorted(torn.iterdir())] == [
        path.name for path in sorted(whole.iterdir())
    ]


def emptied(data: bytes) -> bytes:
    return b""


def cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def foreign(data: bytes) -> bytes:
    return b"not a word of ours"


@pytest.mark.parametrize("harm", [emptied, cut_short, flipped, foreign])
def test_a_damaged_file_is_made_anew(harm, folders, tmp_path):
    first = found(folders["t5"])
    first.prepare_text(CAPTIONS, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.unlink()  # the first one still has it mapped
    file.write_bytes(harm(whole))

    again = found(folders["t5"])
    asked = computed(again)
    again.prepare_text(CAPTIONS, tmp_path)
    assert sorted(asked) == sorted(CAPTIONS)
    assert torch.equal(again(CAPTIONS).values, first(CAPTIONS).values)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [whole]


def test_files_of_others_are_left_alone(t5, tmp_path):
    unmatched = {"texts-0123-4567.safetensors": b"another encoder's", "notes.txt": b"mine"}
    for name, data in unmatched.items():
        tmp_path.joinpath(name).write_bytes(data)
    t5.prepare_text(CAPTIONS, tmp_path)
    assert {name: tmp_path.joinpath(name).read_bytes() for name in unmatched} == unmatched
    assert len(list(tmp_path.iterdir())) == 3


def test_a_place_that_cannot_be_written_is_named(t5, tmp_path):
    tmp_path.joinpath("file").touch()
    with pytest.raises(OSError, match="5 captions could not be kept in .*file.* another folder"):
        t5.prepare_text(CAPTIONS, tmp_path / "file" / "texts")


def other_settings(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def other_weights(folder: Path) -> None:
    torch.manual_seed(4)
    bert().save_pretrained(folder)


def other_heads(folder: Path) -> None:
    other_settings(folder, num_attention_heads=4)


def other_case(folder: Path) -> None:
    tokenizer(lowers=True).save_pretrained(folder)


@pytest.mark.parametrize("change", [other_weights, other_heads, other_case])
def test_another_encoder_has_another_fingerprint(change, folders, tmp_path):
    shutil.copytree(folders["bert"], tmp_path / "copy")
    change(tmp_path / "copy")
    assert found(tmp_path / "copy").fingerprint != found(folders["bert"]).fingerprint


def test_how_much_is_read_is_part_of_the_fingerprint(folders):
    assert (
        found(folders["t5"], max_len=5).fingerprint != found(folders["t5"], max_len=6).fingerprint
    )


def test_the_same_encoder_elsewhere_has_the_same_fingerprint(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "moved")
    other_settings(tmp_path / "moved", transformers_version="4.0.0", _name_or_path="elsewhere")
    assert found(tmp_path / "moved").fingerprint == found(folders["t5"]).fingerprint


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "name", ["somebody/some-t5", "some-t5", "models/of mine/t5", "./t5", "no such name", "../t5"]
)
def test_what_is_not_on_this_machine_is_named_and_nobody_outside_is_asked(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    reached: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **how: reached.append(where))
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: reached.append(where))
    with pytest.raises(
        FileNotFoundError,
        match=f"'{name}' is neither a folder nor .* nothing is downloaded unless asked",
    ):
        PretrainedTextConfig(name=name).build()
    assert not reached


def test_what_was_fetched_from_the_hub_before_is_found_by_its_name(folders, tmp_path, monkeypatch):
    repository = tmp_path / "models--somebody--some-t5"
    shutil.copytree(folders["t5"], repository / "snapshots" / "0123abc")
    repository.joinpath("refs").mkdir()
    repository.joinpath("refs", "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *where, **how: pytest.fail(f"asked for {where}")
    )
    encoder = PretrainedTextConfig(name="somebody/some-t5", max_len=12).build()
    assert encoder.fingerprint == found(folders["t5"]).fingerprint


def test_weights_that_may_hold_code_are_not_read(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "old")
    tmp_path.joinpath("old", "model.safetensors").unlink()
    torch.save(MODELS["t5"]().state_dict(), tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read. .*other weights are not read"):
        found(tmp_path / "old")


def test_a_model_that_brings_code_is_refused_and_nobody_is_asked(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "own")
    tmp_path.joinpath("own", "mine.py").write_text("raise SystemExit('this code ran')")
    other_settings(
        tmp_path / "own",
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"},
    )
    with pytest.raises(ValueError, match="cannot be read. .*nor is a model that brings code"):
        found(tmp_path / "own")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"num_layers": 3},
            r"not those of its config.json: [1-9]\d* are missing and 0 have another shape .*block\.2",
        ),
        ({"d_ff": 25}, r"0 are missing and 4 have another shape .*DenseReluDense"),
    ],
)
def test_half_a_network_is_refused(settings, says, folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "half")
    other_settings(tmp_path / "half", **settings)
    with pytest.raises(ValueError, match=says):
        found(tmp_path / "half")


def test_a_pooler_that_nobody_uses_may_be_missing(folders, tmp_path):
    torch.manual_seed(3)
    headless = transformers.BertModel(
        transformers.BertConfig(**SMALL, max_position_embeddings=32), add_pooling_layer=False
    )
    assert found(saved(tmp_path, headless))(CAPTIONS).values.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "longest", "says"),
    [("bert", 33, "from 2 up to 32"), ("t5", 1, "from 2 up to any number of")],
)
def test_a_length_that_the_encoder_cannot_read_is_refused(kind, max_len, says, folders):
    with pytest.raises(ValueError, match=f"`max_len` is {max_len}, .* reads {says} symbols"):
        found(folders[kind], max_len=max_len)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'package transformers, .*pip install "tessera\[text\]"'
    ):
        PretrainedTextConfig(name="somebody/some-t5").build()


@pytest.mark.parametrize(
    ("settings", "says"), [({"name": " "}, "needs a name"), ({"longest": 0}, "`max_len` is 0")]
)
def test_a_pretrained_encoder_that_cannot_be_is_refused_by_its_configuration(settings, says):
    with pytest.raises(ValueError, match=says):
        PretrainedTextConfig(**{"name": "somebody/some-t5"} | settings)


def test_one_text_that_is_no_list_is_refused_there_too(t5):
    with pytest.raises(TypeError, match="put it in a list"):
        t5("a red circle")
