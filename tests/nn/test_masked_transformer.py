"""The masked transformer: it sees what it is shown and no more, and every slot, text and smaller
picture has its say.

Networks start with residual parts of nothing; here they are given something to say, in double
precision, so that what is equal in exact arithmetic is equal to many digits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    FirstLayerCache,
    MaskedTransformer,
    MaskedTransformerConfig,
    TokenConditioner,
    TokenSpec,
    TokenTransformer,
    apart,
    by_matrix,
)
from tessera.nn.token_layout import Layout
from tessera.text.encoder import LearnedTextConfig
from tests.networks import awake, rows_through

VOCABULARY = 13
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, tokens=300, max_len=16)
TEXTS = ["a red circle", "two blue squares", "x"]
FEATURES = torch.randn(VOCABULARY, 5, generator=torch.Generator().manual_seed(1))


def model(
    patch: int = 1,
    smaller: TokenSpec | None = None,
    known: Tensor | None = FEATURES,
    **choices: object,
) -> MaskedTransformer:
    config = MaskedTransformerConfig(
        **{"width": 24, "depth": 2, "heads": 2, "text": TEXT, **choices}
    )
    return (
        awake(config.build(TokenSpec(VOCABULARY, Layout((4, 4), patch=patch), known), smaller))
        .double()
        .eval()
    )


def token_batch(
    network: TokenTransformer, batch: int = 3, share: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Symbols with some hidden, and which."""
    layout = network.tokens.layout
    tokens = torch.randint(network.tokens.vocab_size, (batch, layout.count, layout.slots))
    hidden = torch.rand(tokens.shape) < share
    return tokens.masked_fill(hidden, network.hidden), hidden


def told(
    network: TokenTransformer,
    texts: list[str] = TEXTS,
    dropped: bool = False,
    smaller: Tensor | None = None,
) -> Condition:
    return network.condition(texts, [dropped] * len(texts), smaller)


# ------------------------------------------------------------------------------------------------------------- symbols


@pytest.mark.parametrize("patch", [1, 2])
def test_logits_where_they_are_asked_for_are_the_rows_of_the_full_table(patch):
    network = model(patch)
    shown, asked = token_batch(network)
    states = network.states(shown, told(network))
    to_fp32 = network.logits(states, torch.ones_like(asked)).view(*asked.shape, VOCABULARY)
    assert torch.allclose(network.logits(states, asked), to_fp32[asked])
    assert network.logits(states, torch.zeros_like(asked)).shape == (0, VOCABULARY)


BODIES = {"transformer": None, "conformer": ConformerConfig(kernel=3)}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("patch", [1, 2])
def test_a_guess_is_the_logits_of_all_states_by_a_shorter_way(patch, body):
    network = model(patch, conformer=BODIES[body])
    shown, asked = token_batch(network)
    asked[1] = False  # of one example nothing is asked
    condition = network.condition(TEXTS, [False, True, False])
    to_fp32 = network.logits(network.states(shown, condition), asked)
    assert torch.allclose(network.logits_at(shown, asked, condition), to_fp32)
    thinking = rows_through(network.transformer.blocks[-1].feed)
    network.logits_at(shown, asked, condition)
    assert thinking == [int(asked.any(2).sum())], (
        "only the places of which something is asked think to the end"
    )


@pytest.mark.parametrize("body", BODIES)
def test_from_round_to_round_only_places_whose_symbols_changed_are_begun_anew(body):
    network, last = model(patch=2, conformer=BODIES[body]), FirstLayerCache()
    condition, (shown, asked) = told(network), token_batch(network)
    asking = rows_through(network.transformer.blocks[0].attention.to_query_key_value)
    changes = [[], [(0, 1)], [(0, 1), (2, 0), (2, 3)], [(e, p) for e in range(3) for p in range(4)]]
    for changed in changes:
        shown = shown.clone()
        for example, place in changed:
            shown[example, place, 1] = (shown[example, place, 1] + 1) % VOCABULARY
        made = network.logits_at(shown, asked, condition, last=last)
        assert torch.allclose(made, network.logits_at(shown, asked, condition))
    assert asking[::2] == [12, 4, 4, 12], (
        "all at first; then the changed ones, at least the four that a steady product needs"
    )


