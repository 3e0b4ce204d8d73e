"""`python -m halimede.demo`: serve a small model and python models, query, compare and measure them; kill a worker."""
