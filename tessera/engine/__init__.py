"""The life of a run, for any medium: nothing in this folder knows a task, a model or a kind of data
by name."""
