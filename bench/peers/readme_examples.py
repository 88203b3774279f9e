"""Programs for the research packages, run with only the import of the trainer changed.

    PYTHONPATH=.:bench .venv-peers/bin/python -m peers.readme_examples [NAME ...]

Each program builds the published model at a small size, trains it and uses it. With our trainer it
must train, be interrupted and resume to the same weights bit for bit, and on two processes equal
one process with twice the micro-batches. A checkpoint that the package's own trainer wrote is
loaded too, and training goes on from it. Prints a row for each program; exits with code 1 if
something does not hold.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peers import adapters, example_data
from vector_quantize_pytorch import lookup_free_quantization

from tessera.cli.launch import find_free_port

STEPS = 4


@dataclass(frozen=True)
class Example:
    theirs: str
    """The import of the package's trainer."""
    script: str
    """The rest of the program, which leaves `trainer` and, after training, `result`."""
    train: Callable[[Any, int], object]
    """Runs steps of the package's own trainer."""
    loss: str = "loss"
    """The name of the loss that is compared."""

    @property
    def ours(self) -> str:
        return f"from tessera.trainers import {self.theirs.rsplit(' ', 1)[1]}"

    @property
    def head(self) -> str:
        """The program up to its training."""
        return self.script.split("trainer.train()")[0].split("trainer()")[0]

    def lines_changed(self) -> int:
        before, after = (f"{line}\n{self.script}".splitlines() for line in (self.theirs, self.ours))
        return sum(a != b for a, b in zip(before, after, strict=True))


SOUNDSTORM = """
from soundstorm_pytorch import ConformerWrapper, SoundStorm

net = ConformerWrapper(
    codebook_size=32,
    num_quantizers=2,
    conformer=dict(dim=16, depth=1, heads=2, dim_head=8, ff_mult=2, conv_kernel_size=3),
)
model = SoundStorm(
    net,
    steps=4,
    schedule="cosine",
    num_semantic_token_ids=10,
    wav2vec_target_sample_hz=16_000,
    wav2vec_downsample_factor=320,
    codec_target_sample_hz=16_000,
    codec_downsample_factor=320,
)
trainer = SoundStormTrainer(
    model,
    dataset=token_pairs,
    num_train_steps=steps,
    num_warmup_steps=2,
    lr=learning_rate,
    initial_lr=learning_rate,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    save_results_every=every,
    save_model_every=every,
    results_folder=folder,
)
trainer.train()
result = trainer.generate(16, batch_size=1, cond_semantic_token_ids=token_pairs[0][0][None])
"""

MULAN = """
from musiclm_pytorch import AudioSpectrogramTransformer, MuLaN, TextTransformer

size = dict(dim=16, depth=2, heads=2, dim_head=8)
audio = AudioSpectrogramTransformer(
    **size, spec_n_fft=128, spec_win_length=24, spec_aug_stretch_factor=0.8
)
text = TextTransformer(**size, num_tokens=1000, max_seq_len=64)
mulan = MuLaN(audio_transformer=audio, text_transformer=text, dim_latent=16)
trainer = MuLaNTrainer(
    mulan,
    music,
    num_train_steps=steps,
    lr=learning_rate,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    save_model_every=every,
    results_folder=folder,
)
trainer.train()
result = mulan.get_audio_latents(music[0][0][None])
"""

VIDEO = """
from magvit2_pytorch import VideoTokenizer

tokenizer = VideoTokenizer(
    image_size=16,
    init_dim=8,
    max_dim=16,
    codebook_size=16,
    layers=("residual", "compress_space", ("consecutive_residual", 2), "compress_time"),
    perceptual_loss_weight=0.0,
    discr_kwargs=dict(dim=8, image_size=16, channels=3, max_dim=16),
)
trainer = VideoTokenizerTrainer(
    tokenizer,
    dataset=videos,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    learning_rate=learning_rate,
    num_train_steps=steps,
    num_frames=5,
    checkpoint_every_step=every,
    validate_every_step=every,
    warmup_steps=1,
    results_folder=folder,
)
trainer.train()
result = trainer.ema_tokenizer.tokenize(videos[0][None])
"""

