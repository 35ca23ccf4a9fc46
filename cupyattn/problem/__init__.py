"""The description of a call: options, checks, masks, rotations; resolved to one record."""
