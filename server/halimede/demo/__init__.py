"""`python -m halimede.demo`: train a small model, serve it, ask it over both protocols, compare and measure."""