def test_slots_are_what_a_slow_loop_makes_of_them():
    network = model(patch=2)
    shown, asked = token_batch(network)
    states = network.states(shown, told(network))
    rows = []
    for example, place, slot in asked.nonzero().tolist():
        rows.append(network.heads[0]((states[example, place] @ network.to_cells[slot])[None])[0])
    assert torch.allclose(network.logits(states, asked), torch.stack(rows))


def test_the_head_judges_a_symbol_by_its_own_row_and_by_its_features():
    head, rows = model().heads[0], torch.randn(6, 24, dtype=torch.float64)
    slow = [
        head.own.weight @ row + FEATURES.double() @ (head.to_features.weight @ row) for row in rows
    ]
    assert torch.allclose(head(rows), torch.stack(slow))


@pytest.mark.parametrize("known", [None, FEATURES], ids=["names", "features"])
def test_each_slot_reads_its_symbols_from_tables_of_its_own(known):
    network = model(patch=2, known=known)
    shown, _ = token_batch(network)
    table = network.embedding.table.weight.view(4, VOCABULARY + 1, 24)
    slow = sum(table[slot][shown[..., slot]] for slot in range(4))
    if known is not None:
        described = torch.cat(
            [known, torch.zeros(1, 5)]
        ).double()  # a hidden symbol has no features
        matrices = network.embedding.from_features.weight.view(24, 4, 5)
        slow = slow + sum(described[shown[..., slot]] @ matrices[:, slot].T for slot in range(4))
    assert torch.allclose(network.embedding(shown), slow)
    assert not torch.allclose(network.embedding(shown.flip(-1)), slow)


def test_rows_by_slot_keep_their_order_also_where_a_slot_has_none():
    rows, matrices, slots = (
        torch.randn(7, 5),
        torch.randn(4, 5, 5),
        torch.tensor([3, 0, 3, 0, 1, 1, 3]),
    )
    through = [by_matrix(matrix) for matrix in matrices]
    assert torch.allclose(
        apart(rows, slots, through), torch.stack([r @ matrices[s] for r, s in zip(rows, slots)])
    )


@pytest.mark.parametrize("patch", [1, 2])
def test_every_shown_symbol_is_seen_by_every_asked_one(patch):
    network = model(patch, text=None)
    shown, asked = token_batch(network, batch=1)
    before = network.logits(network.states(shown, told(network, [""])), asked)
    for place, slot in (~asked[0]).nonzero().tolist():
        other = shown.clone()
        other[0, place, slot] = (other[0, place, slot] + 1) % VOCABULARY
        after = network.logits(network.states(other, told(network, [""])), asked)
        assert ((after - before).abs().amax(1) > 0).all()


def test_where_symbols_lie_matters():
    network = model(text=None)
    shown, asked = token_batch(network, batch=1)
    order = torch.randperm(16)
    before = network.logits(network.states(shown, told(network, [""])), torch.ones_like(asked))
    after = network.logits(
        network.states(shown[:, order], told(network, [""])), torch.ones_like(asked)
    )
    assert not torch.allclose(after, before[order])


def test_a_picture_is_guessed_the_same_whoever_its_neighbours_are():
    network = model(patch=2)
    shown, asked = token_batch(network)
    together = network.states(shown, told(network))
    for i, text in enumerate(TEXTS):
        assert torch.allclose(
            network.states(shown[i : i + 1], told(network, [text]))[0], together[i]
        )


# ---------------------------------------------------------------------------------------------------------------- text


def test_a_text_matters():
    network = model()
    shown, _ = token_batch(network)
    assert not torch.allclose(
        network.states(shown, told(network)), network.states(shown, told(network, TEXTS[::-1]))
    )


