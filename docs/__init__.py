"""The pages of documentation, and what writes those of them that are made of the code itself."""
