"""Running plans on a device: launches, scratch memory, graphs, calls kept ready."""
