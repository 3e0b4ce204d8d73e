"""`python -m halimede.demo`: serve a small model and python models, ask, compare and measure; kill one, ask again."""
