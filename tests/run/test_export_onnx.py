"""Tests of ONNX: the same codes and media as the model, in onnxruntime, on several shapes."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import onnxruntime
import pytest
import torch

from tessera import Tokenizer
from tessera.modalities.audio.recipes import audio_codec
from tessera.modalities.video.recipes import videos_magvit2
from tessera.recipes.registry import get_recipe
from tessera.run.config import Run
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, mesh_tokenizer, tokenizer, train_once


def with_one_step(run: Run) -> Run:
    return dataclasses.replace(run, engine=dataclasses.replace(run.engine, steps=1))


def with_each_layer_once(run: Run) -> Run:
    """Return a video tokenizer without the second halving of time, for which the sizes that the
    exporter derives grow: it took most of the time of this file."""
    layers = ("compress_space", "compress_time", "residual", "attend_time")
    model = dataclasses.replace(run.task.model, layers=layers)
    return dataclasses.replace(run, task=dataclasses.replace(run.task, model=model))


def video_tokenizer() -> str:
    return train_once("onnx-video", with_one_step(with_each_layer_once(videos_magvit2("tiny"))))


TOKENIZERS = {
    "images-vqgan": tokenizer,
    "videos-magvit2": video_tokenizer,
    "audio-codec": lambda: train_once("onnx-codec", with_one_step(audio_codec("tiny"))),
}


@pytest.mark.parametrize("recipe", TOKENIZERS)
def test_onnx_equals_the_model_on_other_shapes(recipe, tmp_path):
    run, out = TOKENIZERS[recipe](), tmp_path / "onnx"
    result = tessera("export", run, "--out", out, "--format", "onnx")
    assert result.code == 0, result
    assert len(re.findall(r"encoder\.onnx on", result.out)) == 2
    assert len(re.findall(r"decoder\.onnx on", result.out)) == 2
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "decoder.onnx",
        "encoder.onnx",
    ]
    model = Tokenizer.load(run)
    shape = {"images-vqgan": (3, 3, 24, 16), "videos-magvit2": (1, 3, 9, 16, 32)}
    media = torch.rand(shape.get(recipe, (3, 1, 2000)), generator=torch.manual_seed(0)) * 2 - 1
    sessions = [
        onnxruntime.InferenceSession(out / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder", "decoder")
    ]
    [codes] = sessions[0].run(None, {"media": media.numpy()})
    np.testing.assert_array_equal(codes, model.encode(media).numpy())
    [output] = sessions[1].run(None, {"codes": codes})
    np.testing.assert_allclose(output, model.decode(torch.from_numpy(codes)).numpy(), atol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == model.vocab_size and config["recipe"] == recipe


def test_runs_without_such_networks_are_rejected(tmp_path):
    generator = train_once("export-images-maskgit", build_tiny(get_recipe("images-maskgit")))
    for run in (mesh_tokenizer(), generator):
        message = run_invalid("export", run, "--out", tmp_path / "x", "--format", "onnx")
        assert "only tokenizers of images, videos and audio" in message
    assert list(tmp_path.iterdir()) == []
