"""The mesh transformer: causal, equal with and without a cache, and meshes end between faces.

Residual branches are zero at initialization; here they get random weights. Double precision makes
results that are equal in exact arithmetic equal to many digits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tessera.modalities.mesh.transformer import (
    MeshTransformer,
    MeshTransformerConfig,
    NextTokenPredictions,
)
from tessera.nn.transformer import ContextKV
from tessera.sampling.autoregressive import AutoregressiveSampling, generate, with_cfg
from tessera.text.learned import LearnedTextConfig

VOCAB_SIZE, CORNERS, NUM_QUANTIZERS = 11, 3, 2
TOKENS_PER_FACE = CORNERS * NUM_QUANTIZERS
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=16)
TINY = MeshTransformerConfig(
    dim=24, depth=2, heads=2, fine_dim=16, fine_depth=2, fine_heads=2, max_len=12, text=TEXT
)
TEXTS = ["a table", "a chair with four legs", "x"]
GREEDY = AutoregressiveSampling(temperature=0)


def build(**settings: object) -> MeshTransformer:
    torch.manual_seed(0)
    network = replace(TINY, **settings).build(VOCAB_SIZE, CORNERS, NUM_QUANTIZERS)
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    nn.init.normal_(network.head.weight, std=0.5)
    return network.double().eval()


def random_tokens(*faces: int) -> Tensor:
    """Return the tokens of meshes with these numbers of faces."""
    tokens = torch.randint(VOCAB_SIZE, (len(faces), max(faces), TOKENS_PER_FACE))
    for mesh, count in enumerate(faces):
        tokens[mesh, count:] = -1
    return tokens


def encode_texts(
    network: MeshTransformer, texts: list[str] = TEXTS, dropped: bool = False
) -> list[ContextKV] | None:
    return network.condition(texts, [dropped] * len(texts))


def logits_of(predictions: NextTokenPredictions, number: int) -> Tensor:
    return predictions.logits_MV[predictions.example_M == number]


# ---- targets


def test_targets_are_all_tokens_and_the_end_without_padding():
    tokens = random_tokens(4, 1, 2)
    network = build()
    predictions = network.predict(tokens, encode_texts(network))
    assert predictions.logits_MV.shape == (3 + 7 * TOKENS_PER_FACE, VOCAB_SIZE + 1)
    for number, faces in enumerate([4, 1, 2]):
        targets = predictions.targets_M[predictions.example_M == number].tolist()
        assert targets == [*tokens[number, :faces].flatten().tolist(), network.eos_token_id]


def test_the_end_is_possible_only_before_a_face():
    network = build()
    predictions = network.predict(random_tokens(4, 1, 2), encode_texts(network))
    for number, faces in enumerate([4, 1, 2]):
        possible = logits_of(predictions, number)[:, network.eos_token_id] > -math.inf
        positions = range(faces * TOKENS_PER_FACE + 1)
        assert possible.tolist() == [position % TOKENS_PER_FACE == 0 for position in positions]
    assert predictions.logits_MV[:, :VOCAB_SIZE].isfinite().all()


def test_the_loss_is_the_mean_over_the_tokens_of_each_mesh():
    network, tokens = build(), random_tokens(4, 1, 2)
    predictions = network.predict(tokens, encode_texts(network))
    losses = predictions.cross_entropy_B()
    for number, faces in enumerate([4, 1, 2]):
        targets = torch.tensor([*tokens[number, :faces].flatten().tolist(), network.eos_token_id])
        expected = nn.functional.cross_entropy(logits_of(predictions, number), targets)
        assert torch.allclose(losses[number], expected) and expected.isfinite()


def test_predictions_do_not_depend_on_the_rest_of_the_batch():
    network, tokens = build(), random_tokens(4, 1, 2)
    train_together = network.predict(tokens, encode_texts(network))
    for number, faces in enumerate([4, 1, 2]):
        single = network.predict(
            tokens[number : number + 1, :faces], encode_texts(network, TEXTS[number : number + 1])
        )
        assert torch.allclose(single.logits_MV, logits_of(train_together, number))


# ---- causality and conditioning


def test_a_token_affects_only_later_predictions():
    network, tokens = build(text=None), random_tokens(3)
    before = network.predict(tokens, None).logits_MV[:, :VOCAB_SIZE]
    for position in range(3 * TOKENS_PER_FACE):
        other = tokens.clone()
        other[0, position // TOKENS_PER_FACE, position % TOKENS_PER_FACE] = (
            other[0, position // TOKENS_PER_FACE, position % TOKENS_PER_FACE] + 1
        ) % VOCAB_SIZE
        changed = (network.predict(other, None).logits_MV[:, :VOCAB_SIZE] - before).abs().amax(
            1
        ) > 0
        assert changed.tolist() == [number > position for number in range(3 * TOKENS_PER_FACE + 1)]


def test_quantizers_have_separate_embeddings_and_corners_share_them():
    network = build(text=None)
    embedded = network.embed(torch.full((1, 1, TOKENS_PER_FACE), 3))[0, 0]
    assert torch.equal(embedded[0], embedded[2]) and torch.equal(embedded[1], embedded[3])
    assert not torch.equal(embedded[0], embedded[1])


def test_the_order_of_corners_matters():
    network, tokens = build(text=None), random_tokens(2)
    rotated = tokens.clone()
    rotated[:, 0] = tokens[:, 0].roll(NUM_QUANTIZERS, dims=-1)
    last = [network.predict(each, None).logits_MV[-1] for each in (tokens, rotated)]
    assert not torch.allclose(*last)


def test_texts_matter_and_dropped_texts_equal_empty_ones():
    network, tokens = build(), random_tokens(2, 2, 2)
    with_text = network.predict(tokens, encode_texts(network)).logits_MV[:, :VOCAB_SIZE]
    other_condition = encode_texts(network, TEXTS[::-1])
    other_text = network.predict(tokens, other_condition).logits_MV[:, :VOCAB_SIZE]
    assert not torch.allclose(with_text, other_text)
    dropped = network.predict(tokens, encode_texts(network, dropped=True)).logits_MV
    empty = network.predict(tokens, encode_texts(network, ["", "", ""])).logits_MV
    assert torch.allclose(dropped, empty) and not torch.allclose(dropped[:, :VOCAB_SIZE], with_text)


def test_bfloat16_is_close_with_teacher_forcing_and_decoding():
    network, tokens = build().float(), random_tokens(3, 3, 3)
    expected = network.predict(tokens, encode_texts(network)).logits_MV[:, :VOCAB_SIZE]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predictions = network.predict(tokens, encode_texts(network))
        decoding = network.start_decoding(encode_texts(network), tokens[:, :2])
        by_token = torch.stack(
            [decoding(None), *(decoding(token_B) for token_B in tokens[:, 2].T)], dim=1
        )
    assert (
        predictions.logits_MV[:, :VOCAB_SIZE].float() - expected
    ).abs().mean() < 0.05 * expected.abs().mean()
    assert predictions.cross_entropy_B().dtype == by_token.dtype == torch.float32
    last_face = [logits_of(predictions, number)[2 * TOKENS_PER_FACE :] for number in range(3)]
    forced = torch.stack(last_face)[..., :VOCAB_SIZE]
    assert (by_token[..., :VOCAB_SIZE] - forced.float()).abs().mean() < 0.05 * expected.abs().mean()


def test_every_parameter_receives_a_gradient():
    network = build().train()
    predictions = network.predict(random_tokens(4, 1, 2), encode_texts(network))
    predictions.cross_entropy_B().mean().backward()
    without_gradient = [
        name
        for name, parameter in network.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not without_gradient


# ---- cache


@pytest.mark.parametrize("prefix_len", [0, 2], ids=["no prefix", "two faces"])
@pytest.mark.parametrize("text", [None, TEXT], ids=["without text", "with text"])
def test_decoding_equals_teacher_forcing(text, prefix_len):
    network, tokens = build(text=text), random_tokens(5, 5, 5)
    condition = encode_texts(network) if text else None
    forced = network.predict(tokens, condition)
    decoding = network.start_decoding(condition, tokens[:, :prefix_len])
    logits = [
        decoding(None),
        *(decoding(token_B) for token_B in tokens[:, prefix_len:].flatten(1).T),
    ]
    for number in range(3):
        assert torch.allclose(
            torch.stack(logits)[:, number],
            logits_of(forced, number)[prefix_len * TOKENS_PER_FACE :],
        )


def uncached(network: MeshTransformer, condition: list[ContextKV] | None, prefix: Tensor):
    """Follow the contract of `start_decoding`, but recompute everything for every token."""
    generated = list(prefix.flatten(1).T)

    def next_logits(token_B: Tensor | None) -> Tensor:
        if token_B is not None:
            generated.append(token_B)
        faces, rest = divmod(len(generated), TOKENS_PER_FACE)
        tokens = torch.stack(generated, dim=1) if generated else prefix.flatten(1)
        complete, partial_face = tokens.split([faces * TOKENS_PER_FACE, rest], dim=1)
        embedded = network.embed(complete.unflatten(1, (faces, TOKENS_PER_FACE)))
        state = network.face_states(embedded, condition)[:, -1]
        rest_embedded = network.token_embedding(partial_face + network.offsets[:rest])
        return network.token_logits(state, rest_embedded)[:, -1]

    return next_logits


@torch.no_grad()
@pytest.mark.parametrize("prompted", [False, True], ids=["no prompt", "prompt"])
@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["unguided", "guided"])
@pytest.mark.parametrize(
    "config", [GREEDY, AutoregressiveSampling(top_k=5, top_p=0.9)], ids=["greedy", "sampled"]
)
def test_sampling_is_the_same_with_and_without_a_cache(config, scale, prompted):
    network = build()
    guided = scale != 1
    condition = network.condition(TEXTS * (1 + guided), [False] * 3 + [True] * 3 * guided)
    prompt = (
        random_tokens(3, 1, 2) if prompted else torch.zeros(3, 0, TOKENS_PER_FACE, dtype=torch.long)
    )
    results = []
    cached = partial(network.start_decoding, condition)
    for start in (cached, partial(uncached, network, condition)):
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        start = with_cfg(start, scale) if guided else start
        results.append(
            generate(
                start,
                prompt,
                config,
                generators,
                eos_token_id=network.eos_token_id,
                max_positions=8,
            )
        )
    assert torch.equal(results[0].tokens_BNS, results[1].tokens_BNS)
    assert torch.equal(results[0].ended_B, results[1].ended_B)


@torch.no_grad()
def test_the_sample_of_a_seed_does_not_depend_on_the_batch():
    """Bit for bit, in the precision of inference."""
    network = build().float()

    def sample(texts: list[str], seeds: list[int]) -> list[list[list[int]]]:
        start = partial(network.start_decoding, encode_texts(network, texts))
        no_prompt = torch.zeros(len(texts), 0, TOKENS_PER_FACE, dtype=torch.long)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        result = generate(
            start,
            no_prompt,
            AutoregressiveSampling(),
            generators,
            eos_token_id=network.eos_token_id,
            max_positions=10,
        ).tokens_BNS
        return [[face for face in mesh if face[0] >= 0] for mesh in result.tolist()]

    train_together = sample(TEXTS * 3, list(range(9)))
    assert sample(TEXTS, [0, 1, 2]) == train_together[:3]
    for number in range(9):
        assert sample([TEXTS[number % 3]], [number]) == [train_together[number]]
    assert len({len(mesh) for mesh in train_together}) > 1, "the meshes must have different lengths"


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_are_bitwise_equal_for_all_batch_sizes(count):
    network, tokens = build().float(), random_tokens(*[3] * 9)
    many = network.start_decoding(encode_texts(network, TEXTS * 3), tokens[:, :1])
    few = network.start_decoding(encode_texts(network, (TEXTS * 3)[:count]), tokens[:count, :1])
    assert torch.equal(few(None), many(None)[:count])
    for token_B in tokens[:, 1:].flatten(1).T:
        assert torch.equal(few(token_B[:count]), many(token_B)[:count])


# ---- training


def test_the_model_overfits_and_generates_each_mesh_from_its_text():
    torch.manual_seed(0)
    network = replace(TINY, dim=48, fine_dim=32).build(VOCAB_SIZE, CORNERS, NUM_QUANTIZERS)
    tokens = random_tokens(5, 2, 4)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(80):
        loss = network.predict(tokens, encode_texts(network)).cross_entropy_B().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    no_prompt = torch.zeros(3, 0, TOKENS_PER_FACE, dtype=torch.long)
    generators = [torch.Generator()] * 3
    start = partial(network.eval().start_decoding, encode_texts(network))
    result = generate(
        start, no_prompt, GREEDY, generators, eos_token_id=network.eos_token_id, max_positions=12
    )
    assert torch.equal(result.tokens_BNS, tokens) and result.ended_B.all()


# ---- errors and limits


def test_invalid_tokens_raise_an_error():
    network = build(text=None)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 9\), expected \(meshes, faces, 6\)"):
        network.predict(torch.zeros(1, 2, 9, dtype=torch.long), None)
    with pytest.raises(ValueError, match="13 faces, but the maximum of this transformer is 12"):
        network.predict(random_tokens(13), None)
    with pytest.raises(ValueError, match="13 faces, but the maximum of this transformer is 12"):
        network.start_decoding(None, random_tokens(13))
    with pytest.raises(ValueError, match="token id 11, expected 0 to 10"):
        network.predict(torch.full((1, 2, TOKENS_PER_FACE), VOCAB_SIZE), None)


@torch.no_grad()
def test_a_mesh_of_maximum_length_can_be_predicted_and_generated():
    network = build(text=None)
    assert network.predict(random_tokens(12), None).cross_entropy_B().isfinite().all()

    def without_end(prefix: Tensor):
        decoding = network.start_decoding(None, prefix)
        eos = torch.tensor([network.eos_token_id])
        return lambda token_B: decoding(token_B).index_fill(1, eos, -math.inf)

    no_prompt = torch.zeros(2, 0, TOKENS_PER_FACE, dtype=torch.long)
    result = generate(
        without_end,
        no_prompt,
        GREEDY,
        [torch.Generator()] * 2,
        eos_token_id=network.eos_token_id,
        max_positions=12,
    )
    assert result.tokens_BNS.shape == (2, 12, TOKENS_PER_FACE) and not result.ended_B.any()


@pytest.mark.parametrize(
    "name", ["dim", "depth", "heads", "fine_dim", "fine_depth", "fine_heads", "max_len"]
)
def test_a_setting_below_one_raises_an_error(name):
    with pytest.raises(
        ValueError, match=f"^{name} of a mesh transformer must be at least 1, got 0"
    ):
        replace(TINY, **{name: 0})