def test_a_longer_text_beside_it_changes_nothing_about_a_short_one():
    network = model()
    shown, _ = token_batch(network, batch=1)
    short = network.states(shown, told(network, ["x"]))
    beside = network.states(
        shown.expand(2, -1, -1), told(network, ["x", "a text that is longer by far"])
    )
    assert torch.allclose(beside[0], short[0])


def test_dropped_texts_are_all_alike():
    network = model()
    shown, _ = token_batch(network, batch=1)
    one, other = (
        network.states(shown, told(network, [text], dropped=True)) for text in ("a red circle", "x")
    )
    assert torch.allclose(one, other)
    assert not torch.allclose(one, network.states(shown, told(network, ["x"])))


def test_a_dropped_text_of_the_same_length_is_the_same_to_the_bit():
    network = model()
    shown, _ = token_batch(network, batch=1)
    one, other = (
        network.states(shown, told(network, [text], dropped=True)) for text in ("qqqq", "zzzz")
    )
    assert torch.equal(one, other)


def test_an_empty_text_is_no_text():
    """A network whose captions all say something meets them, or nothing: so an empty prompt must be
    that nothing."""
    network = model()
    shown, _ = token_batch(network, batch=1)
    empty, nothing = (
        network.states(shown, told(network, [""])),
        network.states(shown, told(network, ["x"], dropped=True)),
    )
    assert torch.allclose(empty, nothing)


def test_a_dropped_text_learns_nothing():
    network = model()
    network.states(token_batch(network)[0], told(network, dropped=True)).square().sum().backward()
    grads = [p.grad for p in network.text.parameters()]
    assert all(grad is None or (grad == 0).all() for grad in grads)


def test_a_condition_made_once_serves_every_round():
    network = model()
    condition = told(network)
    for _ in range(3):
        shown, _ = token_batch(network)
        assert torch.equal(network.states(shown, condition), network.states(shown, told(network)))


# --------------------------------------------------------------------------------------------- its states of the round before


def test_states_of_the_round_before_matter_only_if_it_remembers():
    for remembers in (True, False):
        network = model(self_condition=remembers)
        shown, _ = token_batch(network)
        condition = told(network)
        first = network.states(shown, condition)
        assert torch.equal(network.states(shown, condition, torch.zeros_like(first)), first)
        assert torch.equal(network.states(shown, condition, first), first) == (not remembers)


# ---------------------------------------------------------------------------------------------------- a smaller picture


@pytest.mark.parametrize(
    ("grid", "patch", "below"),
    [
        ((8, 8), 1, (4, 4)),
        ((8, 8), 2, (4, 4)),
        ((8, 8), 2, (2, 2)),
        ((8, 8), 2, (8, 8)),
        ((8, 8), 4, (4, 4)),
        ((4, 8), 1, (2, 2)),
    ],
)
def test_a_smaller_symbol_lies_under_its_own_places(grid, patch, below):
    layout = Layout(grid, patch=patch)
    smaller = TokenConditioner(
        TokenSpec(7, Layout(below), torch.randn(7, 3)), TokenSpec(VOCABULARY, layout), 6
    ).double()
    codes = torch.randint(7, (2, *below))
    x = smaller(codes).view(2, *layout.places, 6)
    for down in range(below[0]):
        for across in range(below[1]):
            other = codes.clone()
            other[:, down, across] = (other[:, down, across] + 1) % 7
            moved = (smaller(other).view(x.shape) - x).abs().amax(-1) > 0
            rows = torch.arange(layout.places[0]), torch.tensor(down * layout.places[0] / below[0])
            columns = (
                torch.arange(layout.places[1]),
                torch.tensor(across * layout.places[1] / below[1]),
            )
            height, dim = max(1, layout.places[0] // below[0]), max(1, layout.places[1] // below[1])
            in_rows = (rows[0] >= rows[1].floor()) & (rows[0] < rows[1].floor() + height)
            in_columns = (columns[0] >= columns[1].floor()) & (
                columns[0] < columns[1].floor() + dim
            )
            assert torch.equal(moved[0], in_rows[:, None] & in_columns)


def test_the_symbols_of_the_smaller_picture_change_the_guess():
    network = model(smaller=TokenSpec(7, Layout((2, 2))))
    shown, asked = token_batch(network)
    codes = torch.randint(7, (3, 2, 2))
    one = network.logits(network.states(shown, told(network, smaller=codes)), asked)
    other = network.logits(network.states(shown, told(network, smaller=(codes + 1) % 7)), asked)
    assert ((one - other).abs().amax(1) > 0).all()


def test_smaller_pictures_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="whole multiple"):
        TokenConditioner(TokenSpec(7, Layout((3, 3))), TokenSpec(VOCABULARY, Layout((4, 4))), 6)
    with pytest.raises(ValueError, match="whole multiple"):
        TokenConditioner(TokenSpec(7, Layout((2, 8))), TokenSpec(VOCABULARY, Layout((4, 4))), 6)


