"""Sources: numbered examples of a medium (`len`, `name(index)`, `item(index, rng)`,
`collate(examples)`)."""
