"""A trained text-to-speech run in Python.

    speaker = Speaker.load("runs/audio-text2semantic")
    speech = speaker.speak("the old clock opens", voice="prompt.wav")
    speech.media[0].save("clock.wav")
    speaker.transcribe(speech.media[0])           # what the recogniser of the run reads

The run directory holds all three parts: text to semantic tokens, SoundStorm, which turns these into
the tokens of a codec in the voice of a recording, and the codec. A long text is spoken sentence by
sentence. Without a recording the voice of the first sentence is that of all others. SoundStorm
generates several candidates of each sentence, and the one is kept whose voice is most like that of
the recording and that the recogniser reads with the fewest errors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.api.generator import Generator, make_seeds, override
from tessera.api.tokenizer import Tokenizer
from tessera.data.errors import UnreadableFile
from tessera.metrics.text import character_error
from tessera.modalities.audio.ctc import CTCTokenizer
from tessera.modalities.audio.level import match_level, speech_level
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.soundstorm import SoundStormTaskConfig
from tessera.modalities.audio.text_to_semantic import predict_durations
from tessera.modalities.audio.text_to_semantic_task import TextToSemanticTask, describe_unreadable
from tessera.modalities.audio.voice_prompt import check_voice
from tessera.modalities.audio.voice_similarity import VoiceProfile, measure_voice, voice_distance
from tessera.objectives.generation import Generated, GenerationRequest, TokenPrompt
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun, Weights, format_repr, load_run
from tessera.sampling.guidance import Guidance
from tessera.text.characters import CharacterVocab, normalize_text

MAX_VOICE_SECONDS = 3.0
"""Of a longer recording of a voice, the first seconds are used."""
PAUSE_SECONDS = 0.25
"""The pause between two sentences."""
MIN_WORDS = 3
"""A part of a sentence that is too long for the model has at least this many words."""
CANDIDATES = 4
"""How many candidates of each sentence SoundStorm generates by default."""
ERROR_WEIGHT = 3.0
"""The distance of voices (`voice_similarity.py`) that counts as much as a character error of 1."""


@dataclasses.dataclass(frozen=True)
class VoicePrompt:
    """The tokens of a recording of a voice."""

    codes: Tensor
    """Of the codec, (1, frames, quantizers)."""
    semantic: Tensor
    """Semantic tokens, (1, frames)."""
    level: float
    """The level of its speech."""


class Speaker:
    def __init__(self, trained: TrainedRun, soundstorm: TrainedRun):
        self.trained, self.task = trained, get_task(trained)
        self.soundstorm = Generator(soundstorm)
        if not isinstance(soundstorm.run.task, SoundStormTaskConfig):
            raise UserError(f"The run in {soundstorm.directory.path} is not of audio-soundstorm.")
        check_same_tokens(self.task.tokenizers["tokenizer"], self.semantic)

    @classmethod
    def load(
        cls, run: str | Path, soundstorm: str | Path | None = None, weights: Weights = "ema"
    ) -> Speaker:
        """Load a run with the SoundStorm run in its directory, or with another one."""
        trained = load_run(run, weights)
        get_task(trained)
        path = trained.directory.dependencies / "soundstorm" if soundstorm is None else soundstorm
        if soundstorm is None and not Path(path).exists():
            raise UserError(
                f"The run in {run} was trained without SoundStorm and generates only tokens: "
                "give a run of audio-soundstorm with the same semantic tokens (--soundstorm RUN)."
            )
        return cls(trained, load_run(path, weights))

    def __repr__(self) -> str:
        characters = self.vocab.characters
        return format_repr(
            self, self.trained, {"step": self.trained.steps, "characters": characters}
        )

    def to(self, device: torch.device | str) -> Speaker:
        """Move all models to a device."""
        self.task.to(device)
        self.soundstorm.to(device)
        return self

    @property
    def semantic(self) -> Tokenizer:
        return self.soundstorm.tokenizers["semantic"]  # type: ignore[return-value]

    @property
    def codec(self) -> Tokenizer:
        return self.soundstorm.tokenizers["tokenizer"]  # type: ignore[return-value]

    @property
    def recognizer(self) -> CTCTokenizer:
        return self.semantic.model

    @property
    def vocab(self) -> CharacterVocab:
        return self.recognizer.vocab

    # ---- speech

    def speak(
        self,
        text: str,
        *,
        voice: str | Path | None = None,
        speed: float = 1.0,
        temperature: float | None = None,
        guidance: float | None = None,
        candidates: int = CANDIDATES,
        seed: int = 0,
    ) -> Generated:
        """Speak a text, in the voice of a recording if one is given.

        `guidance` above 1 leads away from other voices than that of the recording. Of each sentence
        several `candidates` are generated, and the best one is kept; 1 generates one, in less time.
        The result has one `Audio`, and the codes of the codec for each sentence.
        """
        if candidates < 1:
            raise UserError(f"candidates must be at least 1, got {candidates}.")
        sentences = self.split(text)
        sampling = override(
            self.task.config.sampling,
            {"speed": speed} | ({} if temperature is None else {"temperature": temperature}),
        )
        prompt = None if voice is None else self.read_voice(voice)
        parts: list[Audio] = []
        codes: list[Tensor] = []
        for sentence, own_seed in zip(sentences, make_seeds(seed, len(sentences)), strict=True):
            request = GenerationRequest(prompts=[sentence], seeds=[own_seed], sampling=sampling)
            with as_user_error(ValueError):
                semantic = self.task.generate(request)
            semantic = semantic[:, : int((semantic >= 0).sum())]
            seeds = make_seeds(own_seed, candidates)
            options = self.generate_codes(semantic, prompt, seeds, guidance)
            chosen, part = self.choose_candidate(options, sentence, prompt)
            if prompt is None:  # the other sentences have the voice of the first
                prompt = self.as_prompt(chosen[None], semantic, speech_level(part))
            codes.append(chosen)
            # What the models do not predict is missing, so that generated speech is quieter.
            parts.append(match_level(part, prompt.level))
        audio = join_audio(parts)
        settings: dict[str, object] = {
            "text": text,
            "sentences": sentences,
            "voice": None if voice is None else str(voice),
            "guidance": guidance,
            "candidates": candidates,
            "sampling": dataclasses.asdict(sampling),
        }
        return Generated([audio], codes, [text], settings)

    def split(self, text: str) -> list[str]:
        """Return the sentences of a text; those that are too long are split between words.

        Raises UserError for an empty text, and for characters that were not trained on.
        """
        vocab = self.vocab
        if not normalize_text(text):
            raise UserError("The text is empty: give some words to speak.")
        if vocab.find_unknown(text):
            raise UserError(describe_unreadable(self.task.model, text))
        sentences = [one for one in re.split(r"(?<=[.!?;:])\s+|\n+", text) if normalize_text(one)]
        return [part for one in sentences for part in self.split_long(one.strip())]

    def split_long(self, sentence: str) -> list[str]:
        """Split a sentence in halves until the model has enough characters and frames for it."""
        words, model = sentence.split(), self.task.model
        fits = model.text.fits(sentence) and self.expected_frames(sentence) <= model.max_len
        if fits or len(words) < 2 * MIN_WORDS:
            return [sentence]
        middle = len(words) // 2
        halves = (" ".join(words[:middle]), " ".join(words[middle:]))
        return [part for half in halves for part in self.split_long(half)]

    @torch.no_grad()
    def expected_frames(self, sentence: str) -> int:
        """Return the number of frames of a sentence at the usual speed."""
        condition = self.task.model.condition([sentence], [False])
        [durations] = predict_durations(condition)
        return sum(durations)

    def generate_codes(
        self,
        semantic: Tensor,
        prompt: VoicePrompt | None,
        seeds: list[int],
        guidance: float | None = None,
    ) -> Tensor:
        """Return codes of the codec for semantic tokens (1, frames): a candidate for each seed,
        (candidates, frames, quantizers)."""
        assert self.codec.seconds is not None and self.semantic.seconds is not None
        frames = round(semantic.shape[1] * self.semantic.seconds / self.codec.seconds)
        codes = semantic.new_zeros(1, frames, self.codec.num_quantizers)
        trim, condition = 0, semantic
        if prompt is not None:
            trim = prompt.codes.shape[1]
            codes = torch.cat([prompt.codes, codes], dim=1)
            condition = torch.cat([prompt.semantic, semantic], dim=1)
        is_generated = torch.arange(codes.shape[1], device=codes.device) >= trim
        start = TokenPrompt(
            codes=codes,
            mask=is_generated[None, :, None].expand_as(codes),
            cond_codes=condition,
            trim=trim,
        )
        chosen = None if guidance is None else Guidance(scale=guidance)
        request = GenerationRequest(
            prompts=[""] * len(seeds), seeds=seeds, start=start, guidance=chosen
        )
        with as_user_error(ValueError):
            return self.soundstorm.task.generate(request)[:, trim:]

    def choose_candidate(
        self, codes: Tensor, sentence: str, prompt: VoicePrompt | None
    ) -> tuple[Tensor, Audio]:
        """Return the best of the candidates (candidates, frames, quantizers), and its audio.

        It is the one with the lowest distance to the voice of the prompt, plus the character error
        of what the recogniser reads in it.
        """
        audio: list[Audio] = self.codec.to_media(codes)  # type: ignore[assignment]
        if len(audio) == 1:
            return codes[0], audio[0]
        profile = None if prompt is None else self.measure_prompt(prompt)
        expected = normalize_text(sentence)
        scores = [
            distance_to(profile, one)
            + ERROR_WEIGHT * character_error([self.transcribe(one)], [expected])
            for one in audio
        ]
        best = int(np.argmin(scores))
        return codes[best], audio[best]

    def measure_prompt(self, prompt: VoicePrompt) -> VoiceProfile | None:
        """Measure the voice of a prompt as the codec reconstructs it, as it does candidates."""
        [audio] = self.codec.to_media(prompt.codes)
        assert isinstance(audio, Audio)
        return measure_voice(audio)

    # ---- voices

    def read_voice(self, path: str | Path) -> VoicePrompt:
        """Encode a recording of a voice; raise UserError if there is no voice in it."""
        audio = check_voice(path)
        config: SoundStormTaskConfig = self.soundstorm.trained.run.task  # type: ignore[assignment]
        seconds = MAX_VOICE_SECONDS if audio.seconds > MAX_VOICE_SECONDS else None
        codes, semantic = config.encode_recording(str(path), seconds, self.soundstorm)
        return VoicePrompt(codes, semantic, speech_level(audio))

    def as_prompt(self, codes: Tensor, semantic: Tensor, level: float) -> VoicePrompt:
        """Return the first seconds of tokens as a prompt, in whole frames of both tokenizers."""
        hops = [self.codec.hop or 1, self.semantic.hop or 1]
        step, available = (
            math.lcm(*hops),
            min(codes.shape[1] * hops[0], semantic.shape[1] * hops[1]),
        )
        rate_hz = self.recognizer.rate_hz
        samples = min(available, round(MAX_VOICE_SECONDS * rate_hz)) // step * step
        return VoicePrompt(codes[:, : samples // hops[0]], semantic[:, : samples // hops[1]], level)

    def transcribe(self, audio: Audio | str | Path) -> str:
        """Return what the recogniser of the run reads in a recording."""
        if not isinstance(audio, Audio):
            with as_user_error(UnreadableFile):
                audio = Audio.load(audio)
        return self.recognizer.recognize(self.semantic.encode(audio))[0]


def get_task(trained: TrainedRun) -> TextToSemanticTask:
    """Return the task of a run of audio-text2semantic; raise UserError for other runs."""
    if not isinstance(trained.task, TextToSemanticTask):
        raise UserError(
            f"The run is of the recipe {trained.run.recipe!r}, which cannot speak: give a run of "
            "audio-text2semantic."
        )
    return trained.task


def check_same_tokens(own: object, other: Tokenizer) -> None:
    if getattr(own, "fingerprint", None) != other.fingerprint:
        raise UserError(
            "The SoundStorm run was trained on the tokens of another semantic tokenizer: give one "
            "that was trained with the same run of audio-semantic."
        )


def distance_to(profile: VoiceProfile | None, audio: Audio) -> float:
    """Return the distance to a voice, infinite for silence; 0 if there is nothing to compare."""
    if profile is None:
        return 0.0
    own = measure_voice(audio)
    return math.inf if own is None else voice_distance(own, profile)


def join_audio(parts: list[Audio]) -> Audio:
    """Join the audio of sentences with pauses between them."""
    pause = np.zeros((1, round(PAUSE_SECONDS * parts[0].rate_hz)), np.float32)
    joined = [parts[0].samples]
    for part in parts[1:]:
        joined += [pause, part.samples]
    return Audio(np.concatenate(joined, axis=1), parts[0].rate_hz)