def test_a_smaller_picture_is_asked_for_and_otherwise_refused():
    for network, codes in (
        (model(), torch.zeros(3, 2, 2, dtype=torch.long)),
        (model(smaller=TokenSpec(7, Layout((2, 2)))), None),
    ):
        with pytest.raises(ValueError, match="two kinds of symbols"):
            told(network, smaller=codes)


# ------------------------------------------------------------------------------------------------- two streams in time


def in_time(
    places: int, place_ms: float, frames: int, frame_ms: float, levels: int = 2
) -> tuple[TokenSpec, TokenSpec]:
    return (
        TokenSpec(VOCABULARY, Layout((places,), levels), None, place_ms / 1000),
        TokenSpec(7, Layout((frames,)), torch.randn(7, 3), frame_ms / 1000),
    )


def heard_at(smaller: TokenConditioner, codes: Tensor, places: int) -> list[list[int]]:
    """For each coarser symbol, the places that it moves."""
    x, found = smaller(codes)[:, :places], []
    for frame in range(codes.shape[1]):
        other = codes.clone()
        other[:, frame] = (other[:, frame] + 1) % 7
        found.append(
            ((smaller(other)[:, :places] - x).abs().amax((0, 2)) > 0).nonzero().flatten().tolist()
        )
    return found


@pytest.mark.parametrize(
    ("place_ms", "frame_ms", "expected"),
    [
        (20, 20, [[0], [1], [2], [3], [4], [5]]),
        (20, 40, [[0, 1], [2, 3], [4, 5]]),
        (
            20,
            5,
            [
                [],
                [],
                [0],
                [],
                [],
                [],
                [1],
                [],
                [],
                [],
                [2],
                [],
                [],
                [],
                [3],
                [],
                [],
                [],
                [4],
                [],
                [],
                [],
                [5],
                [],
            ],
        ),
        (20, 30, [[0], [1, 2], [3], [4, 5]]),
    ],
    ids=["the same rate", "half of it", "four times", "three for two"],
)
def test_a_place_has_the_symbol_that_sounds_in_the_middle_of_its_time(place_ms, frame_ms, expected):
    """Where the middle falls between two, the later one."""
    tokens, below = in_time(6, place_ms, len(expected), frame_ms)
    smaller = TokenConditioner(below, tokens, 6).double()
    assert heard_at(smaller, torch.randint(7, (2, len(expected))), 6) == expected


def test_two_rates_come_together_at_any_length_also_where_the_last_frames_are_not_filled():
    """Of 130 ms there are 7 places of 20 and 5 frames of 30; of 5 frames that are filled, 8
    places."""
    config = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None, absolute_positions=False)
    network = awake(config.build(*in_time(7, 20, 5, 30))).double().eval()
    for places, frames in ((7, 5), (8, 5), (3, 2), (30, 20)):
        tokens = torch.randint(VOCABULARY, (1, places, 2))
        said = torch.randint(7, (1, frames))
        one, other = (
            network.states(tokens, network.condition([""], [False], codes))
            for codes in (said, (said + 1) % 7)
        )
        assert one.shape == (1, places, 24) and ((one - other).abs().amax(-1) > 0).all()


