"""Programs for the research packages that differ only in the import of the trainer.

They are those of the packages' READMEs at a small size (`readme_examples.py`, `loss_curves.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers import adapters


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
