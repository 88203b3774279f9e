"""Pretrained text encoders: equal to the original models, frozen, and cached on disk.

The models are tiny and random, with tokenizers of a dozen words, and saved with transformers.
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

from tessera.text import pretrained as module
from tessera.text.pretrained import PretrainedTextConfig, PretrainedTextEncoder
from tests.texts import CAPTIONS, unpadded_states

WORDS = "<pad> </s> <unk> a red blue two three circle square squares small above Red".split()


def build_tokenizer(lowercase: bool = False, special_tokens: bool = True) -> Any:
    """Build a tokenizer of whole words that appends an end token, as T5 does."""
    words = Tokenizer(
        WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    if lowercase:
        words.normalizer = normalizers.Lowercase()
    if not special_tokens:
        words.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def t5_config() -> Any:
    return transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
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
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 1},
            vision_config={**vision, "image_size": 8, "patch_size": 4},
            projection_dim=16,
        )
    )


MODELS = {
    "t5": lambda: transformers.T5EncoderModel(t5_config()),
    "t5 with its decoder": lambda: transformers.T5ForConditionalGeneration(t5_config()),
    "bert": bert,
    "bart": bart,
    "clip": clip,
}


def reference_states(model: Any, text: str) -> Tensor:
    ids = torch.tensor([build_tokenizer()(text)["input_ids"]])
    encoder = (
        model.get_encoder()
        if model.config.is_encoder_decoder
        else getattr(model, "text_model", model)
    )
    with torch.no_grad():
        return encoder(input_ids=ids).last_hidden_state[0]


def save_model(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder)
    build_tokenizer(**options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    models = {}
    for kind, build in MODELS.items():
        torch.manual_seed(3)
        models[kind] = build().eval()
    return models


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: save_model(tmp_path_factory.mktemp("encoders") / "one", model)
        for kind, model in models.items()
    }


@pytest.fixture
def t5(folders: dict[str, Path]) -> PretrainedTextEncoder:
    return load_encoder(folders["t5"])


def load_encoder(folder: Path, **settings: Any) -> PretrainedTextEncoder:
    return PretrainedTextConfig(name=str(folder), **{"max_len": 12} | settings).build()


@pytest.mark.parametrize("kind", MODELS)
def test_states_equal_those_of_the_original_model(kind, folders, models):
    encoder = load_encoder(folders[kind])
    for text in CAPTIONS:
        expected = reference_states(models[kind], text)
        assert encoder.dim == expected.shape[1] == 16
        torch.testing.assert_close(unpadded_states(encoder, [text]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_the_states_of_a_text_do_not_depend_on_the_batch(kind, folders):
    encoder = load_encoder(folders[kind])
    states = encoder(CAPTIONS)
    assert states.mask.sum(1).tolist() == [4, 4, 4, 8, 1] and not states.values[~states.mask].any()
    for index, text in enumerate(CAPTIONS):
        in_batch = unpadded_states(encoder, CAPTIONS, index)
        alone = unpadded_states(encoder, [text])
        torch.testing.assert_close(in_batch, alone, rtol=0, atol=1e-5)


def test_the_encoder_is_frozen_and_in_no_state_dict(t5):
    task = nn.Module()
    task.encoder = t5
    task.train()
    assert not list(task.parameters()) and not task.state_dict()
    assert not any(module.training for module in t5.network.modules())
    assert not any(parameter.requires_grad for parameter in t5.network.parameters())
    assert not t5(["a red circle"]).values.requires_grad


def test_moving_the_task_moves_the_encoder(t5):
    task = nn.Module()
    task.encoder = t5
    task.to(torch.device("meta"))
    assert t5.device == torch.device("meta")


def test_autocast_does_not_change_the_states(t5):
    plain = t5(CAPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(t5(CAPTIONS).values, plain.values)
    assert plain.values.dtype == torch.float32


def test_half_precision_weights_are_converted_to_float32(folders, models, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(folders["t5"], folder)
    transformers.T5EncoderModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    encoder = load_encoder(folder)
    assert {tensor.dtype for tensor in encoder.network.state_dict().values()} == {torch.float32}
    assert torch.allclose(
        unpadded_states(encoder, ["a red circle"]),
        reference_states(models["t5"], "a red circle"),
        atol=0.1,
    )


def test_truncation_keeps_the_end_token(folders, models):
    encoder = load_encoder(folders["t5"], max_len=3)
    assert encoder.fits("a red") and not encoder.fits("a red circle")
    assert encoder.find_truncated(["a red circle", "a", "a red circle"]) == ["a red circle"]
    torch.testing.assert_close(
        unpadded_states(encoder, ["a red circle"]),
        reference_states(models["t5"], "a red"),
        rtol=0,
        atol=1e-6,
    )


def test_an_empty_text_has_one_state_with_any_tokenizer(models, tmp_path):
    encoder = load_encoder(save_model(tmp_path, models["t5"], special_tokens=False))
    states = encoder(["", "a red circle"])
    assert states.mask.sum(1).tolist() == [1, 3] and states.values.isfinite().all()


def test_a_t5_with_only_a_sentencepiece_file_is_loaded(models, tmp_path):
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
    encoder = load_encoder(tmp_path)
    assert encoder.tokenize("") == [1] and encoder.tokenize("ab ba")[-1] == 1
    assert encoder(["ab ba", ""]).values.isfinite().all()


def test_a_lone_surrogate_in_a_prompt_is_replaced(t5):
    assert torch.equal(t5(["caf\udce9 red"]).values, t5(["caf? red"]).values)


def test_loading_prints_nothing_and_restores_the_logging_settings(folders, capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_encoder(folders["bert"])
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# ---- cache


def record_computed(encoder: PretrainedTextEncoder) -> list[str]:
    """Return a list to which every text is appended whose states the network computes."""
    computed: list[str] = []
    compute_states = encoder.compute_states

    def record(texts: list[str]) -> list[Tensor]:
        computed.extend(texts)
        return compute_states(texts)

    encoder.compute_states = record
    return computed


def test_captions_are_computed_once_and_then_read_from_disk(folders, tmp_path):
    first = load_encoder(folders["t5"])
    direct = first(CAPTIONS)
    computed = record_computed(first)
    first.prepare_text(CAPTIONS * 3, tmp_path)
    assert sorted(computed) == sorted(CAPTIONS)

    second = load_encoder(folders["t5"])
    computed = record_computed(second)
    second.prepare_text(iter(CAPTIONS), tmp_path)
    cached = second(CAPTIONS)
    assert not computed
    assert torch.equal(cached.mask, direct.mask)
    assert torch.equal(cached.values, first(CAPTIONS).values)
    torch.testing.assert_close(cached.values, direct.values, rtol=0, atol=1e-5)


def test_a_text_outside_the_cache_is_computed_on_demand(t5, tmp_path):
    alone = unpadded_states(t5, ["three red squares"])
    t5.prepare_text(CAPTIONS, tmp_path)
    computed = record_computed(t5)
    torch.testing.assert_close(
        unpadded_states(t5, ["a red circle", "three red squares"], 1), alone, rtol=0, atol=1e-6
    )
    assert computed == ["three red squares"]


def test_new_captions_are_added_to_the_cache(folders, tmp_path):
    load_encoder(folders["t5"]).prepare_text(CAPTIONS[:2], tmp_path)
    again = load_encoder(folders["t5"])
    computed = record_computed(again)
    again.prepare_text(CAPTIONS, tmp_path)
    assert sorted(computed) == sorted(CAPTIONS[2:])
    third = load_encoder(folders["t5"])
    computed = record_computed(third)
    third.prepare_text(CAPTIONS, tmp_path)
    assert not computed


def test_without_a_cache_folder_states_are_computed_on_demand(t5):
    t5.prepare_text(CAPTIONS, None)
    computed = record_computed(t5)
    t5(CAPTIONS)
    assert sorted(computed) == sorted(CAPTIONS)


def test_interrupted_preparation_resumes_after_the_last_finished_file(
    folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "BATCH_SIZE", 1)
    monkeypatch.setattr(module, "TEXTS_PER_FILE", 2)
    complete, interrupted = tmp_path / "complete", tmp_path / "interrupted"
    load_encoder(folders["t5"]).prepare_text(CAPTIONS, complete)

    encoder, computed = load_encoder(folders["t5"]), []
    compute_states = encoder.compute_states

    def interrupt_at_the_fourth(texts: list[str]) -> list[Tensor]:
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.extend(texts)
        return compute_states(texts)

    encoder.compute_states = interrupt_at_the_fourth
    with pytest.raises(KeyboardInterrupt):
        encoder.prepare_text(CAPTIONS, interrupted)
    again = load_encoder(folders["t5"])
    rest = record_computed(again)
    again.prepare_text(CAPTIONS, interrupted)
    assert len(rest) == 3 and not set(rest) & set(computed[:2])
    assert [path.name for path in sorted(interrupted.iterdir())] == [
        path.name for path in sorted(complete.iterdir())
    ]


def make_empty(data: bytes) -> bytes:
    return b""


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_bit(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def overwrite(data: bytes) -> bytes:
    return b"another format"


@pytest.mark.parametrize("damage", [make_empty, truncate, flip_bit, overwrite])
def test_a_damaged_file_is_computed_again(damage, folders, tmp_path):
    first = load_encoder(folders["t5"])
    first.prepare_text(CAPTIONS, tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.unlink()  # the first encoder still has it memory-mapped
    file.write_bytes(damage(content))

    again = load_encoder(folders["t5"])
    computed = record_computed(again)
    again.prepare_text(CAPTIONS, tmp_path)
    assert sorted(computed) == sorted(CAPTIONS)
    assert torch.equal(again(CAPTIONS).values, first(CAPTIONS).values)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content]


def test_other_files_in_the_cache_folder_are_not_changed(t5, tmp_path):
    others = {"texts-0123-4567.safetensors": b"another encoder's", "notes.txt": b"mine"}
    for name, data in others.items():
        tmp_path.joinpath(name).write_bytes(data)
    t5.prepare_text(CAPTIONS, tmp_path)
    assert {name: tmp_path.joinpath(name).read_bytes() for name in others} == others
    assert len(list(tmp_path.iterdir())) == 3


def test_an_unwritable_cache_folder_is_named_in_the_error(t5, tmp_path):
    tmp_path.joinpath("file").touch()
    with pytest.raises(OSError, match="5 captions could not be written to .*file.* another folder"):
        t5.prepare_text(CAPTIONS, tmp_path / "file" / "texts")


def change_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_weights(folder: Path) -> None:
    torch.manual_seed(4)
    bert().save_pretrained(folder)


def change_heads(folder: Path) -> None:
    change_config(folder, num_attention_heads=4)


def change_case(folder: Path) -> None:
    build_tokenizer(lowercase=True).save_pretrained(folder)


@pytest.mark.parametrize("change", [change_weights, change_heads, change_case])
def test_a_changed_encoder_has_another_fingerprint(change, folders, tmp_path):
    shutil.copytree(folders["bert"], tmp_path / "copy")
    change(tmp_path / "copy")
    assert load_encoder(tmp_path / "copy").fingerprint != load_encoder(folders["bert"]).fingerprint


def test_the_fingerprint_depends_on_max_len(folders):
    assert (
        load_encoder(folders["t5"], max_len=5).fingerprint
        != load_encoder(folders["t5"], max_len=6).fingerprint
    )


def test_the_fingerprint_does_not_depend_on_the_location(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "moved")
    change_config(tmp_path / "moved", transformers_version="4.0.0", _name_or_path="elsewhere")
    assert load_encoder(tmp_path / "moved").fingerprint == load_encoder(folders["t5"]).fingerprint


# ---- errors


@pytest.mark.parametrize(
    "name", ["user/some-t5", "some-t5", "my models/text/t5", "./t5", "no such name", "../t5"]
)
def test_a_missing_encoder_raises_an_error_without_network_access(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requests: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: requests.append(address))
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: requests.append(address))
    with pytest.raises(
        FileNotFoundError,
        match=f"'{name}' is neither a folder nor .* nothing is downloaded by default",
    ):
        PretrainedTextConfig(name=name).build()
    assert not requests


def test_an_earlier_download_is_found_by_its_name(folders, tmp_path, monkeypatch):
    repository = tmp_path / "models--user--some-t5"
    shutil.copytree(folders["t5"], repository / "snapshots" / "0123abc")
    repository.joinpath("refs").mkdir()
    repository.joinpath("refs", "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *address, **_: pytest.fail(f"requested {address}")
    )
    encoder = PretrainedTextConfig(name="user/some-t5", max_len=12).build()
    assert encoder.fingerprint == load_encoder(folders["t5"]).fingerprint


def test_weights_that_may_contain_code_are_not_loaded(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "old")
    tmp_path.joinpath("old", "model.safetensors").unlink()
    torch.save(MODELS["t5"]().state_dict(), tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match="could not be loaded. .*may contain code and are not loaded"
    ):
        load_encoder(tmp_path / "old")


def test_a_model_with_its_own_code_is_not_loaded(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "own")
    tmp_path.joinpath("own", "mine.py").write_text("raise SystemExit('this code ran')")
    change_config(
        tmp_path / "own",
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"},
    )
    with pytest.raises(
        ValueError, match="could not be loaded. .*neither are models that require their own"
    ):
        load_encoder(tmp_path / "own")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_layers": 3},
            r"do not match its config.json: [1-9]\d* are missing and 0 have .* shape .*block\.2",
        ),
        ({"d_ff": 25}, r"0 are missing and 4 have another shape .*DenseReluDense"),
    ],
)
def test_incomplete_weights_raise_an_error(settings, message, folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "half")
    change_config(tmp_path / "half", **settings)
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path / "half")


def test_the_unused_pooler_may_be_missing(tmp_path):
    torch.manual_seed(3)
    model = transformers.BertModel(
        transformers.BertConfig(**SMALL, max_position_embeddings=32), add_pooling_layer=False
    )
    assert load_encoder(save_model(tmp_path, model))(CAPTIONS).values.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "max_len", "limits"),
    [("bert", 33, "from 2 up to 32"), ("t5", 1, "from 2 up to any number of")],
)
def test_a_max_len_outside_the_limits_of_the_encoder_raises_an_error(
    kind, max_len, limits, folders
):
    with pytest.raises(ValueError, match=f"`max_len` is {max_len}, .* takes {limits} tokens"):
        load_encoder(folders[kind], max_len=max_len)


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'package transformers, .*pip install "tessera\[text\]"'
    ):
        PretrainedTextConfig(name="user/some-t5").build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"name": " "}, "name .* is empty"), ({"max_len": 0}, "`max_len` is 0")],
)
def test_invalid_settings_raise_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainedTextConfig(**{"name": "user/some-t5"} | settings)


def test_a_single_text_raises_an_error(t5):
    with pytest.raises(TypeError, match="put it in a list"):
        t5("a red circle")