VQGAN = """
from muse_maskgit_pytorch import VQGanVAE

vae = VQGanVAE(dim=16, layers=2, discr_layers=2, codebook_size=16, vgg=perceptual_network)
trainer = VQGanVAETrainer(
    vae=vae,
    folder=images,
    num_train_steps=steps,
    lr=learning_rate,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    image_size=16,
    save_results_every=every,
    save_model_every=every,
    results_folder=folder,
)
trainer.train()
result = vae.encode(videos[0][None, :, 0])[1]
"""

MESH_AUTOENCODER = """
from meshgpt_pytorch import MeshAutoencoder

autoencoder = MeshAutoencoder(
    num_discrete_coors=16,
    dim_coor_embed=8,
    dim_area_embed=4,
    dim_normal_embed=8,
    dim_angle_embed=4,
    encoder_dims_through_depth=(8, 8),
    decoder_dims_through_depth=(8, 8),
    dim_codebook=8,
    num_quantizers=2,
    codebook_size=16,
)
trainer = MeshAutoencoderTrainer(
    autoencoder,
    dataset=meshes,
    num_train_steps=steps,
    learning_rate=learning_rate,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    warmup_steps=1,
    checkpoint_every=every,
    checkpoint_folder=folder,
)
trainer()
result = trainer.tokenize(vertices=meshes[0][0][None], faces=meshes[0][1][None])
"""

MESH_TRANSFORMER = (
    MESH_AUTOENCODER.split("trainer =")[0].replace(
        "MeshAutoencoder\n", "MeshAutoencoder, MeshTransformer\n"
    )
    + """
transformer = MeshTransformer(
    autoencoder,
    dim=16,
    max_seq_len=96,
    attn_depth=1,
    attn_dim_head=8,
    attn_heads=2,
    coarse_pre_gateloop_depth=0,
    fine_pre_gateloop_depth=0,
    fine_attn_depth=1,
    fine_attn_dim_head=8,
    fine_attn_heads=2,
)
trainer = MeshTransformerTrainer(
    transformer,
    dataset=meshes,
    num_train_steps=steps,
    learning_rate=learning_rate,
    batch_size=batch_size,
    grad_accum_every=grad_accum_every,
    warmup_steps=1,
    checkpoint_every=every,
    checkpoint_folder=folder,
)
trainer()
result = transformer.generate(batch_size=1, max_seq_len=12)[0]
"""
)


def train_steps(trainer: Any, steps: int) -> list[Any]:
    return [trainer.train_step() for _ in range(steps)]


def train_video(trainer: Any, steps: int) -> None:
    batches = adapters.repeat(trainer.dataloader)
    for _ in range(steps):
        trainer.train_step(batches)


def train_mesh(trainer: Any, steps: int) -> None:
    trainer.num_train_steps = steps
    trainer()


EXAMPLES = {
    "soundstorm": Example(
        "from soundstorm_pytorch.trainer import SoundStormTrainer", SOUNDSTORM, train_steps
    ),
    "mulan": Example("from musiclm_pytorch.trainer import MuLaNTrainer", MULAN, train_steps),
    "video": Example(
        "from magvit2_pytorch import VideoTokenizerTrainer", VIDEO, train_video, "recon_loss"
    ),
    "vqgan": Example("from muse_maskgit_pytorch import VQGanVAETrainer", VQGAN, train_steps),
    "mesh-autoencoder": Example(
        "from meshgpt_pytorch import MeshAutoencoderTrainer",
        MESH_AUTOENCODER,
        train_mesh,
        "recon_loss",
    ),
    "mesh-transformer": Example(
        "from meshgpt_pytorch import MeshTransformerTrainer", MESH_TRANSFORMER, train_mesh
    ),
}


# ---- running a program


class Interrupted(Exception):
    """Ends a program in the middle of its training."""