def test_where_what_is_said_has_ended_it_says_nothing():
    tokens, below = in_time(6, 20, 4, 30)
    smaller = TokenConditioner(below, tokens, 6).double()
    codes = torch.tensor([[1, 2, -1, -1]])
    x = smaller(codes)
    assert not x[:, 3:].any() and x[:, :3].any(-1).all()
    assert torch.equal(x[:, :3], smaller(torch.tensor([[1, 2, 3, 4]]))[:, :3])


def test_a_model_that_knows_its_places_is_asked_for_no_others():
    tokens, _ = in_time(6, 20, 4, 30)
    config = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None)
    network = awake(config.build(tokens)).double().eval()
    with pytest.raises((ValueError, RuntimeError), match="knows 6 places|must match"):
        network.states(torch.zeros(1, 7, 2, dtype=torch.long), network.condition([""], [False]))


def test_each_level_has_a_head_of_its_own_and_only_the_asked_rows_pass_through_it():
    tokens, _ = in_time(6, 20, 4, 30, levels=3)
    network = (
        awake(
            MaskedTransformerConfig(
                dim=24, depth=2, heads=2, text=None, absolute_positions=False
            ).build(tokens)
        )
        .double()
        .eval()
    )
    assert len(network.heads) == 3
    rows: dict[int, int] = {}
    for level, head in enumerate(network.heads):
        head.register_forward_hook(
            lambda _, given, __, level=level: rows.update({level: len(given[0])})
        )
    asked = torch.zeros(2, 6, 3, dtype=torch.bool)
    asked[0, 2:, 1], asked[1, 5, 2] = True, True
    states = torch.randn(2, 6, 24, dtype=torch.float64)
    logits = network.logits(states, asked)
    assert rows == {0: 0, 1: 4, 2: 1}
    torch.testing.assert_close(
        logits, torch.cat([network.heads[1](states[0, 2:]), network.heads[2](states[1, 5:])])
    )


# -------------------------------------------------------------------------------------------------------------- critics


def test_a_critic_of_its_own_believes_each_symbol_by_text_and_neighbours():
    critic = (
        awake(
            CriticConfig(dim=16, depth=1, heads=2).build(
                model(patch=2).config, TokenSpec(VOCABULARY, Layout((4, 4), patch=2))
            )
        )
        .double()
        .eval()
    )
    shown, _ = token_batch(critic, share=0.0)
    realness_logits = critic.realness_logits(critic.states(shown, told(critic)))
    assert realness_logits.shape == shown.shape
    assert not torch.allclose(
        critic.realness_logits(critic.states(shown, told(critic, TEXTS[::-1]))), realness_logits
    )
    other = shown.clone()
    other[0, 0, 0] = (other[0, 0, 0] + 1) % VOCABULARY
    moved = (critic.realness_logits(critic.states(other, told(critic))) - realness_logits).abs() > 0
    assert moved[0].all() and not moved[1:].any()


def test_a_critics_head_reads_the_models_states():
    network = model(patch=2)
    head = CriticHeadConfig(dim=8).build(network.config, network.tokens).double()
    shown, _ = token_batch(network, share=0.0)
    assert head.realness_logits(network.states(shown, told(network))).shape == shown.shape


def test_an_untrained_model_finds_all_symbols_about_as_likely():
    network = MaskedTransformerConfig(dim=24, depth=2, heads=2, text=None).build(
        TokenSpec(VOCABULARY, Layout((4, 4)))
    )
    shown, asked = token_batch(network)
    logits = network.logits(network.states(shown, told(network, [""] * 3)), asked)
    assert logits.abs().max() < 1 and (logits.std(1) > 0).all()
