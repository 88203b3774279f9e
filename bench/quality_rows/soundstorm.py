"""SoundStorm: that of soundstorm-pytorch with its trainer, and ours.

All sides get the same acoustic and semantic tokens of the same recordings: 2 s, 100 frames of 8
levels of 256 codes, and 100 semantic tokens of 256. They are those of a codec and of semantic
tokens (MFCC) that `prepare` trains for a few minutes. All networks are Conformers of dim 128, depth
4 and 4 heads, with a kernel of 5, as SoundStorm has.

package: SoundStormTrainer with its default learning rate of 3e-4, at a batch size of 8.
package-1e-3: the same, with a learning rate of 1e-3.
ours: the recipe audio-soundstorm with the defaults of its preset small, at a batch size of 8.
ours-third: the same, with a schedule that ends after a third of the budget.

The metrics are the cross-entropies of masked tokens of held-out recordings, of the first level and
over all levels, with the same masks for all sides: a level and a prefix are drawn as in SoundStorm,
so that coarser levels are shown and finer ones are masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

RATE_HZ, SECONDS, HOP = 16_000, 2.0, 320
FRAMES, NUM_QUANTIZERS, VOCAB_SIZE, SEMANTIC_VOCAB_SIZE = 100, 8, 256, 256
DIM, DEPTH, HEADS, KERNEL_SIZE = 128, 4, 4, 5
CODEC_STEPS, SEMANTIC_STEPS = 800, 200
BATCH_SIZE, EVAL_BATCH_SIZE = 8, 16
MASKS_PER_LEVEL = 2
VAL_FRACTION = 0.1


# ---- what all sides get


@dataclass(frozen=True)
class TokenFiles:
    """The tokens of training and held-out recordings, and the masks of the validation."""

    work: Path

    @property
    def path(self) -> Path:
        return self.work / "soundstorm-tokens.npz"

    @cached_property
    def arrays(self) -> dict[str, Any]:
        import numpy as np

        with np.load(self.path) as arrays:
            return dict(arrays)

    def tensor(self, name: str) -> Any:
        import torch

        return torch.from_numpy(self.arrays[name]).long()


def prepare(data: Path, work: Path) -> None:
    """Train both tokenizers, and tokenize the recordings, unless that has been done."""
    import numpy as np

    files = TokenFiles(work)
    if files.path.exists():
        return
    from tessera.modalities.audio.recipes import audio_codec, audio_semantic

    train_tokenizer(audio_codec(), CODEC_STEPS, data, work / "codec")
    train_tokenizer(audio_semantic(), SEMANTIC_STEPS, data, work / "semantic")
    arrays = {}
    for name in ("codec", "semantic"):
        codes = encode_recordings(work / name, data)
        arrays |= {f"{name}_{part}": array for part, array in codes.items()}
    arrays["masks"] = draw_masks(len(arrays["codec_held_out"]))
    unfinished = work / "soundstorm-tokens.part.npz"
    np.savez(unfinished, **arrays)
    unfinished.rename(files.path)


def data_config(data: Path) -> Any:
    """Return the recordings of at least 2 s, cut at their centre."""
    from tessera.modalities.audio.dataset import AudioDataConfig

    return AudioDataConfig(
        path=str(data),
        rate_hz=RATE_HZ,
        seconds=SECONDS,
        crop="centre",
        on_short="skip",
        val_fraction=VAL_FRACTION,
    )


def train_tokenizer(run: Any, steps: int, data: Path, folder: Path) -> None:
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    engine = replace(run.engine, steps=steps, validate_every=steps, sample_every=steps, seed=0)
    settings = replace(run.data, path=str(data), val_fraction=VAL_FRACTION)
    build_engine(replace(run, engine=engine, data=settings), RunDirectory(folder)).run()


def encode_recordings(folder: Path, data: Path) -> dict[str, Any]:
    """Return the codes of training and held-out recordings."""
    import torch

    from tessera.api.tokenizer import Tokenizer

    config = data_config(data)
    tokenizer, split = Tokenizer.load(folder).with_data(config), config.build(captions=False)
    parts = {"train": split.train, "held_out": split.validation}
    return {
        name: torch.cat(
            [codes for batch, codes in tokenizer.encode_dataset(part, 16) if len(batch)]
        ).numpy()
        for name, part in parts.items()
    }


def draw_masks(num_examples: int) -> Any:
    """Draw which tokens are predicted in validation, (masks, N, frames, levels), each level as
    often; the times of the cosine schedule are spread evenly over the examples."""
    import numpy as np

    rng = np.random.default_rng(0)
    masks = np.zeros(
        (MASKS_PER_LEVEL * NUM_QUANTIZERS, num_examples, FRAMES, NUM_QUANTIZERS), dtype=bool
    )
    for number, mask in enumerate(masks):
        times = (rng.permutation(num_examples) + 0.5) / num_examples
        for row, time in enumerate(times):
            start = int(rng.random() * FRAMES)
            count = max(1, round(np.cos(time * np.pi / 2) * (FRAMES - start)))
            chosen = start + rng.permutation(FRAMES - start)[:count]
            mask[row, chosen, number % NUM_QUANTIZERS] = True
    return masks


@dataclass
class Predictions:
    """The predictions of masked held-out tokens, collected batch by batch."""

    files: TokenFiles

    def compute(self, predict: Any, mask_token_id: int) -> Outputs:
        """Return the log-probability of each masked token, and its level.

        `predict` takes tokens (B, frames, levels), which of them to predict, and semantic tokens,
        and returns logits (M, V).
        """
        import torch

        codes = self.files.tensor("codec_held_out")
        semantic = self.files.tensor("semantic_held_out")
        log_probs, levels = [], []
        for number, mask in enumerate(torch.from_numpy(self.files.arrays["masks"])):
            level = number % NUM_QUANTIZERS
            for start in range(0, len(codes), EVAL_BATCH_SIZE):
                rows = slice(start, start + EVAL_BATCH_SIZE)
                shown = mask_tokens(codes[rows], mask[rows], level, mask_token_id)
                with torch.no_grad():
                    logits = predict(shown, mask[rows], semantic[rows])
                targets = codes[rows][mask[rows]]
                chosen = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
                log_probs.append(chosen)
                levels.append(torch.full((len(targets),), level))
        return {"log_probs": torch.cat(log_probs).numpy(), "levels": torch.cat(levels).numpy()}


def mask_tokens(codes: Any, mask: Any, level: int, mask_token_id: int) -> Any:
    """Mask the tokens to predict, and all finer levels after the prefix."""
    import torch

    first_B = mask.any(-1).int().argmax(-1)
    finer = torch.zeros_like(mask)
    finer[..., level + 1 :] = True
    finer &= (torch.arange(FRAMES) >= first_B[:, None])[..., None]
    return codes.masked_fill(mask | finer, mask_token_id)


# ---- the package


class PackageSide:
    """The package's model in its own trainer."""

    def __init__(self, setting: Setting, *, lr: float):
        from peers.adapters import ExampleList, SoundStormAdapter, seed_everything

        seed_everything(setting.seed)
        self.files = TokenFiles(setting.work)
        self.model = build_their_model()
        pairs = zip(self.files.tensor("semantic_train"), self.files.tensor("codec_train"))
        self.adapter = SoundStormAdapter(
            examples=ExampleList(list(pairs)), trainer={"lr": lr, "batch_size": BATCH_SIZE}
        )
        self.trainer = self.adapter.build_trainer(self.model, setting.scratch / "package")
        self.predictions = Predictions(self.files)
        self.info = SideInfo(
            parameters=count_parameters(self.model),
            description=f"dim {DIM}, depth {DEPTH}, {HEADS} heads, SoundStormTrainer with learning "
            f"rate {lr:g}, batch size {BATCH_SIZE}",
            packages=package_versions("soundstorm-pytorch", "torch"),
        )

    def step(self) -> bool:
        self.adapter.train(self.trainer, steps=1)
        return True

    def outputs(self, final: bool) -> Outputs:
        self.model.eval()
        outputs = self.predictions.compute(self.predict, self.model.mask_id)
        self.model.train()
        return outputs

    def predict(self, shown: Any, mask: Any, semantic: Any) -> Any:
        condition = self.model.maybe_get_condition(semantic, length=FRAMES)
        logits = self.model.net(shown.flatten(1), cond=condition)
        return logits.unflatten(1, (FRAMES, NUM_QUANTIZERS))[mask]


