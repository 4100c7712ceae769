"""Pure generators: yield a batch of effects, receive the answers. No I/O, no clock, no ids drawn here."""
