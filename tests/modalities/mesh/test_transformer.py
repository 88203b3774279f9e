"""The mesh transformer: every symbol is guessed from those before it, with and without a cache
alike, and meshes end at faces.

Networks start with residual parts of nothing; here they are given something to say, in double
precision, so that what is equal in exact arithmetic is equal to many digits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tessera.modalities.mesh.transformer import MeshTransformer, MeshTransformerConfig
from tessera.nn.transformer import Looked
from tessera.sampling.autoregressive import AutoregressiveSampling, with_cfg, write
from tessera.text.encoder import LearnedTextConfig

VOCABULARY, CORNERS, LEVELS = 11, 3, 2
SLOTS = CORNERS * LEVELS
TEXT = LearnedTextConfig(width=16, depth=1, heads=2, tokens=300, max_len=16)
TINY = MeshTransformerConfig(
    width=24, depth=2, heads=2, fine_dim=16, fine_depth=2, fine_heads=2, max_len=12, text=TEXT
)
TEXTS = ["a table", "a chair with four legs", "x"]
GREEDY = AutoregressiveSampling(temperature=0)


def model(**choices: object) -> MeshTransformer:
    torch.manual_seed(0)
    network = replace(TINY, **choices).build(VOCABULARY, CORNERS, LEVELS)
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    nn.init.normal_(network.head.weight, std=0.5)
    return network.double().eval()


def meshes(*faces: int) -> Tensor:
    codes = torch.randint(VOCABULARY, (len(faces), max(faces), SLOTS))
    for mesh, count in enumerate(faces):
        codes[mesh, count:] = -1
    return codes


def told(
    network: MeshTransformer, texts: list[str] = TEXTS, dropped: bool = False
) -> list[Looked] | None:
    return network.condition(texts, [dropped] * len(texts))


def of_mesh(guesses: object, number: int) -> Tensor:
    return guesses.logits_MV[guesses.mesh_M == number]


# ------------------------------------------------------------------------------------------------------------- targets


def test_every_symbol_of_a_mesh_is_a_target_and_then_its_end_and_nothing_beyond():
    codes = meshes(4, 1, 2)
    network = model()
    guesses = network.guesses(codes, told(network))
    assert guesses.logits_MV.shape == (3 + 7 * SLOTS, VOCABULARY + 1)
    for number, faces in enumerate([4, 1, 2]):
        targets = guesses.targets_M[guesses.mesh_M == number].tolist()
        assert targets == [*codes[number, :faces].flatten().tolist(), network.end]


def test_a_mesh_may_end_only_where_a_face_would_begin():
    network = model()
    guesses = network.guesses(meshes(4, 1, 2), told(network))
    for number, faces in enumerate([4, 1, 2]):
        possible = of_mesh(guesses, number)[:, network.end] > -math.inf
        assert possible.tolist() == [place % SLOTS == 0 for place in range(faces * SLOTS + 1)]
    assert guesses.logits_MV[:, :VOCABULARY].isfinite().all()


def test_the_loss_is_the_mean_over_each_mesh_by_itself():
    network, codes = model(), meshes(4, 1, 2)
    guesses = network.guesses(codes, told(network))
    losses = guesses.cross_entropy_B()
    for number, faces in enumerate([4, 1, 2]):
        targets = torch.tensor([*codes[number, :faces].flatten().tolist(), network.end])
        by_hand = nn.functional.cross_entropy(of_mesh(guesses, number), targets)
        assert torch.allclose(losses[number], by_hand) and by_hand.isfinite()


def test_a_mesh_is_guessed_the_same_whoever_its_neighbours_are():
    network, codes = model(), meshes(4, 1, 2)
    together = network.guesses(codes, told(network))
    for number, faces in enumerate([4, 1, 2]):
        alone = network.guesses(
            codes[number : number + 1, :faces], told(network, TEXTS[number : number + 1])
        )
        assert torch.allclose(alone.logits_MV, of_mesh(together, number))


# -------------------------------------------------------------------------------------------------------------- causes


def test_a_symbol_changes_the_guesses_after_it_and_none_before():
    network, codes = model(text=None), meshes(3)
    before = network.guesses(codes, None).logits_MV[:, :VOCABULARY]
    for place in range(3 * SLOTS):
        other = codes.clone()
        other[0, place // SLOTS, place % SLOTS] = (
            other[0, place // SLOTS, place % SLOTS] + 1
        ) % VOCABULARY
        changed = (network.guesses(other, None).logits_MV[:, :VOCABULARY] - before).abs().amax(
            1
        ) > 0
        assert changed.tolist() == [number > place for number in range(3 * SLOTS + 1)]


def test_levels_are_read_from_tables_of_their_own_and_corners_from_one():
    network = model(text=None)
    read = network.read(torch.full((1, 1, SLOTS), 3))[0, 0]
    assert (
        torch.equal(read[0], read[2])
        and torch.equal(read[1], read[3])
        and not torch.equal(read[0], read[1])
    )


def test_the_same_symbols_at_other_corners_are_another_face():
    network, codes = model(text=None), meshes(2)
    turned = codes.clone()
    turned[:, 0] = codes[:, 0].roll(LEVELS, dims=-1)
    last = [network.guesses(each, None).logits_MV[-1] for each in (codes, turned)]
    assert not torch.allclose(*last)


def test_a_text_matters_and_none_is_none_whatever_it_was():
    network, codes = model(), meshes(2, 2, 2)
    said = network.guesses(codes, told(network)).logits_MV[:, :VOCABULARY]
    otherwise = network.guesses(codes, told(network, TEXTS[::-1])).logits_MV[:, :VOCABULARY]
    assert not torch.allclose(said, otherwise)
    dropped = network.guesses(codes, told(network, dropped=True)).logits_MV
    empty = network.guesses(codes, told(network, ["", "", ""])).logits_MV
    assert torch.allclose(dropped, empty) and not torch.allclose(dropped[:, :VOCABULARY], said)


def test_in_half_precision_it_comes_near_at_once_and_symbol_by_symbol():
    network, codes = model().float(), meshes(3, 3, 3)
    whole = network.guesses(codes, told(network)).logits_MV[:, :VOCABULARY]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guesses = network.guesses(codes, told(network))
        writing = network.start(told(network), codes[:, :2])
        by_symbol = torch.stack(
            [writing(None), *(writing(tokens) for tokens in codes[:, 2].T)], dim=1
        )
    assert (
        guesses.logits_MV[:, :VOCABULARY].float() - whole
    ).abs().mean() < 0.05 * whole.abs().mean()
    assert guesses.cross_entropy_B().dtype == by_symbol.dtype == torch.float32
    at_once = torch.stack([of_mesh(guesses, number)[2 * SLOTS :] for number in range(3)])[
        ..., :VOCABULARY
    ]
    assert (by_symbol[..., :VOCABULARY] - at_once.float()).abs().mean() < 0.05 * whole.abs().mean()


def test_every_parameter_takes_part():
    network = model().train()
    network.guesses(meshes(4, 1, 2), told(network)).cross_entropy_B().mean().backward()
    still = [
        name
        for name, parameter in network.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not still


# --------------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("given", [0, 2], ids=["from nothing", "after two faces"])
@pytest.mark.parametrize("text", [None, TEXT], ids=["without text", "with text"])
def test_symbol_by_symbol_it_says_what_it_says_at_once(text, given):
    network, codes = model(text=text), meshes(5, 5, 5)
    condition = told(network) if text else None
    at_once = network.guesses(codes, condition)
    writing = network.start(condition, codes[:, :given])
    logits = [writing(None), *(writing(tokens) for tokens in codes[:, given:].flatten(1).T)]
    for number in range(3):
        assert torch.allclose(
            torch.stack(logits)[:, number], of_mesh(at_once, number)[given * SLOTS :]
        )


def uncached(network: MeshTransformer, condition: list[Looked] | None, prefix: Tensor):
    """The same contract as `start`, by reading everything anew for every symbol."""
    laid = list(prefix.flatten(1).T)

    def following(tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            laid.append(tokens)
        whole, begun = divmod(len(laid), SLOTS)
        codes = torch.stack(laid, dim=1) if laid else prefix.flatten(1)
        state = network.states(
            network.read(codes[:, : whole * SLOTS].unflatten(1, (whole, SLOTS))), condition
        )[:, -1]
        rest = network.tokens(codes[:, whole * SLOTS :] + network.offsets[:begun])
        return network.token_logits(state, rest)[:, -1]

    return following


@torch.no_grad()
@pytest.mark.parametrize("prompted", [False, True], ids=["from nothing", "completing"])
@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "guided"])
@pytest.mark.parametrize(
    "config", [GREEDY, AutoregressiveSampling(top_k=5, top_p=0.9)], ids=["greedy", "drawn"]
)
def test_sampling_with_and_without_a_cache_is_the_same(config, scale, prompted):
    network = model()
    guided = scale != 1
    condition = network.condition(TEXTS * (1 + guided), [False] * 3 + [True] * 3 * guided)
    prompt = meshes(3, 1, 2) if prompted else torch.zeros(3, 0, SLOTS, dtype=torch.long)
    results = []
    for begin in (partial(network.start, condition), partial(uncached, network, condition)):
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        begin = with_cfg(begin, scale) if guided else begin
        results.append(write(begin, prompt, config, generators, end=network.end, most=8))
    assert torch.equal(results[0].tokens_BNS, results[1].tokens_BNS)
    assert torch.equal(results[0].ended_B, results[1].ended_B)


@torch.no_grad()
def test_a_seeds_mesh_does_not_depend_on_the_batch():
    """To the bit, in single precision, as it is used."""
    network = model().float()

    def mesh(texts: list[str], seeds: list[int]) -> list[list[list[int]]]:
        begin = partial(network.start, told(network, texts))
        nothing = torch.zeros(len(texts), 0, SLOTS, dtype=torch.long)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        laid = write(
            begin, nothing, AutoregressiveSampling(), generators, end=network.end, most=10
        ).tokens_BNS
        return [[face for face in one if face[0] >= 0] for one in laid.tolist()]

    together = mesh(TEXTS * 3, list(range(9)))
    assert mesh(TEXTS, [0, 1, 2]) == together[:3]
    for number in range(9):
        assert mesh([TEXTS[number % 3]], [number]) == [together[number]]
    assert len({len(one) for one in together}) > 1, "they must end at different faces"


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_not_even_a_rounding_depends_on_the_batch(count):
    network, codes = model().float(), meshes(*[3] * 9)
    many = network.start(told(network, TEXTS * 3), codes[:, :1])
    few = network.start(told(network, (TEXTS * 3)[:count]), codes[:count, :1])
    for tokens in (None, *codes[:, 1:].flatten(1).T):
        assert torch.equal(few(tokens if tokens is None else tokens[:count]), many(tokens)[:count])


# ------------------------------------------------------------------------------------------------------------ learning


def test_it_learns_meshes_by_heart_and_gives_each_back_for_its_text():
    torch.manual_seed(0)
    network = replace(TINY, width=48, fine_dim=32).build(VOCABULARY, CORNERS, LEVELS)
    codes = meshes(5, 2, 4)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(80):
        loss = network.guesses(codes, told(network)).cross_entropy_B().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    nothing = torch.zeros(3, 0, SLOTS, dtype=torch.long)
    generators = [torch.Generator()] * 3
    begin = partial(network.eval().start, told(network))
    laid = write(begin, nothing, GREEDY, generators, end=network.end, most=12)
    assert torch.equal(laid.tokens_BNS, codes) and laid.ended_B.all()


# ------------------------------------------------------------------------------------------------------------- letters


def test_codes_of_another_tokenizer_and_meshes_that_are_too_large_are_refused():
    network = model(text=None)
    with pytest.raises(
        ValueError, match=r"\(1, 2, 9\) came to a transformer whose faces have 6 symbols"
    ):
        network.guesses(torch.zeros(1, 2, 9, dtype=torch.long), None)
    with pytest.raises(ValueError, match="13 faces came to a transformer that knows 12"):
        network.guesses(meshes(13), None)
    with pytest.raises(ValueError, match="13 faces came to a transformer that knows 12"):
        network.start(None, meshes(13))
    with pytest.raises(ValueError, match="Symbol 11 came to a transformer that knows 11, 0 to 10"):
        network.guesses(torch.full((1, 2, SLOTS), VOCABULARY), None)


@torch.no_grad()
def test_the_largest_mesh_can_be_read_and_written():
    network = model(text=None)
    assert network.guesses(meshes(12), None).cross_entropy_B().isfinite().all()

    def endless(prefix: Tensor):
        writing = network.start(None, prefix)
        return lambda tokens: writing(tokens).index_fill(1, torch.tensor([network.end]), -math.inf)

    nothing = torch.zeros(2, 0, SLOTS, dtype=torch.long)
    laid = write(endless, nothing, GREEDY, [torch.Generator()] * 2, end=network.end, most=12)
    assert laid.tokens_BNS.shape == (2, 12, SLOTS) and not laid.ended_B.any()


@pytest.mark.parametrize(
    "name", ["width", "depth", "heads", "fine_width", "fine_depth", "fine_heads", "longest"]
)
def test_a_wrong_setting_is_refused(name):
    with pytest.raises(ValueError, match=f"transformer's {name} is at least 1, but it is 0"):
        replace(TINY, **{name: 0})
