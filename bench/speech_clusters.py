"""Which layer of a recogniser to cluster: what its clusters contain of the content and the speaker.

    python bench/speech_clusters.py RUN --train DIR --data DIR [--sentences 40] [--layers context]

RUN is a run of `audio-semantic --features ctc`. DIR are folders of examples/voices.py: k-means and
projections are fitted on `--train`, and the two numbers of bench/speech_probes.py are measured on
`--data`, for several layers, numbers of clusters and normalizations. A third number is how much of
the variance of normalized mel bands the tokens of five frames explain, on half of the sentences.

B recordings, T frames, D features, P frames of all recordings, K clusters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from speech_probes import Recording, content_retrieval, speaker_accuracy
from torch import Tensor

from tessera.api.tokenizer import Tokenizer
from tessera.modalities.audio.ctc import CTCTokenizer
from tessera.nn.quantize.vq import append_ones, find_nearest, sum_by_code

MAX_TRAIN_RECORDINGS, MAX_TRAIN_FRAMES = 220, 10_000
KMEANS_ITERATIONS = 15
CONTEXT = (-4, -2, 0, 2, 4)
"""The frames whose tokens predict the mel bands of a frame."""
FRAME_STEP = 5
"""Every fifth frame is predicted."""
RIDGE = 10.0


@dataclass
class Spoken:
    """One recording and its frames at each layer."""

    speaker: str
    sentence: str
    layers: dict[str, Tensor]
    """Each (T, D)."""
    codes_T: Tensor
    """The tokens of the run itself."""


def read_folder(tokenizer: Tokenizer, folder: str, limit: int | None) -> list[Spoken]:
    """Compute the layers of recordings; with a limit, of some that are spread over the folder."""
    data: Any = replace(tokenizer.run.data, path=folder)
    dataset = data.full(captions=True)
    step = 1 if limit is None else max(1, len(dataset) // limit)
    model: Any = tokenizer.model
    spoken = []
    for index in range(0, len(dataset), step):
        example = data.example_from_file(dataset.location(index))
        layers, codes_T = compute_layers(model, torch.from_numpy(example.samples)[None])
        speaker = str(Path(dataset.name(index)).parent)
        spoken.append(Spoken(speaker, dataset.caption(index), layers, codes_T))
    return spoken


@torch.no_grad()
def compute_layers(model: CTCTokenizer, samples: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    lengths_B = torch.tensor([samples.shape[2]])
    mel_BTM, mask_BT = model.compute_mel(samples, lengths_B)
    x_BTW = model.to_states(mel_BTM)
    layers = {"mel": mel_BTM[0]}
    for block in model.encoder:
        x_BTW = block(x_BTW, mask_BT)
    layers["convolutions"] = x_BTW[0]
    layers["context"] = model.encoder_context(x_BTW, mask_BN=mask_BT)[0]
    latent_BTC, _ = model.encode_latents(samples, lengths_B)
    layers["latent"] = latent_BTC[0]
    codes_T = model.encode(samples, lengths_B)[0]
    code_BTC = model.quantizer.decode(codes_T[None])
    final_BTW = model.context(model.from_code(code_BTC), mask_BN=mask_BT)
    layers["final"] = final_BTW[0]
    logits_TV = model.head(final_BTW)[0, :, : 1 + len(model.vocab.characters)]
    layers["log posteriors"] = logits_TV.log_softmax(-1).clamp_min(-8)
    layers["posteriors"] = logits_TV.softmax(-1)
    return layers, codes_T


Normalize = Callable[[Tensor], Tensor]


def unchanged(frames_TD: Tensor) -> Tensor:
    return frames_TD


def centred(frames_TD: Tensor) -> Tensor:
    return frames_TD - frames_TD.mean(0)


def standardized(frames_TD: Tensor) -> Tensor:
    return centred(frames_TD) / frames_TD.std(0).clamp_min(1e-3)


def without_speakers(train: Sequence[Spoken], layer: str, directions: int) -> Normalize:
    """Return a projection without the directions in which the means of speakers differ most,
    relative to the variance within speakers."""
    frames = {}
    for one in train:
        frames.setdefault(one.speaker, []).append(one.layers[layer])
    joined = {name: torch.cat(parts).double() for name, parts in frames.items()}
    means_SD = torch.stack([one.mean(0) for one in joined.values()])
    within = torch.cat([one - one.mean(0) for one in joined.values()])
    covariance_DD = within.T @ within / len(within) + 1e-4 * torch.eye(within.shape[1]).double()
    values, vectors = torch.linalg.eigh(covariance_DD)
    whiten_DD = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    _, _, right = torch.linalg.svd((means_SD - means_SD.mean(0)) @ whiten_DD)
    basis_DN = right[:directions].T
    project_DD = whiten_DD @ (torch.eye(len(whiten_DD)).double() - basis_DN @ basis_DN.T)
    return lambda frames_TD: frames_TD @ project_DD.to(frames_TD)


def fit_kmeans(frames_PD: Tensor, clusters: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    frames_PD = frames_PD[torch.randperm(len(frames_PD), generator=generator)[:MAX_TRAIN_FRAMES]]
    centroids_KD = frames_PD[:clusters].clone()
    for _ in range(KMEANS_ITERATIONS):
        nearest_P = find_nearest(frames_PD, centroids_KD)
        total_KC = sum_by_code(nearest_P, append_ones(frames_PD), clusters)
        counts_K1 = total_KC[:, -1:]
        centroids_KD = torch.where(
            counts_K1 > 0, total_KC[:, :-1] / counts_K1.clamp_min(1), centroids_KD
        )
    return centroids_KD


def explained_variance(spoken: Sequence[Spoken], codes: Sequence[Tensor], clusters: int) -> float:
    """Return the variance of mel bands that a linear map of the tokens of five frames explains."""
    sentences = list(dict.fromkeys(one.sentence for one in spoken))
    fitted = set(sentences[: len(sentences) // 2])
    sums: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    for one, codes_T in zip(spoken, codes, strict=True):
        columns = [codes_T.roll(-shift) + clusters * i for i, shift in enumerate(CONTEXT)]
        rows = torch.stack(columns, 1)[::FRAME_STEP], one.layers["mel"][::FRAME_STEP].double()
        sums[one.sentence in fitted].append(rows)
    (x_PC, y_PD), (x_test, y_test) = (
        (torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs]))
        for pairs in (sums[True], sums[False])
    )
    one_hot = torch.zeros(len(x_PC), clusters * len(CONTEXT)).scatter_(1, x_PC, 1.0)
    gram = (one_hot.T @ one_hot).double() + RIDGE * torch.eye(one_hot.shape[1]).double()
    weight = torch.linalg.solve(gram, one_hot.T.double() @ (y_PD - y_PD.mean(0)))
    predicted = weight[x_test].sum(1) + y_PD.mean(0)
    error = (predicted - y_test).square().mean(0)
    return float((1 - error / y_test.var(0)).mean())


def variants(train: Sequence[Spoken], names: Sequence[str]) -> Iterator[tuple[str, str, Normalize]]:
    """Yield layer, name of the normalization, and the normalization."""
    for layer in names:
        yield layer, "none", unchanged
        if "posteriors" not in layer:
            yield layer, "recording mean", centred
            yield layer, "recording mean and std", standardized
            yield layer, "without speakers", without_speakers(train, layer, directions=16)


def measure(spoken: Sequence[Spoken], codes: Sequence[Tensor], clusters: int) -> str:
    recordings = [
        Recording(one.speaker, one.sentence, torch.unique_consecutive(codes_T).numpy())
        for one, codes_T in zip(spoken, codes, strict=True)
    ]
    sentences = list(dict.fromkeys(one.sentence for one in recordings))[:16]
    some = [one for one in recordings if one.sentence in sentences]
    lengths = sum(len(one.tokens) for one in recordings) / len(recordings)
    return (
        f"speaker {100 * speaker_accuracy(recordings, clusters):5.1f} %  retrieval (of 16) "
        f"{100 * content_retrieval(some):5.1f} %  explained "
        f"{explained_variance(spoken, codes, clusters):.3f}  tokens {lengths:.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run of audio-semantic --features ctc")
    parser.add_argument("--train", required=True, help="the folder that clusters are fitted on")
    parser.add_argument("--data", required=True, help="the folder that is measured")
    parser.add_argument("--layers", nargs="+", help="the layers to cluster; all by default")
    parser.add_argument("--clusters", nargs="+", type=int, default=[64, 256])
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(args.run)
    train = read_folder(tokenizer, args.train, MAX_TRAIN_RECORDINGS)
    spoken = read_folder(tokenizer, args.data, None)
    own = [one.codes_T for one in spoken]
    print(f"tokens of the run: {measure(spoken, own, tokenizer.vocab_size)}", flush=True)
    for clusters in args.clusters:
        for layer, name, normalize in variants(train, args.layers or list(train[0].layers)):
            frames_PD = torch.cat([normalize(one.layers[layer]) for one in train])
            centroids_KD = fit_kmeans(frames_PD, clusters)
            codes = [find_nearest(normalize(one.layers[layer]), centroids_KD) for one in spoken]
            found = measure(spoken, codes, clusters)
            print(f"{layer:<15}{name:<24}{clusters:>4} clusters: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
