"""Data that no modality owns: discovery of files, captions, datasets, loaders and stored tokens."""
