"""One thin file a training framework; each is imported by name, so that none is needed to use another."""
