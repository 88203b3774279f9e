"""Building blocks that several models share, independent of models, objectives and the engine."""
