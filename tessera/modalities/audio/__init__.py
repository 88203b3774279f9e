"""Audio: neural codecs, semantic tokens and SoundStorm."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="audio",
    suffixes=(
        ".wav",
        ".flac",
        ".ogg",
        ".oga",
        ".opus",
        ".mp3",
        ".aiff",
        ".aif",
        ".m4a",
        ".aac",
        ".wma",
        ".mka",
        ".g722",
    ),
    media="tessera.modalities.audio.media:Audio",
    inspect="tessera.modalities.audio.inspect:inspect_folder",
    measure="tessera.modalities.audio.io.files:measure_file",
    recipes=(
        Recipe(
            build="tessera.modalities.audio.recipes:audio_codec",
            task="tessera.modalities.audio.reconstruction:AudioTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="tokenizer",
            metric="si_sdr",
            media_inputs=("data", "start", "seconds"),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_semantic",
            task="tessera.modalities.audio.semantic_reconstruction:SemanticTokenizerConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="tokenizer",
            metric="explained_variance",
            caption_flags=(("features", "ctc"),),
            media_inputs=("data",),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_soundstorm",
            task="tessera.modalities.audio.soundstorm:SoundStormTaskConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("like", "prompt_audio", "seconds"),
        ),
        Recipe(
            build="tessera.modalities.audio.recipes:audio_text2semantic",
            task="tessera.modalities.audio.text_to_semantic_task:TextToSemanticTaskConfig",
            data="tessera.modalities.audio.dataset:AudioDataConfig",
            kind="generator",
            metric="cross_entropy",
            suggested="captioned",
            captions_are="transcripts",
        ),
    ),
    demo=(
        DemoStep(
            description="An audio codec is trained on 2,000 utterances of five synthetic voices.",
            command=(
                *("train", "audio-codec", "--out", "{out}/audio-codec"),
                *("--data.synthetic-content", "speech", "--steps", "600"),
            ),
        ),
        DemoStep(
            description="A recogniser is trained on what they say; its tokens are the semantic "
            "tokens.",
            command=(
                *("train", "audio-semantic", "--out", "{out}/audio-semantic"),
                *("--features", "ctc", "--data.seconds", "2", "--steps", "400"),
                *("--batch-size", "12", "--task.model.dim", "96"),
                *("--task.model.codebook-start", "150"),
            ),
        ),
        DemoStep(
            description="SoundStorm learns to turn semantic tokens into those of the codec, in the "
            "voice of a prompt.",
            command=(
                *("train", "audio-soundstorm", "--out", "{out}/audio-soundstorm"),
                *("--tokenizer", "{out}/audio-codec", "--semantic", "{out}/audio-semantic"),
                *("--data.synthetic-content", "speech", "--steps", "500", "--batch-size", "8"),
                *("--task.model.depth", "3"),
            ),
        ),
        DemoStep(
            description="Text to speech learns to turn text into semantic tokens.",
            command=(
                *("train", "audio-text2semantic", "--out", "{out}/audio-text2semantic"),
                *("--tokenizer", "{out}/audio-semantic", "--soundstorm", "{out}/audio-soundstorm"),
                *("--data.seconds", "2", "--steps", "500", "--batch-size", "12"),
            ),
        ),
        DemoStep(
            description="It speaks, and the recogniser reads what it said.",
            command=(
                *("speak", "{out}/audio-text2semantic", "--text", "mee sootah eh maw. tee moo sah"),
            ),
        ),
    ),
    demo_next=(*("speak", "{out}/audio-text2semantic", "--text", "soo mah teh", "--speed", "0.8"),),
)
