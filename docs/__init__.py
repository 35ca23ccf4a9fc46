"""The pages of documentation, and commands that write pages from the code."""
