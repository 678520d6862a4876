"""Programs around TracIn: building and asking an index, and what attributions are worth."""
