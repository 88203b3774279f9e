"""The spectral network: the MDCT is exact, also in chunks, and the decoder is late by its hop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tessera.metrics.audio import si_sdr_B
from tessera.modalities.audio.mdct import MDCT, InverseMDCT, mdct_basis
from tessera.modalities.audio.recipes import audio_codec
from tessera.modalities.audio.spectral_codec import (
    LEVEL_SCALE,
    GainShapeLinear,
    SpectralCodecConfig,
    SpectralInput,
    band_weights,
)
from tessera.nn.causal_conv import StreamingState
from tests.modalities.audio.test_codec import SPECTRAL, build_codec, random_audio


@pytest.mark.parametrize(("hop", "stack"), [(5, 2), (10, 1), (4, 3)])
def test_the_inverse_mdct_gives_the_samples_back_late_by_one_hop(hop, stack):
    forward, inverse = MDCT(hop, stack).double(), InverseMDCT(hop, stack).double()
    samples_BN1 = random_audio(120).mT
    audio_BN1 = inverse(forward(samples_BN1, StreamingState()), StreamingState())
    torch.testing.assert_close(audio_BN1[:, hop:], samples_BN1[:, :-hop], rtol=0, atol=1e-6)


def test_the_mdct_is_orthonormal():
    basis_Wh = mdct_basis(6)
    torch.testing.assert_close(basis_Wh.mT @ basis_Wh, torch.eye(6, dtype=torch.float64))
    overlap = basis_Wh[6:].mT @ basis_Wh[:6]  # neighbouring windows, in the half that they share
    torch.testing.assert_close(overlap, torch.zeros_like(overlap))


def test_a_tone_is_in_the_coefficient_of_its_frequency():
    tone_BN1 = torch.sin(torch.pi * 12.5 / 40 * torch.arange(400))[None, :, None]
    energy = MDCT(40, 1)(tone_BN1, StreamingState())[0, 2:].square().mean(0)
    assert energy.argmax() == 12 and energy[10:15].sum() > 0.99 * energy.sum()


def test_decoded_chunks_are_late_by_one_mdct_hop_and_end_complete():
    model = build_codec(SPECTRAL)
    codes = model.encode(random_audio(70))
    sizes = [chunk.shape[2] for chunk in model.decode_chunks(codes.split([2, 4, 1], dim=1))]
    assert sizes == [15, 40, 10, 5]


def test_twice_the_amplitude_doubles_coefficients_and_raises_all_levels_alike():
    layer = SpectralInput(replace(SPECTRAL, mdct_hop=20, stack=1, bands=6)).double()
    audio_BN1 = random_audio(200).mT
    quiet, loud = (layer(level * audio_BN1, StreamingState()) for level in (0.1, 0.2))
    torch.testing.assert_close(2 * quiet[..., :20], loud[..., :20])
    difference = (loud - quiet)[:, 1:, 20:]
    torch.testing.assert_close(
        difference, torch.full_like(difference, LEVEL_SCALE * math.log(4)), rtol=1e-2, atol=0
    )


def test_levels_of_a_tone_do_not_depend_on_its_phase():
    time = torch.arange(480, dtype=torch.float64)
    layer = SpectralInput(replace(SPECTRAL, mdct_hop=40, stack=1, bands=8)).double()
    tones_BN1 = torch.stack(
        [0.5 * torch.sin(0.9 * time + phase) for phase in (0.0, 1.0, 2.0)]
    ).unsqueeze(2)
    frames = layer(tones_BN1, StreamingState())[:, 2:-1]
    levels, coefficients = frames[..., 40:], frames[..., :40]
    loudest = int(levels[0, 0].argmax())
    assert (levels[..., loudest] - levels[0, 0, loudest]).abs().max() < 0.01
    assert (coefficients[0] - coefficients[1]).abs().max() > 10


def test_every_coefficient_belongs_to_its_bands_as_a_whole():
    weights_hK = band_weights(160, 40)
    torch.testing.assert_close(weights_hK.sum(1), torch.ones(160))
    centres_K = (weights_hK * torch.arange(160)[:, None]).sum(0) / weights_hK.sum(0)
    used_K = weights_hK.sum(0) > 0
    assert (centres_K[used_K].diff() > 0).all(), "bands are ordered by frequency"
    assert weights_hK[:10].any(1).all() and used_K.sum() > 30


def test_the_gain_of_a_band_scales_its_coefficients():
    torch.manual_seed(0)
    config = replace(SPECTRAL, mdct_hop=20, stack=2, bands=4)
    layer, state = GainShapeLinear(config), torch.randn(1, 3, config.dim)
    before = layer(state, StreamingState())
    with torch.no_grad():
        layer.log_gain.bias.view(2, 4)[1] = math.log(3)  # all bands of the second MDCT frame
        after = layer(state, StreamingState())
        torch.testing.assert_close(after[..., :20], before[..., :20])
        torch.testing.assert_close(after[..., 20:], 3 * before[..., 20:])
        layer.log_gain.bias.fill_(1e4)
        assert layer(state, StreamingState()).isfinite().all()


def test_a_spectral_codec_overfits_tones():
    torch.manual_seed(0)
    config = SpectralCodecConfig(mdct_hop=20, dim=48, encoder_depth=1, decoder_depth=2)
    model, time = config.build(), torch.arange(1600) / 8000
    audio = (
        0.3 * torch.sin(2 * torch.pi * torch.tensor([[220.0], [330.0], [700.0]]) * time)[:, None]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(120):
        optimizer.zero_grad()
        output = model.decode_latent(model.encode_latent(audio))
        (output - audio).abs().mean().backward()
        optimizer.step()
    assert si_sdr_B(output.detach(), audio).mean() > 20


def test_emphasis_of_the_input_is_undone_in_the_output():
    factors = SPECTRAL.emphasis()
    assert factors[-1] > 5 * factors[0] and len(factors) == SPECTRAL.mdct_hop
    config = replace(SPECTRAL, mdct_hop=4, stack=2, dim=8, encoder_depth=0, decoder_depth=0)
    model, audio = config.build(), random_audio(80).float()
    with torch.no_grad():
        model.encoder[-1].weight.copy_(torch.eye(8, model.encoder[-1].in_features))
        model.decoder[0].weight.copy_(torch.eye(8))
        output = model.decode_latent(model.encode_latent(audio))
    # The last MDCT frame is decoded without the next one.
    torch.testing.assert_close(output[..., :-4], audio[..., :-4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", ["16000", "24000", "44100", "48000"])
def test_codec_has_fifty_frames_per_second_at_any_rate(rate):
    run = audio_codec("small", network="spectral", rate=rate)
    model, rate_hz = run.task.model, int(rate)
    assert run.data.rate_hz == run.task.reconstruction.rate_hz == rate_hz
    assert rate_hz / model.hop == 50 and model.grid(run.data) == (50,)
    codec = replace(model, dim=8, encoder_depth=0, decoder_depth=0).build()
    assert codec(torch.zeros(1, 1, rate_hz)).output.shape == (1, 1, rate_hz)


@pytest.mark.parametrize(
    "setting",
    ["mdct_hop", "stack", "dim", "kernel_size", "expansion", "bands", "decoder_depth", "tilt"],
)
def test_invalid_settings_give_an_error(setting):
    with pytest.raises(ValueError, match=f"{setting} must be at least"):
        replace(SPECTRAL, **{setting: -1})
