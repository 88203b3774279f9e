"""The image tokenizer: muse-maskgit-pytorch's VQGanVAE with its own trainer, and ours.

All sides train on the same files of 64 x 64 pixels and turn an image into 16 x 16 tokens. The
package has its own trainer and its default losses and learning rate, dim 32, and LFQ with 1,024
codes; ours has FSQ with 1,000. The trainer's own held-out fraction is 0, since the held-out images
are in another folder.

In trials of a minute each the package was better with gradients clipped to 1, and worse with a
learning rate of 1e-3. Its perceptual loss would download a VGG16. The trials compared two
replacements: EfficientNet-Lite0 with the distance of our perceptual loss, and two untrained
convolutions, as in `image_tokenizer.py`. The second was better in PSNR, SSIM and perceptual
distance after the same time, and equal in Frechet distance. What lost is an optional side.

ours: the recipe images-vqgan with the defaults of its preset small.
ours-third: the same, with a schedule that ends after a third of the budget.
ours-same: our engine and network with the layers, channels, quantizer, losses, optimizer and batch
size of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

from quality_rows import image_folders

CODEBOOK_SIZE = 1024
EVAL_BATCH_SIZE = 32


def reconstruct_in_batches(images: Any, reconstruct: Any) -> Any:
    """Return the reconstructions of images in [-1, 1] as bytes."""
    import torch

    with torch.no_grad():
        made = [reconstruct(batch) for batch in images.split(EVAL_BATCH_SIZE)]
    return image_folders.to_bytes(torch.cat(made))


def held_out_images(work: Path) -> Any:
    return image_folders.to_floats(image_folders.held_out_folder(work).pixels())


# ---- the package


class PackageSide:
    """VQGanVAETrainer; its outputs are those of its EMA weights, and of the raw ones."""

    def __init__(
        self,
        setting: Setting,
        *,
        lr: float,
        batch_size: int = 4,
        max_grad_norm: float | None = 1.0,
        use_lite0: bool = False,
    ):
        from peers.adapters import VQGANAdapter, seed_everything

        seed_everything(setting.seed)
        adapter = VQGANAdapter(
            image_folders.train_folder(setting.work).path,
            model={"layers": 2, "codebook_size": CODEBOOK_SIZE},
            trainer={
                "lr": lr,
                "batch_size": batch_size,
                "max_grad_norm": max_grad_norm,
                "discr_max_grad_norm": max_grad_norm,
                "valid_frac": 0,
            },
            perceptual=lite0_distance(setting.work) if use_lite0 else None,
        )
        model = adapter.build_model()
        self.trainer = adapter.build_trainer(model, setting.scratch / "results")
        self.images = held_out_images(setting.work)
        self.info = SideInfo(
            parameters=count_parameters(model.enc_dec) + count_parameters(model.quantizer),
            description=f"dim 32, 2 layers, LFQ of {CODEBOOK_SIZE} codes, learning rate {lr:g}, "
            f"batch size {batch_size}, gradients clipped to {max_grad_norm}, perceptual loss on "
            f"{'EfficientNet-Lite0' if use_lite0 else 'two untrained convolutions'}",
            packages=package_versions("muse-maskgit-pytorch", "torch"),
        )

    def step(self) -> bool:
        self.trainer.train_step()
        return True

    def outputs(self, final: bool) -> Outputs:
        return {
            "images": self.reconstruct(self.trainer.ema_vae.ema_model),
            "raw": self.reconstruct(self.trainer.vae),
        }

    def reconstruct(self, model: Any) -> Any:
        was_training = model.training
        model.eval()
        made = reconstruct_in_batches(self.images, lambda batch: model((batch + 1) / 2) * 2 - 1)
        model.train(was_training)
        return made


def lite0_distance(work: Path) -> Any:
    """Return a network whose outputs have our perceptual distance as mean squared difference.

    It takes images in [0, 1], as the package passes them.
    """
    import torch
    from torch import Tensor, nn

    from tessera.losses.perceptual import EPSILON
    from tessera.modalities.image.efficientnet_lite import EfficientNetLite

    class Lite0Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = EfficientNetLite.load(image_folders.lite0_weights(work))

        def forward(self, images: Tensor) -> Tensor:
            layers = self.network.features(images * 2 - 1)
            unit = [one * (one.square().sum(1, keepdim=True) + EPSILON).rsqrt() for one in layers]
            num_values = sum(one[0].numel() for one in unit)
            # The mean over all values divides by their number, and the distance by that of pixels.
            return torch.cat(
                [
                    one.flatten(1) * (num_values / one[0, 0].numel() / len(unit)) ** 0.5
                    for one in unit
                ],
                dim=1,
            )

    return Lite0Distance().requires_grad_(False)


# ---- ours


def build_ours(setting: Setting) -> Any:
    from tessera.modalities.image.recipes import images_vqgan

    return build_our_side(images_vqgan(), setting, "recipe images-vqgan, preset small")


def build_ours_same(setting: Setting) -> Any:
    from image_tokenizer import build_run

    from tessera.nn.quantize import LFQConfig

    run = build_run(gp_every=4, images=image_folders.train_folder(setting.work).path)
    model = replace(
        run.task.model,
        max_channels=64,
        layers=2,
        blocks=(0, 1),
        quantizer=LFQConfig(codebook_size=CODEBOOK_SIZE, diversity=4.0),
    )
    run = replace(run, task=replace(run.task, model=model))
    return build_our_side(run, setting, "as the package")


def build_our_side(run: Any, setting: Setting, description: str) -> Any:
    from quality_rows.engine_side import build_side
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    folder = image_folders.train_folder(setting.work).path
    run = replace(run, data=replace(run.data, path=str(folder), val_fraction=0.0))
    images = held_out_images(setting.work)

    def build(config: Any, folder: Path) -> Any:
        return build_engine(replace(run, engine=config), RunDirectory(folder))

    def compute(task: Any, final: bool) -> Outputs:
        return {"images": reconstruct_in_batches(images, lambda batch: task.model(batch).output)}

    model = run.task.model
    sizes = f"dim {model.dim}, {model.layers} layers, {type(model.quantizer).__name__}"
    return build_side(run.engine, build, setting, compute, f"{description}: {sizes}")


# ---- metrics


@dataclass
class ImageJudge:
    """Compares reconstructions with the held-out originals."""

    originals: Any
    network: Any

    def __call__(self, outputs: Outputs) -> Metrics:
        """Return the metrics of `images`, and those of other weights with a prefix."""
        metrics = self.compare(outputs["images"])
        for name in outputs.keys() - {"images"}:
            metrics |= {f"{name}/{key}": one for key, one in self.compare(outputs[name]).items()}
        return metrics

    def compare(self, pixels: Any) -> Metrics:
        import torch

        from tessera.metrics.image import frechet_distance, moments, psnr_B, ssim_B
        from tessera.modalities.image.perceptual import perceptual_loss_B

        made = image_folders.to_floats(pixels).split(EVAL_BATCH_SIZE)
        originals = self.originals.split(EVAL_BATCH_SIZE)
        embed = self.network.network.embed
        with torch.no_grad():
            means = {
                name: float(torch.cat(list(map(compute, made, originals))).double().mean())
                for name, compute in (
                    ("psnr", psnr_B),
                    ("ssim", ssim_B),
                    ("perceptual", partial(perceptual_loss_B, self.network)),
                )
            }
            fake, real = (moments(torch.cat(list(map(embed, one)))) for one in (made, originals))
        return means | {"frechet": frechet_distance(real, fake)}


def build_judge(work: Path) -> Judge:
    from tessera.engine.task import Frozen
    from tessera.modalities.image.efficientnet_lite import EfficientNetLite

    return ImageJudge(held_out_images(work), Frozen(EfficientNetLite.load()))


ROW = Row(
    title="VQGAN",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=3e-4), is_package=True),
        "package-1e-3": SideSpec(partial(PackageSide, lr=1e-3), is_package=True, is_optional=True),
        "package-lite0": SideSpec(
            partial(PackageSide, lr=3e-4, use_lite0=True), is_package=True, is_optional=True
        ),
        "package-unclipped": SideSpec(
            partial(PackageSide, lr=3e-4, max_grad_norm=None), is_package=True, is_optional=True
        ),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
        "ours-same": SideSpec(build_ours_same, is_optional=True),
    },
    metrics=(
        Metric("psnr", "PSNR (dB)", higher_is_better=True, decimals=2),
        Metric("ssim", "SSIM", higher_is_better=True),
        Metric("perceptual", "perceptual distance (Lite0)", higher_is_better=False),
        Metric("frechet", "Frechet distance (Lite0)", higher_is_better=False, decimals=1),
    ),
    prepare=image_folders.prepare,
    build_judge=build_judge,
)
