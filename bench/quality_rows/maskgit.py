"""The text-to-image generator: muse-maskgit-pytorch's MaskGit in a minimal loop, and ours.

All sides get the same tokens and the same text states. The tokens, 16 x 16 of 1,000 codes, are
those of a Tessera tokenizer that `prepare` trains for a few minutes. A caption is a sequence of
random vectors, one for each word, which are the same whenever the word occurs. All networks have
dim 128, 5 layers and 4 heads. The package has no trainer for its generator: its side is a loop of
Adam steps on tokens in memory.

ours: the recipe images-maskgit with the defaults of its preset small.
ours-third: the same, with a schedule that ends after a third of the budget.

The metric is the cross-entropy of masked tokens of held-out images, with the captions and with the
same masks for all sides. At the end each side generates an image for each held-out caption, with
its own default settings, and the tokenizer decodes all of them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

from quality_rows import image_folders

GRID, VOCAB_SIZE, FSQ_LEVELS = 16, 1000, (8, 5, 5, 5)
DIM, DEPTH, HEADS = 128, 5, 4
TEXT_DIM, MAX_WORDS = 128, 16
TOKENIZER_STEPS = 2500
MASKS_PER_IMAGE = 2
EVAL_BATCH_SIZE = 16


# ---- what all sides get


def encode_text(texts: Sequence[str]) -> tuple[Any, Any]:
    """Return the states of texts, zero after their end, and the mask of those that are words."""
    import torch

    words = [re.findall(r"\w+", text.lower())[:MAX_WORDS] or [""] for text in texts]
    states = torch.zeros(len(texts), max(map(len, words)), TEXT_DIM)
    for row, found in enumerate(words):
        for position, word in enumerate(found):
            states[row, position] = word_state(word)
    return states, (states != 0).any(-1)


@cache
def word_state(word: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
    return torch.randn(TEXT_DIM, generator=generator)


@dataclass(frozen=True)
class TokenFiles:
    """The tokens of both folders of images, and the masks of the validation."""

    work: Path

    @property
    def path(self) -> Path:
        return self.work / "tokens.npz"

    @cached_property
    def arrays(self) -> dict[str, Any]:
        import numpy as np

        with np.load(self.path) as arrays:
            return dict(arrays)

    def tensor(self, name: str) -> Any:
        import torch

        return torch.from_numpy(self.arrays[name])


def prepare(data: Path, work: Path) -> None:
    """Train the tokenizer, and tokenize the images, unless that has been done."""
    import numpy as np

    image_folders.prepare(data, work)
    files = TokenFiles(work)
    if files.path.exists():
        return
    train_tokenizer(work)
    codes = {
        "train": encode_images(work, image_folders.train_folder(work)),
        "held_out": encode_images(work, image_folders.held_out_folder(work)),
    }
    unfinished = work / "tokens.part.npz"
    np.savez(unfinished, **codes, masks=draw_masks(len(codes["held_out"])))
    unfinished.rename(files.path)


def train_tokenizer(work: Path) -> None:
    """Train a tokenizer of 1,000 codes; all its settings are fixed here, whatever the defaults."""
    from tessera.modalities.image.recipes import images_vqgan
    from tessera.modalities.image.reconstruction import ImageReconstructionConfig
    from tessera.modalities.image.vqgan import VQGANConfig
    from tessera.nn.quantize import FSQConfig
    from tessera.recipes.presets import tokenizer_optimizer
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = images_vqgan(adversary="off", perceptual="off")
    task = replace(
        run.task,
        model=VQGANConfig(
            dim=16,
            max_channels=64,
            layers=2,
            blocks=(0, 2),
            encoder_blocks=(0, 0),
            quantizer=FSQConfig(levels=FSQ_LEVELS),
        ),
        reconstruction=ImageReconstructionConfig(pixel="l2"),
        optimizer=tokenizer_optimizer(2e-3, steps=TOKENIZER_STEPS),
    )
    folder = image_folders.train_folder(work).path
    data = replace(run.data, path=str(folder), size=image_folders.SIZE, val_fraction=0.0)
    engine = replace(run.engine, steps=TOKENIZER_STEPS, batch_size=8, seed=0)
    engine = replace(engine, validate_every=TOKENIZER_STEPS, sample_every=TOKENIZER_STEPS)
    run = replace(run, task=task, data=data, engine=engine)
    build_engine(run, RunDirectory(work / "tokenizer")).run()


def encode_images(work: Path, folder: image_folders.ImageFolder) -> Any:
    """Return the tokens of all images, (N, 16, 16)."""
    import torch

    tokenizer = load_tokenizer(work)
    images = image_folders.to_floats(folder.pixels())
    return torch.cat([tokenizer.encode(batch) for batch in images.split(EVAL_BATCH_SIZE)]).numpy()


def load_tokenizer(work: Path) -> Any:
    from tessera.api.tokenizer import Tokenizer

    return Tokenizer.load(work / "tokenizer")


def draw_masks(num_images: int) -> Any:
    """Draw which tokens are masked in validation, (masks, N, 16, 16).

    The times of MaskGIT's cosine schedule are spread evenly over the images.
    """
    import math

    import numpy as np

    rng = np.random.default_rng(0)
    shape = (MASKS_PER_IMAGE, num_images)
    times = (rng.permutation(math.prod(shape)).reshape(shape) + 0.5) / math.prod(shape)
    counts = np.maximum(1, np.rint(np.cos(times * np.pi / 2) * GRID * GRID))
    ranks = rng.random((*shape, GRID * GRID)).argsort(-1).argsort(-1)
    return (ranks < counts[..., None]).reshape(*shape, GRID, GRID)


@dataclass
class Predictions:
    """The predictions of masked held-out tokens, collected batch by batch."""

    files: TokenFiles
    captions: list[str]

    def compute(self, predict: Any) -> Outputs:
        """Return log-probability and correctness of each masked token.

        `predict` takes codes (B, 16, 16), masks and captions, and returns logits (M, V) and the
        tokens that they predict, (M,).
        """
        import torch

        codes, log_probs, correct = self.files.tensor("held_out").long(), [], []
        for mask in self.files.tensor("masks"):
            for start in range(0, len(codes), EVAL_BATCH_SIZE):
                rows = slice(start, start + EVAL_BATCH_SIZE)
                with torch.no_grad():
                    logits, targets = predict(codes[rows], mask[rows], self.captions[rows])
                chosen = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
                log_probs.append(chosen)
                correct.append(logits.argmax(-1) == targets)
        return {"log_probs": torch.cat(log_probs).numpy(), "correct": torch.cat(correct).numpy()}

    def sample(self, generate: Any) -> Outputs:
        """Return codes for all held-out captions; `generate` takes captions and a first seed."""
        import torch

        made = [
            generate(self.captions[start : start + EVAL_BATCH_SIZE], start)
            for start in range(0, len(self.captions), EVAL_BATCH_SIZE)
        ]
        return {"codes": torch.cat(made).numpy()}


def held_out_predictions(work: Path) -> Predictions:
    return Predictions(TokenFiles(work), image_folders.held_out_folder(work).captions())


# ---- the package


class PackageSide:
    """MaskGit in a loop of forward pass, backward pass and Adam."""

    def __init__(self, setting: Setting, *, lr: float, batch_size: int = 4):
        import torch
        from masked_generator import build_their_maskgit
        from peers.adapters import seed_everything

        seed_everything(setting.seed)
        self.model = build_their_maskgit(
            setting.scratch,
            vocab_size=VOCAB_SIZE,
            grid=GRID,
            depth=DEPTH,
            text_dim=TEXT_DIM,
            encode_text=lambda texts: encode_text(texts)[0],
            cond_drop_prob=0.25,
        )
        network = self.model.transformer
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr)
        self.codes = TokenFiles(setting.work).tensor("train").long()
        self.captions = image_folders.train_folder(setting.work).captions()
        self.batch_size, self.order = batch_size, []
        self.predictions = held_out_predictions(setting.work)
        unused = count_parameters(network.self_cond_to_init_embed)
        self.info = SideInfo(
            parameters=count_parameters(network) - unused,
            description=f"dim {DIM}, depth {DEPTH}, {HEADS} heads, Adam with learning rate {lr:g}, "
            f"batch size {batch_size}",
            packages=package_versions("muse-maskgit-pytorch", "torch"),
        )

    def step(self) -> bool:
        import torch

        if len(self.order) < self.batch_size:
            self.order = torch.randperm(len(self.codes)).tolist()
        chosen = [self.order.pop() for _ in range(self.batch_size)]
        loss = self.model(self.codes[chosen], texts=[self.captions[index] for index in chosen])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def outputs(self, final: bool) -> Outputs:
        self.model.eval()
        outputs = self.predictions.compute(self.predict)
        if final:
            outputs |= self.predictions.sample(lambda texts, seed: self.model.generate(texts=texts))
        self.model.train()
        return outputs

    def predict(self, codes: Any, mask: Any, captions: list[str]) -> tuple[Any, Any]:
        network = self.model.transformer
        shown = codes.masked_fill(mask, network.mask_id).flatten(1)
        logits = network(shown, text_embeds=encode_text(captions)[0])
        return logits[mask.flatten(1)], codes[mask]


# ---- ours


def build_ours(setting: Setting) -> Any:
    from endless_training import build_engine
    from masked_generator import fixed_text_config

    from quality_rows.engine_side import build_side
    from tessera.data.tokens import TokenDataset
    from tessera.engine.modes import seed
    from tessera.modalities.image.recipes import images_maskgit

    run = images_maskgit()
    network = replace(
        run.task.model,
        dim=DIM,
        depth=DEPTH,
        heads=HEADS,
        text=fixed_text_config(TEXT_DIM, encode_text),
    )
    config = replace(run.task, model=network)
    tokenizer = load_tokenizer(setting.work)
    captions = image_folders.train_folder(setting.work).captions()
    codes = TokenFiles(setting.work).tensor("train")
    names = [str(number) for number in range(len(codes))]
    dataset = TokenDataset(names, {"tokenizer": codes}, captions)
    predictions = held_out_predictions(setting.work)

    def build(engine_config: Any, folder: Path) -> Any:
        seed(setting.seed)
        return build_engine(config.build(tokenizer=tokenizer), dataset, engine_config, folder)

    def compute(task: Any, final: bool) -> Outputs:
        outputs = predictions.compute(partial(predict_masked, task))
        return outputs | (predictions.sample(partial(generate, task)) if final else {})

    description = f"recipe images-maskgit, preset small: dim {DIM}, depth {DEPTH}, {HEADS} heads"
    return build_side(run.engine, build, setting, compute, description)


def predict_masked(task: Any, codes: Any, mask: Any, captions: list[str]) -> tuple[Any, Any]:
    from tessera.objectives.masking import MaskedTokens

    network = task.model.network
    shown = codes.masked_fill(mask, network.mask_token_id)
    masked = MaskedTokens(task.layout.patchify(shown), task.layout.patchify(mask))
    condition = network.condition(captions, [False] * len(captions))
    logits = task.predict(masked, condition)
    return logits, task.layout.patchify(codes)[masked.loss_mask]


def generate(task: Any, captions: list[str], first_seed: int) -> Any:
    from tessera.objectives.generation import GenerationRequest

    seeds = list(range(first_seed, first_seed + len(captions)))
    return task.generate(GenerationRequest(prompts=captions, seeds=seeds)).clone()


# ---- metrics


@dataclass
class TokenJudge:
    """Averages the predictions, and compares decoded samples with the held-out images."""

    tokenizer: Any
    network: Any
    originals: Any

    def __call__(self, outputs: Outputs) -> Metrics:
        metrics = {
            "cross_entropy": -float(outputs["log_probs"].astype("float64").mean()),
            "accuracy": float(outputs["correct"].mean()),
        }
        if "codes" in outputs:
            metrics["frechet"] = self.frechet(outputs["codes"])
        return metrics

    def frechet(self, codes: Any) -> float:
        import torch

        from tessera.metrics.image import frechet_distance, moments

        embed = self.network.network.embed
        with torch.no_grad():
            batches = torch.from_numpy(codes).long().split(EVAL_BATCH_SIZE)
            made = torch.cat([embed(self.tokenizer.decode(batch)) for batch in batches])
            real = torch.cat([embed(batch) for batch in self.originals.split(EVAL_BATCH_SIZE)])
        return frechet_distance(moments(real), moments(made))


def build_judge(work: Path) -> Judge:
    from tessera.engine.task import Frozen
    from tessera.modalities.image.efficientnet_lite import EfficientNetLite

    judge = TokenJudge(
        load_tokenizer(work),
        Frozen(EfficientNetLite.load()),
        image_folders.to_floats(image_folders.held_out_folder(work).pixels()),
    )
    tokens = TokenFiles(work).arrays["held_out"]
    print(f"Frechet distance of the tokenizer's reconstructions: {judge.frechet(tokens):.1f}")
    return judge


ROW = Row(
    title="MaskGit",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=1e-3), is_package=True),
        "package-3e-4": SideSpec(partial(PackageSide, lr=3e-4), is_package=True, is_optional=True),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
    },
    metrics=(
        Metric("cross_entropy", "cross-entropy of masked tokens", higher_is_better=False),
        Metric("accuracy", "accuracy of masked tokens", higher_is_better=True),
    ),
    final_metrics=(
        Metric(
            "frechet", "Frechet distance of samples (Lite0)", higher_is_better=False, decimals=0
        ),
    ),
    prepare=prepare,
    build_judge=build_judge,
)
