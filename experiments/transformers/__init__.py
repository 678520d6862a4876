"""Programs on transformers: real models that packages bring, and models of the user's own."""
