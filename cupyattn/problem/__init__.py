"""What is asked: options, checks, masks, rotations; resolved to one record."""
