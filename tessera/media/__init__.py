"""The media themselves: load, save, show. Nothing here learns, and nothing here imports torch."""