def build_their_model() -> Any:
    from soundstorm_pytorch import ConformerWrapper, SoundStorm

    network = ConformerWrapper(
        codebook_size=VOCAB_SIZE,
        num_quantizers=NUM_QUANTIZERS,
        conformer={
            "dim": DIM,
            "depth": DEPTH,
            "heads": HEADS,
            "dim_head": DIM // HEADS,
            "ff_mult": 4,
            "conv_kernel_size": KERNEL_SIZE,
        },
    )
    return SoundStorm(
        network,
        steps=16,
        schedule="cosine",
        num_semantic_token_ids=SEMANTIC_VOCAB_SIZE,
        wav2vec_target_sample_hz=RATE_HZ,
        wav2vec_downsample_factor=HOP,
        codec_target_sample_hz=RATE_HZ,
        codec_downsample_factor=HOP,
    )


# ---- ours


def build_ours(setting: Setting) -> Any:
    from endless_training import build_engine, stub_tokenizer

    from quality_rows.engine_side import build_side
    from tessera.data.tokens import TokenDataset
    from tessera.engine.modes import seed
    from tessera.modalities.audio.recipes import audio_soundstorm

    run = audio_soundstorm()
    config = replace(run.task, model=replace(run.task.model, dim=DIM, depth=DEPTH, heads=HEADS))
    files = TokenFiles(setting.work)
    codes = {"tokenizer": files.tensor("codec_train"), "semantic": files.tensor("semantic_train")}
    names = [str(number) for number in range(len(codes["semantic"]))]
    dataset = TokenDataset(names, codes, [""] * len(names))
    predictions = Predictions(files)
    frame_seconds = HOP / RATE_HZ
    tokenizers = {
        "tokenizer": stub_tokenizer(
            VOCAB_SIZE, (FRAMES,), num_quantizers=NUM_QUANTIZERS, seconds=frame_seconds
        ),
        "semantic": stub_tokenizer(SEMANTIC_VOCAB_SIZE, (FRAMES,), seconds=frame_seconds),
    }

    def build(engine_config: Any, folder: Path) -> Any:
        seed(setting.seed)
        return build_engine(config.build(**tokenizers), dataset, engine_config, folder)

    def compute(task: Any, final: bool) -> Outputs:
        return predictions.compute(partial(predict_masked, task), task.network.mask_token_id)

    description = f"recipe audio-soundstorm, preset small: dim {DIM}, depth {DEPTH}, {HEADS} heads"
    engine = replace(run.engine, batch_size=BATCH_SIZE)
    return build_side(engine, build, setting, compute, description)


def predict_masked(task: Any, shown: Any, mask: Any, semantic: Any) -> Any:
    count = len(shown)
    condition = task.network.condition([""] * count, [False] * count, semantic)
    return task.network.logits_at(shown, mask, condition)


# ---- metrics


def measure(outputs: Outputs) -> Metrics:
    """Average the log-probabilities; each level has the same weight in the mean over levels."""
    import numpy as np

    log_probs, levels = outputs["log_probs"].astype("float64"), outputs["levels"]
    by_level = [-log_probs[levels == level].mean() for level in range(NUM_QUANTIZERS)]
    return {"first_level": float(by_level[0]), "all_levels": float(np.mean(by_level))}


def build_judge(work: Path) -> Judge:
    return measure


ROW = Row(
    title="SoundStorm",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=3e-4), is_package=True),
        "package-1e-3": SideSpec(partial(PackageSide, lr=1e-3), is_package=True, is_optional=True),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
    },
    metrics=(
        Metric("first_level", "cross-entropy of the first level", higher_is_better=False),
        Metric("all_levels", "cross-entropy, mean over levels", higher_is_better=False),
    ),
    prepare=prepare,
    build_judge=build_judge,
)