def build_names(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return what the programs refer to."""
    images = folder.parent / "images"
    if not images.exists():
        example_data.write_images(images)
    names = {
        "token_pairs": example_data.token_pairs(),
        "music": example_data.music(),
        "videos": example_data.videos(),
        "meshes": example_data.meshes(),
        "images": str(images),
        "perceptual_network": torch.nn.Conv2d(3, 4, 3, 4).requires_grad_(False),
        "folder": str(folder),
        "steps": STEPS,
        "every": 2,
        "learning_rate": 1e-3,
        "batch_size": 4,
        "grad_accum_every": 1,
    }
    return names | settings


def run(example: Example, folder: Path, stop_at: int | None = None, **settings: Any) -> Any:
    """Run a program with our trainer; return its namespace."""
    from tessera.engine.engine import Engine

    adapters.seed_everything(0)
    names = build_names(folder, **settings)
    original = Engine.run_step

    def run_step(engine: Engine, step: int, micro_batches: Any) -> Any:
        if step == stop_at:
            engine.writer.wait()
            raise Interrupted
        return original(engine, step, micro_batches)

    Engine.run_step = run_step  # type: ignore[method-assign]
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(f"{example.ours}\n{example.script}", "program", "exec"), names)
    finally:
        Engine.run_step = original  # type: ignore[method-assign]
    return names


def weights(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in names["trainer"].model.state_dict().items()}


def run_on_two_processes(
    example: Example, folder: Path, local_entropy: bool = False
) -> dict[str, torch.Tensor]:
    """Fork two processes that train together, and return the weights of the first.

    Lookup-free quantizers average the use of their codes over all processes, which changes their
    loss; with `local_entropy` they do not.
    """
    example_data.write_images(folder.parent / "images")  # which both would write otherwise
    port, children = str(find_free_port()), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_WORLD_SIZE="2")
            PartialState._reset_state()  # of the parent, which is a single process
            if local_entropy:
                lookup_free_quantization.is_distributed = lambda: False
            try:
                names = run(example, folder, batch_size=4)
                if rank == 0:
                    torch.save(weights(names), folder.parent / "two.pt")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"the two processes ended with {codes}")
    return torch.load(folder.parent / "two.pt", weights_only=True)


def is_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def build_package_trainer(example: Example, folder: Path, **settings: Any) -> Any:
    """Run the program up to its training with the package's own trainer."""
    adapters.seed_everything(0)
    names = build_names(folder, **settings)
    with redirect_stdout(io.StringIO()):
        exec(compile(f"{example.theirs}\n{example.head}", "program", "exec"), names)
    return names["trainer"]


def write_package_checkpoint(example: Example, folder: Path) -> Path:
    """Train one step with the package's trainer and return its checkpoint."""
    trainer, path = build_package_trainer(example, folder), folder.parent / "package.0.pt"
    with redirect_stdout(io.StringIO()):
        example.train(trainer, 1)
        trainer.save(str(path))
    return path


# ---- checks


def check(example: Example, folder: Path) -> dict[str, str]:
    """Return the row of an example."""
    row = {"lines": str(example.lines_changed())}
    two = run_on_two_processes(example, folder / "two/run")
    local = run_on_two_processes(example, folder / "local/run", local_entropy=True)
    whole = run(example, folder / "whole/run")
    row["trains"] = f"step {whole['trainer'].steps}"
    row["result"] = "x".join(map(str, whole["result"].shape))
    with suppress(Interrupted):
        run(example, folder / "killed/run", stop_at=3)
    resumed = run(example, folder / "killed/run")
    row["resumes"] = "equal" if is_equal(weights(whole), weights(resumed)) else "DIFFERS"
    one = run(example, folder / "one/run", batch_size=2, grad_accum_every=2)
    row["two processes"] = f"{largest_difference(two, weights(one)):.1e}"
    row["with local entropy"] = f"{largest_difference(local, weights(one)):.1e}"
    path = write_package_checkpoint(example, folder / "package/run")
    trainer = whole["trainer"]
    with redirect_stdout(io.StringIO()):
        trainer.load(path)
        loaded = trainer.steps
        trainer.train_step()
    row["checkpoint"] = f"step {loaded}"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXAMPLES))
    torch.set_num_threads(1)
    failed = False
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = check(EXAMPLES[name], Path(folder))
                failed |= row["resumes"] != "equal" or float(row["with local entropy"]) > 1e-4
            except Exception:
                traceback.print_exc()
                row, failed = {"failed": "see above"}, True
        print(name, row, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
