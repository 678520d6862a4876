"""Models of transformers: their families, and commands that look into real ones."""
