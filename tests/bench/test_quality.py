"""bench/quality.py: the clock, resuming, ratios and the table, with sides that do no real work."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F

from tessera.losses.perceptual import perceptual_distance_B
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_soundstorm
from tessera.modalities.image.efficientnet_lite import find_weights
from tessera.modalities.image.recipes import images_vqgan
from tessera.modalities.music.recipes import music_mulan
from tessera.nn.masked_transformer import MaskedTransformerConfig
from tessera.objectives.masked import MaskedConfig
from tessera.run.directory import RunDirectory
from tessera.run.train import build_engine

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Import a module of the bench by its name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def harness(bench):
    return bench("time_to_quality")


class FakeTime:
    """A process time that advances only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSide:
    """A side whose steps take 2 s and whose validation takes 50 s."""

    def __init__(self, clock: FakeTime, steps: int = 10**6) -> None:
        self.clock, self.left = clock, steps

    def step(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.clock.now += 2
        return True

    def outputs(self, final: bool) -> dict[str, np.ndarray]:
        self.clock.now += 50
        return {"value": np.array(1.0)}


def make_curve(harness, side: str, seed: int, values: list[tuple[float, float]], name="psnr"):
    points = [harness.Point(time, 1, {name: value}) for time, value in values]
    return harness.Curve(side, seed, values[-1][0], {"parameters": 2_000_000}, points)


# ---- training


def test_validation_does_not_count(harness):
    time = FakeTime()
    training = harness.TimedTraining(FakeSide(time), harness.TrainingClock(time))
    training.train_until(9)
    assert (training.steps, training.clock.seconds) == (5, 10)
    training.side.outputs(final=False)
    training.train_until(20)
    assert (training.steps, training.clock.seconds) == (10, 20)


def test_a_training_that_ends_early_stops(harness):
    time = FakeTime()
    training = harness.TimedTraining(FakeSide(time, steps=3), harness.TrainingClock(time))
    training.train_until(100)
    training.train_until(200)
    assert training.has_ended and (training.steps, training.clock.seconds) == (3, 6)


def test_points_are_every_minute_with_two_early_ones_and_the_end(harness):
    assert harness.point_times(130) == [15, 30, 60, 120, 130]
    assert harness.point_times(120) == [15, 30, 60, 120]
    assert harness.point_times(10) == [10]


WORKER = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
sys.path.insert(0, {bench!r})
import time_to_quality as harness

class Side:
    info = harness.SideInfo(1, "adds", "none")
    count = 0
    def step(self):
        self.count += 1
        return self.count <= 5
    def outputs(self, final):
        print("noise that a package prints")
        return {{"count": np.array(self.count), "final": np.array(final)}}

with open({log!r}, "a") as log:
    log.write("started\\n")
harness.serve_side(lambda setting: Side(), harness.Setting(Path("."), Path({scratch!r}), 0, 40.0))
"""


@pytest.fixture
def side_command(tmp_path):
    """A process of a side that ends after 5 steps, and counts its starts."""
    script = tmp_path / "side.py"
    names = {"bench": str(BENCH), "log": str(tmp_path / "starts"), "scratch": str(tmp_path)}
    script.write_text(WORKER.format(**names))
    return [sys.executable, str(script)]


def judge_count(outputs):
    return {"count": float(outputs["count"]), "final": float(outputs["final"])}


def test_a_complete_result_is_not_repeated(harness, tmp_path, side_command):
    path = harness.result_path(tmp_path, "fake", 3)
    first = harness.run_once(path, "fake", 3, 40.0, side_command, judge_count)
    again = harness.run_once(path, "fake", 3, 40.0, side_command, judge_count)
    assert first == again and (first.side, first.seed) == ("fake", 3)
    assert [point.steps for point in first.points] == [5, 5, 5]
    assert [point.metrics["final"] for point in first.points] == [0, 0, 1]
    assert (tmp_path / "starts").read_text() == "started\n"
    assert not list(tmp_path.glob("*.part"))


def test_a_result_of_another_budget_is_refused(harness, tmp_path):
    path = harness.result_path(tmp_path, "fake", 0)
    path.write_text(json.dumps({"side": "fake", "seed": 0, "budget_s": 60.0, "info": {}}) + "\n")
    with pytest.raises(SystemExit, match="60 s of CPU time, not of 600 s"):
        harness.run_once(path, "fake", 0, 600.0, [], judge_count)


def test_an_interrupted_result_is_repeated(harness, tmp_path, side_command):
    path = harness.result_path(tmp_path, "fake", 0)

    def fail(outputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.run_once(path, "fake", 0, 40.0, side_command, fail)
    assert not path.exists()
    curve = harness.run_once(path, "fake", 0, 40.0, side_command, judge_count)
    assert len(curve.points) == 3 and len(path.read_text().splitlines()) == 4
    assert json.loads(path.read_text().splitlines()[0])["info"]["description"] == "adds"


# ---- ratios, table and plot


@pytest.mark.parametrize(
    "higher, values, value, expected",
    [
        (True, [(15, 10), (30, 20), (60, 40)], 30, 45),
        (False, [(15, 4.0), (30, 3.0), (60, 1.0)], 2.5, 37.5),
        (True, [(15, 10), (30, 20)], 20, 30),
        (True, [(15, 10), (30, 20)], 5, 15),
        (True, [(15, 10), (30, 20)], 21, None),
        (True, [(15, 10), (30, float("nan")), (60, 20)], 15, 37.5),
        (True, [(15, 10), (30, 20)], float("nan"), None),
    ],
)
def test_the_time_to_reach_a_value_is_interpolated(harness, higher, values, value, expected):
    metric = harness.Metric("psnr", "PSNR", higher_is_better=higher)
    assert harness.time_to_reach(make_curve(harness, "ours", 0, values), metric, value) == expected


@pytest.fixture
def row(harness):
    return harness.Row(
        title="fake",
        package="package",
        sides={},
        metrics=(harness.Metric("psnr", "PSNR (dB)", higher_is_better=True, decimals=1),),
        prepare=lambda data, work: None,
        build_judge=lambda work: judge_count,
    )


@pytest.fixture
def curves(harness):
    return [
        make_curve(harness, "package", 0, [(30, 10), (100, 20)]),
        make_curve(harness, "ours", 0, [(10, 18), (20, 22)]),
        make_curve(harness, "package", 1, [(30, 11), (100, 30)]),
        make_curve(harness, "ours", 1, [(10, 18), (20, 22)]),
    ]


def test_the_table_compares_equal_seeds(bench, row, curves):
    table = bench("quality_report").format_table(row, curves)
    assert table.splitlines()[-1] == "| PSNR (dB) | 20.0, 30.0 | 22.0, 22.0 | 0.15, not reached |"
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_plot_is_written(bench, row, curves, tmp_path):
    bench("quality_report").plot_curves(row, curves, tmp_path / "figures" / "fake.png")
    assert (tmp_path / "figures" / "fake.png").read_bytes().startswith(b"\x89PNG")


# ---- the command line


def test_every_row_is_complete(bench):
    rows = bench("quality_rows")
    for name in rows.ROWS:
        row = rows.load_row(name)
        # No package trains a codec of its own: that row compares two networks of ours.
        assert row.sides[row.package].is_package == (name != "codec")
        assert any(not side.is_package for side in row.sides.values())


def test_an_unknown_row_or_side_is_refused(bench, capsys, monkeypatch, tmp_path):
    quality = bench("quality")
    monkeypatch.setattr(quality.timing, "set_threads", lambda threads: None)
    folders = ["--data", str(tmp_path), "--work", str(tmp_path)]
    for arguments, expected in (
        (["music", *folders], "maskgit"),
        (["vqgan", *folders, "--sides", "theirs"], "ours-third"),
    ):
        with pytest.raises(SystemExit):
            quality.main(arguments)
        assert expected in capsys.readouterr().err


# ---- our sides


def test_our_side_plans_its_steps_and_validates_ema_weights(bench, harness, tmp_path):
    run = images_vqgan(preset="tiny")
    setting = harness.Setting(tmp_path, tmp_path, seed=5, budget_s=0.5)
    side = bench("quality_rows.engine_side").build_side(
        run.engine,
        lambda config, folder: build_engine(replace(run, engine=config), RunDirectory(folder)),
        setting,
        lambda task, final: {"weight": task.model.last_layer.detach().clone().numpy()},
        "tiny",
    )
    planned = side.engine.config.steps
    assert side.engine.config.seed == 5 and f"{planned} steps" in side.info.description
    first = side.outputs(final=False)["weight"]
    steps = sum(1 for _ in iter(side.step, False))
    assert steps == planned - 1 and not side.step()
    last = side.outputs(final=True)["weight"]
    assert not np.array_equal(first, last)
    assert not np.array_equal(last, side.engine.task.model.last_layer.detach().numpy())
    assert not any(path.is_dir() for path in (tmp_path / "run" / "checkpoints").glob("*"))


# ---- the rows


@pytest.fixture
def images(tmp_path):
    """A folder of 12 small images with captions."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"image number {number}")
    return folder


def test_all_sides_get_the_same_images_and_none_the_held_out_ones(bench, images, tmp_path):
    folders = bench("quality_rows.image_folders")
    folders.prepare(images, tmp_path)
    train, held_out = folders.train_folder(tmp_path), folders.held_out_folder(tmp_path)
    captions = train.captions() + held_out.captions()
    assert sorted(captions) == sorted(f"image number {number}" for number in range(12))
    assert held_out.captions() and len(train.pixels()) == len(train.captions())
    for caption, pixels in zip(held_out.captions(), held_out.pixels(), strict=True):
        original = np.asarray(PIL.Image.open(images / f"{caption.split()[-1]}.png"))
        np.testing.assert_array_equal(pixels, original.transpose(2, 0, 1))
    np.testing.assert_array_equal(folders.to_bytes(folders.to_floats(pixels)), pixels)
    written = train.metadata.stat().st_mtime_ns
    folders.prepare(images, tmp_path)
    assert train.metadata.stat().st_mtime_ns == written


def test_the_package_gets_our_perceptual_distance(bench, tmp_path):
    shutil.copyfile(find_weights(), bench("quality_rows.image_folders").lite0_weights(tmp_path))
    network = bench("quality_rows.vqgan").lite0_distance(tmp_path)
    a, b = torch.rand(2, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = perceptual_distance_B(
        *(network.network.features(images * 2 - 1) for images in (a, b))
    ).mean()
    torch.testing.assert_close(F.mse_loss(network(a), network(b)), expected)


def test_validation_masks_are_spread_over_the_schedule(bench):
    maskgit = bench("quality_rows.maskgit")
    masks = maskgit.draw_masks(50)
    assert masks.shape == (maskgit.MASKS_PER_IMAGE, 50, 16, 16)
    assert masks.mean() == pytest.approx(2 / np.pi, abs=0.01)
    np.testing.assert_array_equal(masks, maskgit.draw_masks(50))


def test_equal_words_have_equal_states(bench):
    states, mask = bench("quality_rows.maskgit").encode_text(["Red heart", "a red", ""])
    assert mask.tolist() == [[True, True], [True, True], [True, False]]
    assert torch.equal(states[0, 0], states[1, 1]) and not torch.equal(states[0, 1], states[1, 0])
    assert not states[2, 1].any()


def test_our_generator_predicts_the_masked_tokens(bench):
    maskgit = bench("quality_rows.maskgit")
    text = bench("masked_generator").fixed_text_config(maskgit.TEXT_DIM, maskgit.encode_text)
    config = MaskedConfig(
        tokenizer="stub",
        max_positions=64,
        model=MaskedTransformerConfig(dim=16, depth=1, heads=2, text=text),
    )
    task = config.build(tokenizer=bench("endless_training").stub_tokenizer(10, (16, 16))).eval()
    codes = torch.randint(10, (3, 16, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.from_numpy(maskgit.draw_masks(3)[0])
    logits, targets = maskgit.predict_masked(task, codes, mask, ["a", "b", "c"])
    assert logits.shape == (int(mask.sum()), 10)
    assert targets.bincount().tolist() == codes[mask].bincount().tolist()


# ---- audio codec


def test_recordings_of_the_codec_are_held_out_and_not_silent(bench, tmp_path):
    row = bench("quality_rows.codec")
    data = tmp_path / "audio"
    data.mkdir()
    tones = np.sin(np.arange(row.RATE_HZ) * np.linspace(0.02, 0.2, 30)[:, None])
    for number, samples in enumerate(tones):
        loudness = 0.0 if number == 7 else 0.3
        audio = Audio(loudness * samples[None].astype(np.float32), row.RATE_HZ)
        audio.write(data / f"{number}.wav")
    row.prepare(data, tmp_path)
    folder, samples = row.Recordings(tmp_path).load()
    dataset = row.data_config(folder).build(captions=False)
    silent = [dataset.validation.name(i) for i in range(len(dataset.validation))].count("7.wav")
    assert samples.shape == (len(dataset.validation) - silent, 1, row.RATE_HZ)
    assert row.ROW.package == "soundstream" and row.ROW.sides["spectral-quarter"].budget == 1 / 4


def test_metrics_of_the_codec_are_those_of_a_worse_copy(bench):
    row = bench("quality_rows.codec")
    generator = torch.Generator().manual_seed(0)
    times = torch.arange(row.RATE_HZ) / row.RATE_HZ
    voice = 0.3 * torch.sin(2 * torch.pi * 150 * times) * (1 + torch.sin(2 * torch.pi * 4 * times))
    originals = voice[None, None].repeat(2, 1, 1)
    noise = 0.03 * torch.randn(originals.shape, generator=generator)
    judge = row.AudioJudge(originals)
    same = judge({"samples": (0.5 * originals).numpy()})
    worse = judge({"samples": (originals + noise).numpy()})
    assert same["rms_ratio"] == pytest.approx(0.5) and same["si_sdr"] > 60
    assert worse["rms_ratio"] == pytest.approx(1, abs=0.02)
    assert 15 < worse["si_sdr"] < 25 and worse["stoi"] < same["stoi"]


# ---- SoundStorm


def test_masks_of_soundstorm_show_coarser_levels_and_a_prefix(bench):
    """Each level is predicted equally often, after a prefix that is shown in all levels."""
    row = bench("quality_rows.soundstorm")
    masks = torch.from_numpy(row.draw_masks(6))
    codes = torch.zeros(6, row.FRAMES, row.NUM_QUANTIZERS, dtype=torch.long)
    assert masks.any(2).sum((0, 1)).tolist() == [6 * row.MASKS_PER_LEVEL] * row.NUM_QUANTIZERS
    for number, mask in enumerate(masks):
        level = number % row.NUM_QUANTIZERS
        shown = row.mask_tokens(codes, mask, level, mask_token_id=9)
        assert (shown[mask] == 9).all() and (shown[..., :level] == 0).all()
        for tokens, predicted in zip(shown, mask, strict=True):
            first = int(predicted.any(-1).int().argmax())
            assert (tokens[:first] == 0).all() and (tokens[first:, level + 1 :] == 9).all()


def test_levels_of_soundstorm_have_the_same_weight(bench):
    row = bench("quality_rows.soundstorm")
    levels = np.concatenate([np.zeros(90), np.arange(1, 8)])
    outputs = {"levels": levels, "log_probs": np.where(levels == 0, -1.0, -9.0)}
    assert row.measure(outputs) == {"first_level": 1.0, "all_levels": pytest.approx(8.0)}


def test_predictions_of_our_soundstorm_are_those_of_its_loss(bench):
    """The mean over masks of the log-probabilities equals the cross-entropy of the task."""
    row = bench("quality_rows.soundstorm")
    tokenizers = {
        "tokenizer": bench("endless_training").stub_tokenizer(
            row.VOCAB_SIZE, (row.FRAMES,), num_quantizers=row.NUM_QUANTIZERS, seconds=0.02
        ),
        "semantic": bench("endless_training").stub_tokenizer(
            row.SEMANTIC_VOCAB_SIZE, (row.FRAMES,), seconds=0.02
        ),
    }
    task = audio_soundstorm("tiny").task.build(**tokenizers).eval()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, row.FRAMES, row.NUM_QUANTIZERS), generator=generator)
    semantic = torch.randint(256, (2, row.FRAMES), generator=generator)
    mask = torch.from_numpy(row.draw_masks(2)[3])
    shown = row.mask_tokens(codes, mask, 3, task.network.mask_token_id)
    with torch.no_grad():
        logits = row.predict_masked(task, shown, mask, semantic)
        condition = task.network.condition([""] * 2, [False] * 2, semantic)
        expected = task.network.logits(task.network.states(shown, condition), mask)
    torch.testing.assert_close(logits, expected)


# ---- MuLaN


@pytest.fixture
def music(bench, tmp_path):
    """The row, and a work folder with recordings of 1 to 4 s with two captions each."""
    row = bench("quality_rows.mulan")
    folder, rng = tmp_path / "music-files", np.random.default_rng(0)
    folder.mkdir()
    for number in range(24):
        samples = rng.uniform(-0.5, 0.5, (1, row.RATE_HZ * (1 + number % 4))).astype(np.float32)
        Audio(samples, row.RATE_HZ).write(folder / f"{number}.wav")
        (folder / f"{number}.txt").write_text(f"piece {number}\nnumber {number}, a piece")
    row.prepare(folder, tmp_path)
    return row, tmp_path


def test_all_sides_of_mulan_get_the_same_recordings(music):
    row, work = music
    train, held_out = (
        row.Recordings.load(path(work)) for path in (row.train_path, row.held_out_path)
    )
    names = [captions[0] for part in (train, held_out) for captions in part.captions]
    assert sorted(names) == sorted(f"piece {number}" for number in range(24)) and held_out.waves
    for wave, (caption, _) in zip(train.waves, train.captions, strict=True):
        seconds = 1 + int(caption.split()[1]) % 4
        assert len(wave) == row.RATE_HZ * max(row.SECONDS, seconds)
    ours, theirs = row.build_dataset(train), row.RandomPairs(train, row.WordVocabulary({}))
    torch.manual_seed(0)
    for index, wave in enumerate(train.waves):
        parts = [ours.item(index, np.random.default_rng(1)).samples[0], theirs[index][0]]
        assert all(len(part) == row.LENGTH for part in parts)
        assert all(is_part(np.asarray(part), wave.numpy()) for part in parts)
    assert held_out.centres().shape == (len(held_out.waves), row.LENGTH)


def is_part(part: np.ndarray, whole: np.ndarray) -> bool:
    starts = np.flatnonzero(whole == part[0])
    return any(np.array_equal(whole[start : start + len(part)], part) for start in starts)


def test_words_of_captions_are_token_ids(bench):
    row = bench("quality_rows.mulan")
    vocabulary = row.WordVocabulary.of_captions(["A reel in 6/8 time,", "a slow reel"])
    ids = vocabulary.encode("a fast reel (6/8)").tolist()
    assert len(ids) == row.TEXT_LEN and ids[4:] == [0] * (row.TEXT_LEN - 4) and ids[1] == 1
    assert sorted({*ids, *vocabulary.encode("in slow time").tolist()}) == list(
        range(len(vocabulary))
    )


def test_recordings_of_mulan_are_ranked_by_their_caption(bench):
    row = bench("quality_rows.mulan")
    captions = [f"piece {number}" for number in range(8)]
    unit = np.eye(8, dtype=np.float32)
    perfect = row.measure({"text": unit, "audio": unit}, captions)
    assert perfect == {"text_to_audio_R@1": 1, "text_to_audio_R@5": 1, "reciprocal_rank": 1}
    swapped = row.measure({"text": unit, "audio": unit[[1, 0, *range(2, 8)]]}, captions)
    assert swapped["text_to_audio_R@1"] == 0.75
    equal = row.measure({"text": unit, "audio": unit[[1, 0, *range(2, 8)]]}, ["one piece"] * 8)
    assert equal["text_to_audio_R@1"] == 1, "a caption finds every recording that has it"


def test_our_mulan_embeds_all_held_out_recordings(music):
    row, work = music
    held_out = row.Recordings.load(row.held_out_path(work))
    model = music_mulan("small").task.build().eval().model
    model.text.prepare_text([caption for one in held_out.captions for caption in one], work)
    outputs = row.embed_in_batches(held_out, model.get_audio_latents, model.get_text_latents)
    count = len(held_out.waves)
    assert outputs["audio"].shape == outputs["text"].shape == (count, row.LATENT_DIM)
    assert set(row.build_judge(work)(outputs)) == {metric.name for metric in row.ROW.metrics}
    settings = music_mulan("small")
    assert (settings.data.rate_hz, settings.data.seconds) == (row.RATE_HZ, row.SECONDS)
    assert settings.task.model.audio.dim == row.DIM and settings.engine.batch_size == row.BATCH_SIZE
